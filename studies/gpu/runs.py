"""Parts one after the other, each in a process of its own that is killed at its limit, and the summary of all."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpu.parts import NO_GPU, Part
from gpu.record import SIMULATED, Status, read_json, status_of, write_json

HOLDS, BROKEN, BAD_INPUT, INCOMPLETE = 0, 1, 2, 3
Work = Callable[[str, Path, float], int]
"""Of a part's name, the path of its results and its seconds; gives the exit code of its process."""
_CRASHED = 70
_POLL_S = 0.02
_GRACE_S = 3.0
"""That the whole keeps for its own end."""


@dataclass(slots=True)
class Outcome:
    """What has become of a part."""

    part: str
    status: Status
    seconds: float = 0.0
    reason: str | None = None
    """Why it did not run, or not to its end."""
    broken: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    figures_of: str = ""


class NoGpuHereError(Exception):
    """A part found no GPU."""


class Run:
    """Runs parts one after the other, and keeps the summary.

    Args:
        folder: of the results.
        minutes: for all parts together.
        work: runs the part of a name, in its own process.
        simulated: whether figures are of no GPU.
        clock: seconds, for all limits.
    """

    def __init__(
        self,
        folder: Path,
        minutes: float,
        work: Work,
        *,
        simulated: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self.simulated = simulated
        self.outcomes: list[Outcome] = []
        self._work = work
        self._clock = clock
        self._ends = clock() + 60 * minutes
        self._pid = self._returncode = 0
        self._facts: dict[str, Any] = {"figures_of": SIMULATED if simulated else "this machine's GPU"}
        folder.mkdir(parents=True, exist_ok=True)

    def say(self, name: str, fact: Any) -> None:
        """Add a fact to the summary."""
        self._facts[name] = fact

    def take(self, part: Part) -> Outcome:
        """Run a part, or leave it out where too little time is left; the summary is on disk then.

        Raises:
            NoGpuHereError: there is none.
        """
        left = self._ends - self._clock() - _GRACE_S
        if left < part.least_s:
            reason = f"{max(0.0, left):.0f} s were left, it needs {part.least_s:.0f}"
            outcome = Outcome(part.name, "left out", reason=reason)
        else:
            try:
                outcome = self._ran(part, min(part.limit_s, left))
            except (KeyboardInterrupt, SystemExit):
                self._note(Outcome(part.name, "stopped", reason="the script was ended"))
                raise
        self._note(outcome)
        return outcome

    def _note(self, outcome: Outcome) -> None:
        outcome.figures_of = self._facts["figures_of"]
        self.outcomes.append(outcome)
        self.keep()

    def _ran(self, part: Part, limit_s: float) -> Outcome:
        path = self.folder / f"{part.name}.json"
        path.unlink(missing_ok=True)  # of an earlier run
        began = self._clock()
        killed = self._wait_for(part, path, limit_s)
        document, returncode = read_json(path), self._returncode
        if returncode == NO_GPU and document is not None:
            raise NoGpuHereError(document["refused"])
        outcome = Outcome(
            part.name,
            status_of(document, killed=killed, returncode=returncode),
            round(self._clock() - began, 1),
        )
        if document is not None:
            outcome.broken = [name for name, each in document["invariants"].items() if not each["holds"]]
            outcome.failed, outcome.absent = document["failed"], document["absent"]
            outcome.reason = document["refused"]
        if killed:
            outcome.reason = f"it was ended at its limit of {limit_s:.0f} s"
        elif outcome.reason is None and returncode:
            outcome.reason = f"its process ended with {returncode}; see {part.name}.log"
        return outcome

    def _wait_for(self, part: Part, path: Path, limit_s: float) -> bool:
        """Run a part's process; whether it had to be killed. Nothing that it started is left."""
        ends = self._clock() + limit_s
        sys.stdout.flush()
        self._pid = os.fork()  # torch is imported once, in a process that never calls CUDA
        if self._pid == 0:
            os._exit(self._in_child(part, path, limit_s))
        with suppress(OSError):  # the child may have done it
            os.setpgid(self._pid, self._pid)
        try:
            while self._clock() < ends:
                pid, status = os.waitpid(self._pid, os.WNOHANG)
                if pid:
                    self._returncode = os.waitstatus_to_exitcode(status)
                    return False
                time.sleep(_POLL_S)
            return True
        finally:
            self.end_process()

    def _in_child(self, part: Part, path: Path, limit_s: float) -> int:
        code = _CRASHED
        try:
            os.setpgid(0, 0)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            log = os.open(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            code = self._work(part.name, path, limit_s)
        except BaseException:  # noqa: BLE001 - the parent goes on with the next part
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
        return code

    def end_process(self) -> None:
        """Kill what belongs to the part that runs, if one does."""
        if self._pid:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(self._pid, 0)
            self._pid = 0

    @property
    def code(self) -> int:
        """What the script ends with."""
        statuses = {outcome.status for outcome in self.outcomes}
        if "broken" in statuses:
            return BROKEN
        return HOLDS if statuses <= {"done"} else INCOMPLETE

    def figures(self) -> dict[str, dict[str, Any]]:
        """Of every part that has some."""
        documents = {each.part: read_json(self.folder / f"{each.part}.json") for each in self.outcomes}
        return {part: document["figures"] for part, document in documents.items() if document is not None}

    def keep(self, **more: Any) -> None:
        """Write the summary."""
        parts = [asdict(outcome) for outcome in self.outcomes]
        document = {**self._facts, **more, "code": self.code, "parts": parts, "figures": self.figures()}
        write_json(self.folder / "summary.json", document)
