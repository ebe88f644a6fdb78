"""The file that an agent writes: one JSON object a line, each with its "kind".

    header   what the process is: pid, rank, versions, device, where times come from
    model    what is trained, by which systems; once, before the first measured step
    restart  another training began: it and its device replace the model, the steps and what is missing so far
    step     a `StepRow`
    lines    what `FrameSampler.document` returns of the measured steps
    missing  a field of the profile document that this process cannot fill, and why
    end      "measured" (all steps were seen, the agent is gone), "exit" or "failed", which has an error beside it

Fields in `_ns` are CLOCK_MONOTONIC. Each line is written at once; the last one may be torn where a process was killed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from zftune import agent, variables
from zftune.agent.recorder import StepRow

_ROW = tuple(field.name for field in fields(StepRow))


@dataclass(frozen=True, slots=True)
class Settings:
    """What the parent asks for."""

    folder: Path
    warmup: int
    steps: int
    stop: bool = False
    """Whether it is ended by SIGTERM when all steps are measured."""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Settings:
        """As `zftune.agent.environment` set them.

        Raises:
            KeyError: a variable is missing.
            ValueError: a number is none.
        """
        return cls(
            Path(environ[variables.DIR]),
            int(environ[variables.WARMUP]),
            int(environ[variables.STEPS]),
            environ.get(variables.STOP) == "1",
        )


class RecordFile:
    """This process's file; made with its header when the first line is written.

    After a `restart()` lines are held back until they say as much as those that they replace.
    """

    def __init__(self, folder: Path, header: Callable[[], Mapping[str, Any]]) -> None:
        self._folder = folder
        self._header = header
        self._file: int | None = None
        self._pid = os.getpid()
        self._held: list[tuple[str, Mapping[str, Any]]] | None = None
        self._measured = self._replaced = 0  # measured steps: since the last restart, and in the file before it

    def write(self, kind: str, **values: Any) -> None:
        """Append a line.

        Raises:
            OSError: the folder is gone, or the disk is full.
        """
        if self._held is not None:
            self._held.append((kind, values))
            return
        if self._file is None:
            header = {"protocol": agent.PROTOCOL, "pid": self._pid, **self._header()}
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._file = os.open(self._folder / f"agent-{self._pid}.jsonl", flags, 0o600)
            os.fchmod(self._file, 0o600)  # whatever the script's umask left of it
            self._line("header", header)
        self._line(kind, values)

    def step(self, row: StepRow) -> None:
        self.write("step", **{name: getattr(row, name) for name in _ROW})
        self._measured += row.measured
        if self._held is not None and self._measured >= self._replaced:
            held, self._held = self._held, None
            for kind, values in held:
                self._line(kind, values)

    def restart(self, **values: Any) -> None:
        """Let what follows replace what was written, once it has as many measured steps."""
        if self._held is None:
            self._replaced = self._measured
        self._measured = 0
        if self._file is not None:
            self._held = [("restart", values)]

    def missing(self, field: str, reason: str) -> None:
        """Append why a field of the profile document will be null."""
        self.write("missing", field=field, reason=" ".join(reason.split()))

    def end(self, reason: str, error: str | None = None) -> None:
        """Append the last line and close the file; what is held back is dropped."""
        self._held = None
        told = {} if error is None else {"error": " ".join(error.split())}
        self.write("end", reason=reason, **told, ns=time.monotonic_ns())
        self.close()

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _line(self, kind: str, values: Mapping[str, Any]) -> None:
        assert self._file is not None
        line = json.dumps({"kind": kind, **values}, separators=(",", ":")).encode() + b"\n"
        while line:  # a full disk takes a part first, then raises
            line = line[os.write(self._file, line) :]
