"""What a part found: on disk after every measurement, so that a kill loses only the one that was going on."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

SIMULATED = "simulated: no figure of a GPU"
Status = Literal["done", "broken", "failed", "could not run", "stopped", "left out"]


class UnavailableError(Exception):
    """Something that a measurement needs is not here; the message is a reason for the reader."""


class Record:
    """One part's document.

    Args:
        path: of its file, which is always whole.
        part: its name.
        simulated: whether there is no GPU behind the figures.
        limit_s: seconds that the part may take, from now.
    """

    def __init__(self, path: Path, part: str, *, simulated: bool = False, limit_s: float = float("inf")) -> None:
        self.path = path
        self._ends = time.monotonic() + limit_s
        self._began = time.monotonic()
        self._document: dict[str, Any] = {
            "part": part,
            "figures_of": SIMULATED if simulated else "this machine's GPU",
            "ended": False,
            "seconds": 0.0,
            "refused": None,
            "figures": {},
            "invariants": {},
            "absent": {},
            "failed": {},
        }
        self._write()

    @property
    def remaining_s(self) -> float:
        """Seconds that are left to the part."""
        return self._ends - time.monotonic()

    def note(self, name: str, figure: Any) -> None:
        """Keep a figure, or a mapping of some."""
        self._document["figures"][name] = figure
        self._write()

    def hold(self, name: str, holds: bool, found: Any = None) -> None:
        """Keep whether an invariant holds, and what was found."""
        self._document["invariants"][name] = {"holds": bool(holds), "found": found}
        self._write()

    def absent(self, name: str, reason: str) -> None:
        """Say why there is no such figure, where that is no fault."""
        self._document["absent"][name] = reason
        self._write()

    def failed(self, name: str, error: BaseException | str) -> None:
        """Say that a measurement ended in an error."""
        self._document["failed"][name] = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self._write()

    def measure(self, name: str, measurement: Callable[[], Any], *, needs_s: float = 0.0) -> Any:
        """Take one measurement and keep what it gives; where it fails that is kept, and the next one goes on.

        Args:
            name: of what is measured.
            measurement: gives the figures; None: it has kept them itself.
            needs_s: seconds that have to be left for it.

        Returns:
            The figures; None without any.
        """
        if self.remaining_s < needs_s:
            self.absent(name, f"{max(0.0, self.remaining_s):.0f} s were left, it needs {needs_s:.0f}")
            return None
        try:
            figures = measurement()
        except UnavailableError as error:
            self.absent(name, str(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, the other measurements go on
            traceback.print_exc(file=sys.stderr)
            self.failed(name, error)
        else:
            if figures is not None:
                self.note(name, figures)
            return figures
        return None

    def refuse(self, reason: str) -> None:
        """Say that the part cannot run here."""
        self._document["refused"] = reason
        self._write()

    def end(self) -> None:
        """Say that the part came to its end."""
        self._document["ended"] = True
        self._write()

    def _write(self) -> None:
        self._document["seconds"] = round(time.monotonic() - self._began, 2)
        write_json(self.path, self._document)


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """All of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(document, indent=1, default=str) + "\n", encoding="utf-8")
    unfinished.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """A document; None where there is none."""
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document


def figures_of(folder: Path, part: str) -> dict[str, Any]:
    """What another part found so far; {} where it did not run."""
    return dict((read_json(folder / f"{part}.json") or {}).get("figures", {}))


def status_of(document: Mapping[str, Any] | None, *, killed: bool, returncode: int) -> Status:
    """What has become of a part: a broken invariant comes before everything else.

    Args:
        document: what is on disk of it.
        killed: whether its time was over.
        returncode: of its process.
    """
    if document is None:
        return "stopped" if killed else "could not run"
    if any(not each["holds"] for each in document["invariants"].values()):
        return "broken"
    if killed:
        return "stopped"
    if document["refused"] is not None:
        return "could not run"
    return "done" if document["ended"] and not document["failed"] and returncode == 0 else "failed"
