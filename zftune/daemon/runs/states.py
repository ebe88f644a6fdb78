"""Where a run stands, as types, and how one state follows from another. Pure: nothing here waits or writes.

Warming -> Baseline -> Searching <-> Confirming -> Frozen -> Drifted -> Searching ..
any of these <-> Paused;  any -> Ended
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from zftune.daemon import PROTOCOL
from zftune.daemon.protocol.messages import Farewell, Goodbye
from zftune.errors import ZftuneError
from zftune.store.account import Count
from zftune.store.types import Decision, Withdrawal
from zftune.tuner import states as search
from zftune.tuner.messages import ENDED_EARLY, conclusion, count, sentence
from zftune.tuner.setup import Prepared
from zftune.tuner.states import TRAINED_ON
from zftune.words import LIVE_STATES, NO_LONGER_TUNED


def went_wrong(prepared: Prepared, reason: str) -> None:
    """End a search because training goes wrong; a second call changes nothing.

    Its adopted setting was kept as a preset at once, which is withdrawn.
    """
    search, recording = prepared.search, prepared.recording
    if not any(note.kind == "guard" for note in search.notes):
        search.guard(reason)
    if prepared.recorder is not None:
        prepared.recorder.write(search)
    adopted = {note.trial for note in search.notes if note.kind == "adopt"}
    for trial in search.book.trials[1:]:  # the first is what training goes back to
        if trial.number in adopted and recording is not None:
            recording.withdraw_preset(trial.setting, Withdrawal("guard"))


def farewell(prepared: Prepared | None, message: Goodbye, total: Count) -> Farewell:
    """End a search without a working thread; `prepared` None: it had not begun. `total` is the whole run's count."""
    search = None if prepared is None else prepared.search
    over = search is not None and search.is_settled
    if search is not None and not over:
        search.stop(message.reason or ENDED_EARLY, early=True)
    level, result = conclusion(search, total, steps=message.steps, begins=message.begins, over=over or message.over)
    if prepared is not None and search is not None:
        for remark in message.remarks:
            search.remember(remark)
        if message.over:
            search.remark(because=TRAINED_ON, about={"taken": message.steps, TRAINED_ON: True})
        if prepared.recording is not None:
            prepared.recording.finish(search, unfinished=not over)
    return Farewell(protocol=PROTOCOL, sentence=result, warning=level >= logging.WARNING)


class NotAllowedError(ZftuneError):
    """A command that does not fit the state; the sentence says which does."""


@dataclass(frozen=True, slots=True)
class Warming:
    """The search is being made: the planner is asked, the store is read."""

    name: ClassVar[str] = "warming"
    reason: str = "the search is being prepared"


@dataclass(frozen=True, slots=True)
class Baseline:
    """The knobs that the search begins from are measured."""

    name: ClassVar[str] = "baseline"
    reason: str = "the settings at the start are measured"


@dataclass(frozen=True, slots=True)
class Searching:
    """Settings are looked at, or thought of."""

    name: ClassVar[str] = "searching"
    trial: int | None = None
    """That is measured; None: none is."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Confirming:
    """A setting is compared with the incumbent."""

    name: ClassVar[str] = "confirming"
    trial: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Frozen:
    """The search has stopped, or rests; unless it is pinned, a setting is compared now and then."""

    name: ClassVar[str] = "frozen"
    reason: str
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Drifted:
    """The machine or the steps have changed: the incumbent is measured again, then the search goes on."""

    name: ClassVar[str] = "drifted"
    reason: str


@dataclass(frozen=True, slots=True)
class Paused:
    """Somebody wants the incumbent to run undisturbed."""

    name: ClassVar[str] = "paused"
    held: Warming | Baseline | Searching | Confirming | Frozen | Drifted
    """To go on with."""
    reason: str = "the best settings so far stay until it is resumed"


@dataclass(frozen=True, slots=True)
class Ended:
    """The run is over for the daemon."""

    name: ClassVar[str] = "ended"
    reason: str
    trains: bool = False
    """Whether only the tuning ended: the training went on."""


Going = Warming | Baseline | Searching | Confirming | Frozen | Drifted
State = Going | Paused | Ended


def of_search(state: search.State, notes: Sequence[Decision]) -> Going:
    """The state of a search that begins or continues, by its last decisions."""
    if isinstance(state, search.Opening):
        last = notes[-1] if notes else Decision("start")
        again = "the best settings so far are measured once more"
        is_reopened, is_resumed = last.kind == "reopen", last.kind == "resume"
        return Drifted(sentence(last)) if is_reopened else Baseline(again) if is_resumed else Baseline()
    if isinstance(state, search.Unit):
        if state.is_look:
            return Searching(state.trial, f"setting {state.trial} is compared for the first time")
        return Confirming(state.trial, f"setting {state.trial} is compared with the best so far")
    if isinstance(state, search.Stopped):
        return Frozen(_why(notes, "stop", "rollback", "guard", "crash"), pinned=state.final)
    if isinstance(state, search.Resting):
        reason = _why(notes, "hold", "void")
        return Frozen(reason) if state.is_idle else Searching(None, reason)
    return Searching(None, "the next setting is being chosen")


def _why(notes: Sequence[Decision], *kinds: str) -> str:
    return next((sentence(one) for one in reversed(notes) if one.kind in kinds), "")


def advanced(state: State, to: Going) -> State:
    """After the search went on; a paused run stays paused, and one that ended stays ended."""
    if isinstance(state, Paused):
        return Paused(to)
    return state if isinstance(state, Ended) else to


def paused(state: State) -> Paused:
    """After `pause`; twice is once. Raises NotAllowedError: the run, or its search, has ended."""
    if isinstance(state, Paused):
        return state
    if isinstance(state, Ended) or (isinstance(state, Frozen) and state.pinned):
        raise NotAllowedError(f"cannot pause: {state.reason}")
    return Paused(state)


def resumed(state: State) -> Going:
    """After `resume`. Raises NotAllowedError: it is not paused."""
    if isinstance(state, Ended):
        raise NotAllowedError(f"cannot resume: {state.reason}")
    if not isinstance(state, Paused):
        raise NotAllowedError(f"cannot resume: the run is {LIVE_STATES[state.name]}, not paused")
    return state.held


def ended(state: State, reason: str, *, trains: bool = False) -> Ended:
    """After goodbye, or without; what ended first stays the reason."""
    return state if isinstance(state, Ended) else Ended(reason, trains)


def ended_by(state: State, message: Goodbye, *, stopped: bool) -> Ended:
    """The state after goodbye; `stopped`: a person ended the tuning."""
    taken = count(message.steps, "step")  # the run's account has those before, too
    tuning = f"tuning {'was stopped' if stopped else 'ended'} {taken} after the training's last start"
    why = f"{tuning}; the training went on" if message.over else "the training has ended"
    return ended(state, message.reason or why, trains=message.over)


def title(state: State) -> str:
    """The state as people read it: a run whose training goes on has not ended."""
    return NO_LONGER_TUNED if isinstance(state, Ended) and state.trains else LIVE_STATES[state.name]
