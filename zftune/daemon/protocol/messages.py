"""The messages of an agent and the daemon.

    POST /v1/runs                 Hello   -> Welcome
    POST /v1/runs/{run}/report    Report  -> Directive
    POST /v1/runs/{run}/goodbye   Goodbye -> Farewell

What a directive asks for has a decision number, counted in a session: as long as the daemon remembers the run. An
agent repeats what came of a decision until a directive says that it was taken, so that an answer may be lost.
What the tuner has (facts, settings, requests, outcomes) travels as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from zftune.daemon import PROTOCOL
from zftune.daemon.protocol.codec import WireError, unicode
from zftune.store.account import Count
from zftune.tuner.evidence import Gain
from zftune.tuner.setup import TrainingFacts
from zftune.tuner.space import Setting
from zftune.tuner.states import Outcome, Remark, Request

MOST_STEPS = 1024
"""Statistics in one report."""
MOST_CHANGES = 64
"""Of the knobs, in one report."""
Identity = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
"""Random, as `secrets.token_hex(16)` gives it; it may become the name of a file."""
Milliseconds = Annotated[float, Field(ge=0, le=1e9)]
Natural = Annotated[int, Field(ge=0, le=2**53)]
_MOST_REASON = 2000
Sentence = Annotated[str, Field(max_length=_MOST_REASON)]

_LONGEST_S = 1e11
_MOST_ASKED_STEPS = 100_000
_MASK = "***"
_SECRET = re.compile(r"(token|passw|secret|api_?-?key|credential|auth)", re.IGNORECASE)
_IN_URL = re.compile(r"(://[^/@\s:]*):[^/@\s]+@")
_MOST_ARGUMENT = 200
_MOST_ARGUMENTS = 64


def _speaks(protocol: int) -> int:
    if protocol != PROTOCOL:
        raise WireError(f"protocol is {protocol}; it must be {PROTOCOL}: use one zftune on both sides")
    return protocol


def _is_of_a_run(remark: Remark) -> Remark:
    figures = remark.at_s, remark.at_unix_s, remark.step
    if len(remark.reason) <= _MOST_REASON and all(0 <= one <= _LONGEST_S for one in figures):
        return remark
    raise WireError(
        f"a remark has {len(remark.reason)} characters, times of {remark.at_s} and {remark.at_unix_s} s and step "
        f"{remark.step}; at most {_MOST_REASON} characters and {_LONGEST_S:g} can be written down"
    )


Protocol = Annotated[int, AfterValidator(_speaks)]
"""First of a message's fields, so that another version is refused for what it is, whatever else it may say."""


@dataclass(frozen=True, slots=True)
class Reattach:
    """Of an agent that was here before: its daemon was ended, or gave it up."""

    record: Identity
    """Its run in the store."""
    trial: Natural | None = None
    """The last one that it was asked to measure: it did not crash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A run that warmed up, and wants to be tuned."""

    protocol: Protocol
    run: Identity
    """Chosen by the agent, so that a Hello may be said twice."""
    training: TrainingFacts
    pid: Annotated[int, Field(ge=1, le=2**31)]
    began_unix_s: Annotated[float, Field(ge=0, le=1e11)]
    tokens: Annotated[int, Field(ge=1, le=2**40)] = 1
    """Of a step."""
    argv: Annotated[tuple[str, ...], Field(max_length=_MOST_ARGUMENTS)] = ()
    """Masked: see `masked`."""
    gpu_uuid: str | None = None
    """None: it trains on no GPU."""
    database: Annotated[str, Field(max_length=4096)] = field(default="sqlite://", repr=False)
    """The store of the run, as `zftune.store.open_store` takes it: an absolute path or a URL; by default in memory."""
    again: Reattach | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The run is followed."""

    protocol: Protocol
    session: Identity
    """Of the daemon's memory of this run: where it is another one than before, all that was asked for is void."""
    lease_s: Annotated[float, Field(ge=0.1, le=86400)]
    """Without a report for so long the run counts as ended."""


@dataclass(frozen=True, slots=True)
class StepFigures:
    """One step."""

    step: Natural
    """Counted from 1."""
    step_ms: Milliseconds | None
    """None: not known."""
    stall_ms: Annotated[Mapping[str, Milliseconds], Field(max_length=16)] | None = None
    """By cause; None: there is no device stream."""
    coverage: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of the gradient energy in the selected columns; None: nothing can be selected."""


@dataclass(frozen=True, slots=True)
class Applied:
    """The knobs of a decision hold."""

    decision: Natural
    step: Natural
    """After which they do."""


@dataclass(frozen=True, slots=True)
class Change:
    """Knobs that hold from a step on."""

    step: Natural
    """After which they do."""
    knobs: Setting


@dataclass(frozen=True, slots=True)
class Done:
    """What came of a decision; sent until it was taken."""

    decision: Natural
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A batch of what happened, and a sign of life."""

    protocol: Protocol
    session: Identity
    sequence: Natural
    """1, 2, ..; the same again, with the same steps, losses and changes, where nobody has answered."""
    step: Natural = 0
    """The last that is over, whose figures come later; 0: that is not known."""
    steps: Annotated[tuple[StepFigures, ...], Field(max_length=MOST_STEPS)] = ()
    losses: Annotated[tuple[tuple[Natural, float], ...], Field(max_length=MOST_STEPS)] = ()
    """Of steps; finite ones."""
    dropped: Natural = 0
    """Statistics that found no room, since the session began."""
    applied: Applied | None = None
    """The newest."""
    done: Done | None = None
    guard: Sentence | None = None
    """Training goes wrong: the settings at the start are back, and the search is over."""
    changes: Annotated[tuple[Change, ...], Field(max_length=MOST_CHANGES)] = ()
    """Of the knobs, in the order of their steps; at a session's beginning those of before too."""
    count: Count | None = None
    """Of this process, since it was attached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Directive:
    """What to do until the next one."""

    protocol: Protocol
    session: Identity
    decision: Natural
    """Of the newest request; 0: there was none."""
    kind: Literal["apply", "hold", "pause", "stop"]
    """Carry out the request; the incumbent's knobs while somebody thinks; the same until somebody says go on; and
    for good."""
    state: str
    reason: Sentence = ""
    request: Request | None = None
    """Where the kind is "apply"."""
    incumbent: Setting | None = None
    """None: nothing is known yet, keep the knobs that there are."""
    start: Setting | None = None
    """That the search began from."""
    gain: Gain | None = None
    """Of the incumbent over them, a share of their step time with its standard error; None: it is them."""
    taken: Natural = 0
    """The newest decision whose outcome is written down."""
    record: Identity | None = None
    """The run in the store; None: nothing is written down."""
    database: str | None = None
    """The store's file; None: it has none."""
    thinks: bool = False
    """Whether somebody thinks: another report may hear more, though nothing happens."""
    notices: Annotated[tuple[Sentence, ...], Field(max_length=64)] = ()
    """What is not as it should be."""

    def __post_init__(self) -> None:
        if (self.kind == "apply") != (self.request is not None):
            raise WireError(f"directive.kind is {self.kind}; it must be apply with a request, and another one without")
        request = self.request
        if request is None or (0 <= request.discard <= _MOST_ASKED_STEPS and 1 <= request.steps <= _MOST_ASKED_STEPS):
            return
        raise WireError(
            f"directive.request is for {request.discard} and {request.steps} steps; at most {_MOST_ASKED_STEPS} of "
            "each can be measured"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """The training, or its tuning, has ended."""

    protocol: Protocol
    session: Identity
    steps: Natural
    """That were taken since it was attached."""
    begins: Natural
    """Steps before its search begins, at least."""
    over: bool = False
    """Whether the tuning was given up for good."""
    reason: Sentence = ""
    """Why it ended; "": the training did."""
    remarks: Annotated[tuple[Annotated[Remark, AfterValidator(_is_of_a_run)], ...], Field(max_length=64)] = ()
    """What was found out beside the search."""
    count: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Farewell:
    """What came of it."""

    protocol: Protocol
    sentence: str = ""
    warning: bool = False
    notices: tuple[str, ...] = ()


def masked(argv: Sequence[str]) -> tuple[str, ...]:
    """Arguments of a command without values of secrets and passwords in URLs."""
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
