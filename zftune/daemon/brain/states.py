"""Where a run stands, as types, and how one state follows from another. Pure: nothing here waits or writes.

Warming -> Baseline -> Searching <-> Confirming -> Frozen -> Drifted -> Searching ..
any of these <-> Paused;  any -> Ended
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from zftune.errors import ZftuneError
from zftune.tuner import states as search
from zftune.tuner.states import Note


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
    reason: str = "what the search begins from is measured"


@dataclass(frozen=True, slots=True)
class Searching:
    """Settings are looked at, or thought of."""

    name: ClassVar[str] = "searching"
    trial: int | None = None
    """That is measured; None: none is."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Confirming:
    """A setting is compared with the incumbent: A-B-A."""

    name: ClassVar[str] = "confirming"
    trial: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Frozen:
    """The search has stopped; unless it is pinned, step times are watched."""

    name: ClassVar[str] = "frozen"
    reason: str
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Drifted:
    """Step times have changed: the incumbent is measured again, then the search goes on."""

    name: ClassVar[str] = "drifted"
    reason: str


@dataclass(frozen=True, slots=True)
class Paused:
    """Somebody wants the incumbent to run undisturbed."""

    name: ClassVar[str] = "paused"
    held: Warming | Baseline | Searching | Confirming | Frozen | Drifted
    """To go on with."""
    reason: str = "paused: the incumbent's knobs stay until somebody resumes it"


@dataclass(frozen=True, slots=True)
class Ended:
    """The run is over for the daemon."""

    name: ClassVar[str] = "ended"
    reason: str


Going = Warming | Baseline | Searching | Confirming | Frozen | Drifted
State = Going | Paused | Ended


def of_search(state: search.State, last: Note | None) -> Going:
    """Of a search that begins or goes on.

    Args:
        state: of it.
        last: its last decision.
    """
    reason = "" if last is None else last.reason
    if isinstance(state, search.Opening):
        return Drifted(reason) if last is not None and last.kind == "reopen" else Baseline()
    if isinstance(state, search.Comparing):
        return Confirming(state.trial, f"trial {state.trial} is compared with the incumbent")
    if isinstance(state, search.Stopped):
        return Frozen(state.reason, pinned=state.final)
    if isinstance(state, search.Holding):
        return Searching(None, reason)
    if isinstance(state, search.Exploring):
        return Searching(state.trial, f"trial {state.trial} is looked at")
    return Searching(None, "the next setting is thought of")


def advanced(state: State, to: Going) -> State:
    """After the search went on; a paused run stays paused, and one that ended stays ended."""
    if isinstance(state, Paused):
        return Paused(to)
    return state if isinstance(state, Ended) else to


def paused(state: State) -> Paused:
    """After `pause`; twice is once.

    Raises:
        NotAllowedError: the run has ended.
    """
    if isinstance(state, Paused):
        return state
    if isinstance(state, Ended):
        raise NotAllowedError("the run has ended, allowed is pausing one that trains")
    return Paused(state)


def resumed(state: State) -> Going:
    """After `resume`.

    Raises:
        NotAllowedError: it is not paused.
    """
    if not isinstance(state, Paused):
        raise NotAllowedError(f"the run is {state.name}, allowed is resuming one that is paused")
    return state.held


def ended(state: State, reason: str) -> Ended:
    """After goodbye, or without; what ended first stays the reason."""
    return state if isinstance(state, Ended) else Ended(reason)
