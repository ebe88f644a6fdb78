"""One process run of the command under the agents: its ranks ask, train, and stop on all ranks at the same step."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from zftune import agent
from zftune.agent.trial import APPLY, EXIT, STOP, TRIAL, write_whole
from zftune.errors import BadInputError, ProfileError
from zftune.profile.command.child import SupervisedProcess, held_signal, held_signals
from zftune.profile.command.document import Seen, nothing_recorded
from zftune.profile.command.keeper import FORWARDED, release_locks
from zftune.profile.command.records import Rank, measured, read_records
from zftune.restarts.scratch import Outside, Scratch, surroundings

_OFFLINE_ENV = {
    "HF_HUB_OFFLINE": "1",  # no upload, and no download either: the cache has what the training needs
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "WANDB_MODE": "offline",
    "COMET_MODE": "offline",
    "COMET_START_ONLINE": "0",
    "CLEARML_OFFLINE_MODE": "1",
    "NEPTUNE_MODE": "offline",
    "SWANLAB_MODE": "disabled",
    "DVC_STUDIO_OFFLINE": "true",
    "DVCLIVE_SAVE_DVC_EXP": "false",
}
_FOLDERS = {
    "WANDB_DIR": "wandb",
    "TENSORBOARD_LOGGING_DIR": "tensorboard",
    "COMET_OFFLINE_DIRECTORY": "comet",
    "CLEARML_CACHE_DIR": "clearml",
}
_SECRETS = ("WANDB_API_KEY", "COMET_API_KEY", "NEPTUNE_API_TOKEN", "CLEARML_API_SECRET_KEY", "SWANLAB_API_KEY")
"""Without them nothing is sent even where a script says online."""


def harmless(base: Mapping[str, str], trackers: Path, cwd: Path) -> dict[str, str]:
    """The environment of a trial.

    Args:
        base: the user's.
        trackers: a folder for what trackers write; exists.
        cwd: the directory in which the trial runs.
    """
    kept = {name: value for name, value in base.items() if name not in _SECRETS}
    kept |= _OFFLINE_ENV | {name: str(trackers / folder) for name, folder in _FOLDERS.items()}
    for name in ("WANDB_DIR", "COMET_OFFLINE_DIRECTORY", "TENSORBOARD_LOGGING_DIR", "CLEARML_CACHE_DIR"):
        (trackers / _FOLDERS[name]).mkdir(exist_ok=True)
    kept["MLFLOW_TRACKING_URI"] = (trackers / "mlflow").as_uri()
    kept["PYTHONDONTWRITEBYTECODE"] = "1"  # beside modules that are imported by an absolute path
    kept["PWD"] = str(cwd)
    return kept


class Interrupts:
    """Holds them back while inside; in the main thread only."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self.mask: list[int] = []

    def came(self) -> bool:
        """Whether there was one."""
        if self.signum is None:
            self.signum = held_signal()
        return self.signum is not None

    def __enter__(self) -> Interrupts:
        self._holding = held_signals()
        self.mask = self._holding.__enter__()
        self._before = {signum: signal.signal(signum, self._note) for signum in FORWARDED}  # another thread may get it
        return self

    def __exit__(self, *_: object) -> None:
        self.came()
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._holding.__exit__(None, None, None)

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        self.signum = signum


ALL_STEPS = 1_000_000  # the parent says when it is enough
_POLL_S = 0.1
_ASK_S = 60.0
_END_S = 20.0
_MARGIN = 4  # steps: two until a step is recorded, and two more
_SIGN_MS = 400.0  # until every rank has seen a file
_TAIL_BYTES = 1 << 16
_MEMORY = re.compile(r"out of memory|OutOfMemoryError|bad_alloc|Cannot allocate memory|MemoryError", re.IGNORECASE)
_BUSY = re.compile(r"EADDRINUSE|Address already in use", re.IGNORECASE)
_OFFLINE = re.compile(r"OfflineModeIsEnabled|LocalEntryNotFoundError|offline mode is enabled", re.IGNORECASE)
_ERROR = re.compile(rb"^(?:\[rank\d+\]: ?)?((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)\b.*)$", re.MULTILINE)

Status = Literal["measured", "aborted", "crashed", "busy", "short", "looked", "interrupted"]


@dataclass(frozen=True, slots=True)
class Asked:
    """What the ranks pass to DeepSpeed."""

    config: Mapping[str, Any]
    version: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Which steps count."""

    first: int
    """Number of the first."""
    steps: int
    abort: Callable[[Sequence[float], Sequence[float]], str | None] = lambda _discarded, _steps: None
    """Given the discarded steps and those that count, so far: why it is enough already."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What came of it."""

    status: Status
    reason: str = ""
    discarded_ms: tuple[float, ...] = ()
    steps_ms: tuple[float, ...] = ()
    """Of the slowest rank, step by step."""
    losses: tuple[float, ...] = ()
    """NaN where it was no number."""
    device_bytes: int | None = None
    taken: int = 0
    """Steps that it made, where it ended by itself."""
    wrote: tuple[str, ...] = ()
    """Files in the working directory that are otherwise than before."""
    is_out_of_memory: bool = False
    """Whether it crashed for want of memory: another setting may need less."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run writes."""

    folder: Path
    """Of the agents."""
    scratch: Scratch
    log: Path


@contextmanager
def _place(left_out: Sequence[Path]) -> Iterator[Place]:
    """A folder that only this user can enter; gone afterwards, also where this process is killed (see `keeper`)."""
    try:
        root = Path(tempfile.mkdtemp(prefix="zftune-trial-"))
    except OSError as error:
        raise ProfileError(f"no scratch folder can be made ({error.strerror}), set TMPDIR") from error
    try:
        for name in ("trackers", "work"):
            (root / name).mkdir()
        source = Path.cwd()
        scratch = Scratch(source, surroundings(source, root / "work"), (root, *left_out))
        yield Place(root, scratch, root / "output.log")
    except OSError as error:
        raise ProfileError(f"the scratch copy in '{root}' failed ({error.strerror or error}), set TMPDIR") from error
    finally:
        shutil.rmtree(root, ignore_errors=True)


@dataclass(slots=True)
class ProcessTrial:
    """One run.

    Args:
        command: as the user gave it.
        knobs: of the trial's ds_config; None: the user's own.
        stage: ZeRO stage.
        interrupts: looked at all the time.
        asked: called with what the first rank asks; what it raises ends the run.
        plan: called once all ranks have taken a few steps; None: that is enough.
        timeout_s: most time of the run.
        left_out: paths that are not copied.
        alive: called now and then.
    """

    command: Sequence[str]
    knobs: Mapping[str, Any] | None
    stage: int
    interrupts: Interrupts
    asked: Callable[[Asked], None]
    plan: Callable[[Sequence[Rank]], Plan | None]
    timeout_s: float
    left_out: Sequence[Path] = ()
    alive: Callable[[], None] = lambda: None
    _plan: Plan | None = None
    _planned: bool = False
    _applied: bool = False
    _rows: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))

    def run(self) -> Ended:
        """From its start until nothing of it is left.

        Raises:
            BadInputError: it cannot be run, or `asked` or `plan` found something that is not allowed.
            ProfileError: no process can be started, the agent failed, or something was written where it must not be.
        """
        with _place(self.left_out) as place:
            write_whole(place.folder / TRIAL, json.dumps({"knobs": self.knobs, "stage": self.stage}))
            outside = Outside(list(self.command), place.scratch.source)
            ended = self._in(place)
            linked, others = place.scratch.changed()
            if linked:
                raise ProfileError(
                    f"'{linked[0]}' in the working directory was written by the command through the scratch copy's "
                    "link, since it is too large to be copied: let the command write elsewhere"
                )
            written = outside.changed()
            if written:
                raise ProfileError(
                    f"'{written[0]}' was written by the command, which trials cannot keep it from: give it a path in "
                    "the working directory"
                )
            return replace(ended, wrote=tuple(others))

    def _in(self, place: Place) -> Ended:
        environment = harmless(os.environ, place.folder / "trackers", place.scratch.target)
        environment = agent.environment(place.folder, warmup=0, steps=ALL_STEPS, base=environment, trial=True)
        log = os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            command = place.scratch.command(list(self.command))
            with SupervisedProcess(
                command, environment, self.interrupts.mask, cwd=place.scratch.target, output=log
            ) as child:
                ended = self._watch(child, place)
                child.close()
            if ended is None and child.exit_status == 0:
                ended = self._look(place.folder)  # what it wrote since the last look may be enough
        finally:
            os.close(log)
            release_locks(str(place.folder))
        ranks = measured(read_records(place.folder))
        return self._of(ended, ranks, child, place) if ended is not None else self._by_itself(ranks, child, place)

    # --- while it runs -----------------------------------------------------------------------------------------------

    def _watch(self, child: SupervisedProcess, place: Place) -> Ended | None:
        """Until something is known of it; None: it ended by itself."""
        began = time.monotonic()
        while not child.over(_POLL_S):
            self.alive()
            if self.interrupts.came():
                return Ended("interrupted")
            if time.monotonic() - began > self.timeout_s:
                return Ended("crashed", f"it was not done after {self.timeout_s:g} s")
            ended = self._look(place.folder)
            if ended is not None:
                self._stop(child, place.folder)
                return ended
        return None

    def _look(self, folder: Path) -> Ended | None:
        if not self._applied:
            self._answer(folder)
        ranks = read_records(folder)
        failed = next((rank.error for rank in ranks if rank.error is not None), None)
        if failed is not None:
            raise ProfileError(f"nothing can be tried safely: the agent failed: {failed}")
        if any(rank.steps for rank in ranks) and not self._applied:
            raise BadInputError(
                "command: trains without an optimizer that DeepSpeed offloads to the CPU: its ds_config "
                "must have offload_optimizer (for a training loop of your own there is zftune.attach)"
            )
        return self._measure([rank for rank in measured(ranks) if rank.model]) if self._applied else None

    def _answer(self, folder: Path) -> None:
        """Once every rank has asked, let them go on."""
        asked = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("asked-*.json")]
        if not asked:
            return
        if len({one["rank"] for one in asked}) < asked[0]["world_size"]:
            oldest = min(path.stat().st_mtime for path in folder.glob("asked-*.json"))
            if time.time() - oldest > _ASK_S:
                raise ProfileError(
                    f"{len(asked)} of {asked[0]['world_size']} ranks asked for their settings: all have to run on this "
                    "machine"
                )
            return
        first = min(asked, key=lambda one: int(one["rank"]))
        self.asked(Asked(first["config"], first["version"]))
        write_whole(folder / APPLY, "")
        self._applied = True

    def _measure(self, ranks: Sequence[Rank]) -> Ended | None:
        if not ranks or len(ranks) < ranks[0].header["world_size"]:
            return None
        if not self._planned:
            self._planned, self._plan = True, self.plan(ranks)
        if self._plan is None:
            return Ended("looked")
        discarded, steps = self._rows = slowest(ranks, self._plan)
        if len(steps) >= self._plan.steps:
            return Ended("measured")
        reason = self._plan.abort(discarded, steps)
        return None if reason is None else Ended("aborted", reason)

    def _stop(self, child: SupervisedProcess, folder: Path) -> None:
        """The handshake: say where to stop, wait until every rank stands there, and let them end."""
        rows = [rank.steps[-1] for rank in read_records(folder) if rank.steps]
        fastest_ms = min((row["step_ms"] for row in rows), default=_SIGN_MS)
        margin = _MARGIN + int(_SIGN_MS / fastest_ms)
        write_whole(folder / STOP, str(max((row["index"] for row in rows), default=0) + margin))
        slowest_ms = max((*self._rows[0], *self._rows[1]), default=0.0)
        until = time.monotonic() + max(_END_S, 3e-3 * margin * slowest_ms)
        while not child.over(_POLL_S) and time.monotonic() < until and not self.interrupts.came():
            self.alive()
            ranks = measured(read_records(folder))
            if ranks and all(rank.end is not None for rank in ranks):
                write_whole(folder / EXIT, "")
                break
        until = time.monotonic() + _END_S
        while not child.over(_POLL_S) and time.monotonic() < until and (folder / EXIT).exists():
            self.alive()

    # --- afterwards --------------------------------------------------------------------------------------------------

    def _of(self, ended: Ended, ranks: Sequence[Rank], child: SupervisedProcess, place: Place) -> Ended:
        """What ended from here, with its figures."""
        if ended.status == "crashed":  # too late: what it wrote last may say why
            return replace(ended, reason=f"{ended.reason}{_said(place.log)}")
        if self._plan is None:
            return ended
        discarded, steps = slowest(ranks, self._plan)
        peaks = [rank.trial["device_bytes"] for rank in ranks if isinstance(rank.trial.get("device_bytes"), int)]
        return replace(
            ended,
            discarded_ms=tuple(discarded),
            steps_ms=tuple(steps),
            losses=_losses(ranks),
            device_bytes=max(peaks, default=None),
        )

    def _by_itself(self, ranks: Sequence[Rank], child: SupervisedProcess, place: Place) -> Ended:
        status = child.exit_status
        text = _tail(place.log).decode(errors="replace")
        discarded, steps = slowest(ranks, self._plan) if self._plan is not None and ranks else ([], [])
        ended = Ended("crashed", "", tuple(discarded), tuple(steps), _losses(ranks))
        if status == 0:
            if not ranks:
                seen = Seen.of(place.folder)
                return Ended("short", nothing_recorded(self.command, read_records(place.folder), status, 0, seen))
            taken = max(rank.steps[-1]["index"] for rank in ranks) + 1
            needed = "" if self._plan is None else f", {self._plan.first + self._plan.steps} are needed"
            reason = f"the command ended by itself after {taken} steps{needed}"
            return replace(ended, status="short", reason=reason, taken=taken)
        if _MEMORY.search(text):
            return replace(ended, reason=f"it ran out of memory{_said(place.log)}", is_out_of_memory=True)
        if _BUSY.search(text):
            return Ended("busy", "its port was in use by another process")
        how = (
            "was killed"
            if status is None
            else f"was killed by signal {-status}"
            if status < 0
            else f"ended with exit code {status}"
        )
        more = ", and what is not in the cache cannot be loaded in a trial" if _OFFLINE.search(text) else ""
        return replace(ended, reason=f"the command {how}{_said(place.log)}{more}")


def slowest(ranks: Sequence[Rank], plan: Plan) -> tuple[list[float], list[float]]:
    """Step times of the slowest rank of each step, as far as all ranks have come: discarded ones, and those that count.

    Args:
        ranks: one process of each.
        plan: says which count.
    """
    of_each = [{step["index"]: step["step_ms"] for step in rank.steps} for rank in ranks]
    last = min((max(steps) for steps in of_each if steps), default=0)
    times = [max(steps.get(index, 0.0) for steps in of_each) for index in range(1, last + 1)]
    return times[: plan.first - 1], times[plan.first - 1 : plan.first - 1 + plan.steps]


def _losses(ranks: Sequence[Rank]) -> tuple[float, ...]:
    found = ranks[0].trial.get("losses") if ranks else None
    values = found if isinstance(found, list) else []
    return tuple(float(one) if isinstance(one, (int, float)) else math.nan for one in values)


def _tail(log: Path) -> bytes:
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return file.read()


def _said(log: Path) -> str:
    """The last error that it printed."""
    found = [line for line in _ERROR.findall(_tail(log)) if b"ChildFailedError" not in line]  # torchrun's view of it
    return f" ({found[-1].decode(errors='replace').strip()[:200]})" if found else ""
