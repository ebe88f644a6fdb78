"""Finished runs, a line each: a run that is killed costs only itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from convergence.setting import Setting


def digest_of(description: Mapping[str, Any]) -> str:
    """Names a world: figures of different worlds do not compare."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:12]


@dataclass
class Store:
    """Runs of one world in a file of JSON lines; lines of other worlds stay where they are, unread.

    A line is `{"world": digest, ...}` with the world's description, with a session (when, on what, which code) or with
    a run and its session's number. The last line of a setting counts.
    """

    file: Path
    description: Mapping[str, Any]
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    _sessions: int = 0

    def __post_init__(self) -> None:
        self.world = digest_of(self.description)
        self._described = False
        self._session: int | None = None
        for line in self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []:
            self._read(line)

    def _read(self, line: str) -> None:
        try:
            record: dict[str, Any] = json.loads(line)
        except ValueError:
            return  # the last line of a run that was killed
        if "session" in record and "provenance" in record:
            self._sessions = max(self._sessions, record["session"] + 1)
        if record.get("world") != self.world:
            return
        self._described |= "description" in record
        if "key" in record:
            self.runs[record["key"]] = record["figures"]

    def get(self, setting: Setting) -> dict[str, Any] | None:
        """A finished run's figures."""
        return self.runs.get(setting.key)

    def put(self, setting: Setting, figures: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
        """Keep a run. `provenance` is written once for each opened store."""
        lines: list[dict[str, Any]] = []
        if not self._described:
            lines.append({"world": self.world, "description": self.description})
        if self._session is None:
            self._session, self._sessions = self._sessions, self._sessions + 1
            lines.append({"world": self.world, "session": self._session, "provenance": provenance})
        run = {"world": self.world, "session": self._session, "key": setting.key, "setting": asdict(setting)}
        lines.append({**run, "figures": _rounded(figures)})
        self.file.parent.mkdir(parents=True, exist_ok=True)
        torn = self.file.exists() and not self.file.read_bytes().endswith(b"\n") and self.file.stat().st_size > 0
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write("\n" * torn + "".join(json.dumps(line) + "\n" for line in lines))
        self._described = True
        self.runs[setting.key] = json.loads(json.dumps(_rounded(figures)))


def _rounded(value: Any) -> Any:
    """Seven digits of every number: far below what one run differs from the next by."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, Mapping):
        return {key: _rounded(part) for key, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list | tuple) else value
