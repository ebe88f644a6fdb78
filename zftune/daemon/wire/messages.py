"""The messages of an agent and the daemon.

    POST /v1/runs                 Hello   -> Welcome
    POST /v1/runs/{run}/report    Report  -> Directive
    POST /v1/runs/{run}/goodbye   Goodbye -> Farewell

What a directive asks for has a decision number, counted in a session: as long as the daemon remembers the run. An
agent repeats what came of a decision until a directive says that it was taken, so that an answer may be lost.
Documents of the tuner (`training`, `outcome`, `request`, knobs) travel as objects and are decoded by who knows them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from zftune.daemon import PROTOCOL
from zftune.daemon.wire.codec import Limit, WireError, unicode

MOST_BYTES = 1 << 20
"""Of a message."""
MOST_STEPS = 1024
"""Statistics in one report."""
Document = Mapping[str, Any]
Identity = Annotated[str, Limit(32, 32, "[0-9a-f]*")]
"""Random, as `secrets.token_hex(16)` gives it; it may become the name of a file."""
Milliseconds = Annotated[float, Limit(0, 1e9)]
Count = Annotated[int, Limit(0, 2**53)]
Sentence = Annotated[str, Limit(0, 2000)]

_MASK = "***"
_SECRET = re.compile(r"(token|passw|secret|api_?-?key|credential|auth)", re.IGNORECASE)
_IN_URL = re.compile(r"(://[^/@\s:]*):[^/@\s]+@")
_MOST_ARGUMENT = 200
_MOST_ARGUMENTS = 64


def _speaks(protocol: int) -> None:
    if protocol != PROTOCOL:
        raise WireError(f"protocol is {protocol}, allowed is {PROTOCOL}: use one zftune on both sides")


@dataclass(frozen=True, slots=True)
class Again:
    """Of an agent that was here before: its daemon was ended, or gave it up."""

    record: Identity
    """Its run in the store."""
    trial: Count | None = None
    """The last one that it was asked to measure: it did not crash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A run that warmed up, and wants to be tuned."""

    protocol: int
    run: Identity
    """Chosen by the agent, so that a Hello may be said twice."""
    training: Document
    """A `zftune.tuner.facts.TrainingFacts`: model, machine, wishes, and what the warm-up showed."""
    pid: Annotated[int, Limit(1, 2**31)]
    began_unix_s: Annotated[float, Limit(0, 1e11)]
    tokens: Annotated[int, Limit(1, 2**40)] = 1
    """Of a step."""
    argv: Annotated[tuple[str, ...], Limit(0, _MOST_ARGUMENTS)] = ()
    """Masked: see `masked`."""
    gpu_uuid: str | None = None
    """None: it trains on no GPU."""
    again: Again | None = None

    def __post_init__(self) -> None:
        _speaks(self.protocol)


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The run is followed."""

    protocol: int
    session: Identity
    """Of the daemon's memory of this run: where it is another one than before, all that was asked for is void."""
    lease_s: Annotated[float, Limit(0.1, 86400)]
    """Without a report for so long the run counts as ended."""

    def __post_init__(self) -> None:
        _speaks(self.protocol)


@dataclass(frozen=True, slots=True)
class StepFigures:
    """One step."""

    step: Count
    step_ms: Milliseconds | None
    stall_ms: Annotated[Mapping[str, Milliseconds], Limit(0, 16)] | None = None
    """By cause; None: there is no device stream."""


@dataclass(frozen=True, slots=True)
class Applied:
    """The knobs of a decision hold."""

    decision: Count
    step: Count
    """After which they do."""


@dataclass(frozen=True, slots=True)
class Done:
    """What came of a decision; sent until it was taken."""

    decision: Count
    outcome: Document
    """A `zftune.tuner.states.Outcome`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A batch of what happened, and a sign of life."""

    protocol: int
    session: Identity
    sequence: Count
    """1, 2, .. in a session."""
    steps: Annotated[tuple[StepFigures, ...], Limit(0, MOST_STEPS)] = ()
    losses: Annotated[tuple[tuple[Count, float], ...], Limit(0, MOST_STEPS)] = ()
    """Of steps; finite ones."""
    dropped: Count = 0
    """Statistics that found no room, since the session began."""
    applied: Applied | None = None
    """The newest."""
    done: Done | None = None
    guard: Sentence | None = None
    """Training goes wrong: the starting point's knobs are back, and the search is over."""
    knobs: Document | None = None
    """That hold."""

    def __post_init__(self) -> None:
        _speaks(self.protocol)


@dataclass(frozen=True, slots=True, kw_only=True)
class Directive:
    """What to do until the next one."""

    protocol: int
    session: Identity
    decision: Count
    """Of the newest request; 0: there was none."""
    kind: Literal["apply", "hold", "pause", "stop"]
    """Carry out the request; the incumbent's knobs while somebody thinks; the same until somebody says go on; and
    for good."""
    state: str
    reason: Sentence = ""
    request: Document | None = None
    """A `zftune.tuner.states.Request`, where the kind is "apply"."""
    incumbent: Document | None = None
    """Knobs; None: nothing is known yet, keep those that there are."""
    start: Document | None = None
    """Knobs that the search began from."""
    taken: Count = 0
    """The newest decision whose outcome is written down."""
    record: Identity | None = None
    """The run in the store; None: nothing is written down."""
    thinks: bool = False
    """Whether somebody thinks: another report may hear more, though nothing happens."""
    notices: Annotated[tuple[Sentence, ...], Limit(0, 64)] = ()
    """What is not as it should be."""

    def __post_init__(self) -> None:
        _speaks(self.protocol)
        if (self.kind == "apply") != (self.request is not None):
            raise WireError(f"kind is {self.kind}, allowed is apply with a request, and no other with one")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """The training, or its tuning, has ended."""

    protocol: int
    session: Identity
    steps: Count
    """That were taken since it was attached."""
    begins: Count
    """Steps before its search begins, at least."""
    over: bool = False
    """Whether the tuning was given up for good."""
    reason: Sentence = ""
    """Why it ended; "": the training did."""
    remarks: Annotated[tuple[Sentence, ...], Limit(0, 64)] = ()
    """What was found out beside the search."""
    idle: Document | None = None
    """A `zftune.tuner.states.Between`: steps that belong to no measurement."""

    def __post_init__(self) -> None:
        _speaks(self.protocol)


@dataclass(frozen=True, slots=True, kw_only=True)
class Farewell:
    """What came of it."""

    protocol: int
    sentence: str = ""
    warning: bool = False
    notices: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        _speaks(self.protocol)


def masked(argv: Sequence[str]) -> tuple[str, ...]:
    """Arguments of a command without what is nobody's business: values of secrets, and passwords in URLs.

    Args:
        argv: as the process has them.
    """
    found: list[str] = []
    hide = False
    for argument in map(unicode, argv[:_MOST_ARGUMENTS]):
        name, equals, _ = argument.partition("=")
        if hide and not argument.startswith("-"):
            found.append(_MASK)
        elif equals and _SECRET.search(name):
            found.append(f"{name}={_MASK}"[:_MOST_ARGUMENT])
        else:
            found.append(_IN_URL.sub(rf"\1:{_MASK}@", argument)[:_MOST_ARGUMENT])
        hide = not equals and argument.startswith("-") and _SECRET.search(argument) is not None
    return tuple(found)
