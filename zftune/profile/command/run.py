"""`zftune profile -- CMD`: run the command under agents, and make a profile of what they recorded."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zftune.doctor.software import free_bytes
from zftune.errors import BadInputError, ProfileError
from zftune.profile.command.child import SupervisedProcess, held_signals
from zftune.profile.command.document import Ended, Seen, build_document, nothing_recorded, remarks, waits_for
from zftune.profile.command.keeper import descendants
from zftune.profile.command.records import measured, read_records

DEFAULT_STEPS = 60
DEFAULT_WARMUP = 5
_MEMORY_FOLDER = Path("/dev/shm")  # survives a full disk, and writing there waits for no disk
_LEAST_BYTES = 256 << 20  # in a container it has 64 MB by default, which data loaders need
_POLL_S = 0.1
_STOP_POLL_S = 0.5
_LATE_RANKS_S = 3.0
_PIDS_S = 1.0
_SIGNAL_BASE = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandOptions:
    """What the command line asks for."""

    command: Sequence[str]
    steps: int = DEFAULT_STEPS
    warmup: int = DEFAULT_WARMUP
    stop: bool = False
    on_stop: Callable[[], None] | None = None
    silence_s: float = 60.0
    """Without a step for so long it is told what the profile waits for."""
    on_silence: Callable[[str], None] | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a command."""

    document: dict[str, Any] | None
    """None where no step was measured."""
    notes: list[str]
    """Sentences about what went wrong or is missing; why there is no document."""
    exit_code: int
    """The command's own (128 + n for signal n); 0 if it was stopped after all steps."""


def profile_command(options: CommandOptions) -> Outcome:
    """Run a command to its end, with standard streams of its own, and return its profile.

    Signals for this process are passed on to the command; none of its processes outlives this call.

    Raises:
        BadInputError: an option is not allowed, or the command cannot be run.
        ProfileError: no process can be started here.
    """
    _check(options)
    with held_signals() as mask, _folder() as folder:
        environment = _environment(options, folder)
        with SupervisedProcess(options.command, environment, mask) as child:
            return _supervised(options, child, folder, environment)


def _supervised(
    options: CommandOptions, child: SupervisedProcess, folder: Path, environment: Mapping[str, str]
) -> Outcome:
    from zftune.profile.sampling import Sampling

    sampling = Sampling(_Pids(child.keeper_pid), environment)
    with sampling:
        stopped = _wait(options, child, folder)
        child.close()
    ranks = read_records(folder)
    chosen = measured(ranks)
    status = child.exit_status
    code = _SIGNAL_BASE + 9 if status is None else status if status >= 0 else _SIGNAL_BASE - status
    if stopped:
        code = 0
    seen = Seen.of(folder, left=0 if stopped else child.left)
    notes = list(remarks(ranks, chosen, options.steps, seen))
    if not chosen:
        return Outcome(None, [nothing_recorded(options.command, ranks, status, options.warmup, seen), *notes], code)
    try:
        document = build_document(chosen, Ended(None if stopped else code, stopped), sampling)
    except ProfileError as error:
        return Outcome(None, [f"{error}: this is a defect of zftune, please report it", *notes], code)
    return Outcome(document, notes, code)


def _wait(options: CommandOptions, child: SupervisedProcess, folder: Path) -> bool:
    stopped = False
    progress, began_s, told = _Progress(folder), time.monotonic(), options.on_silence is None
    while not child.over(_POLL_S):
        child.pass_on_signals()
        if not told and time.monotonic() - began_s >= options.silence_s:
            told = True
            sentence = waits_for(folder, options.warmup)
            if sentence is not None and options.on_silence is not None:
                options.on_silence(sentence)
        if options.stop and not stopped and progress.all_measured():
            if options.on_stop is not None:
                options.on_stop()
            child.stop()
            stopped = True
    child.pass_on_signals()
    return stopped


class _Progress:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next_s = 0.0
        self._since_s: float | None = None

    def all_measured(self) -> bool:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return False
        self._next_s = now_s + _STOP_POLL_S
        ranks = read_records(self._folder)
        if not ranks or any(rank.end is None for rank in ranks) or not measured(ranks):
            self._since_s = None
            return False
        if len({rank.rank for rank in ranks}) >= ranks[0].header["world_size"]:
            return True
        # Of a run over several machines only some ranks are here: late ones get a moment to appear.
        self._since_s = now_s if self._since_s is None else self._since_s
        return now_s - self._since_s >= _LATE_RANKS_S


class _Pids:
    """The command's processes, looked up once a second; any thread may ask."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._found: list[int] = []
        self._next_s = 0.0

    def __call__(self) -> list[int]:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._found, self._next_s = descendants(self._root), now_s + _PIDS_S
        return self._found


def _check(options: CommandOptions) -> None:
    for name, value, least in (("steps", options.steps, 1), ("warmup", options.warmup, 0)):
        if value < least:
            raise BadInputError(f"--{name} is {value}; it must be an integer >= {least}")
    if "\0" in "".join(options.command):
        raise BadInputError("command: has a null character, which no argument may have")


def _environment(options: CommandOptions, folder: Path) -> dict[str, str]:
    from zftune.agent import environment

    return environment(folder, warmup=options.warmup, steps=options.steps, base=os.environ, stop=options.stop)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A private folder for the records: in memory if there is room, else among temporary files."""
    path = _made_folder()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _made_folder() -> Path:
    reason: OSError | None = None
    for within in (_MEMORY_FOLDER if (free_bytes(_MEMORY_FOLDER) or 0) >= _LEAST_BYTES else None, None, _MEMORY_FOLDER):
        try:
            path = Path(tempfile.mkdtemp(prefix="zftune-", dir=within))
            path.chmod(0o700)  # whatever the umask left of it
        except OSError as error:
            reason = reason or error
        else:
            return path
    assert reason is not None
    raise ProfileError(f"no folder for the records can be made ({reason.strerror}), set TMPDIR") from reason
