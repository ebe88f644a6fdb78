"""What is shown of runs: from the brains in memory, and the rest from the store, which is the truth."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zftune.daemon.brain.brain import Brain
from zftune.daemon.sampling import WINDOW_S, Node, Seen
from zftune.daemon.wire import StepFigures, decode
from zftune.store.types import ranks_in_words
from zftune.tuner.facts import ALONE, Company
from zftune.tuner.scores import Gain, in_a_row

if TYPE_CHECKING:
    from zftune.store.store import Store

_RECENT = 20
_MOST_APART = 10.0
"""Percentage points between waiting by events and idleness by NVML: more than that is pointed out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuView:
    """A run's GPU over the last seconds, beside what the run's own events say. Percentages; null: not known."""

    uuid: str
    utilisation: float | None
    """By NVML."""
    idle: float | None
    """The rest."""
    stall: float | None
    """Of the step time, by the run's events."""
    throttled_by: list[str]
    power_w: float | None
    sentence: str
    """Both in words, or why NVML tells nothing."""
    apart: bool
    """Whether the two differ by more than 10 points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run at a glance."""

    run: str
    record: str | None
    """Its run in the store; null: nothing is written down."""
    state: str
    """warming, baseline, searching, confirming, frozen, drifted, paused or ended."""
    reason: str
    model: str
    ranks: str
    """How many train it, and how they share its weights, in words."""
    pid: int
    argv: list[str]
    began_unix_s: float
    silent_s: float
    """Since its agent was heard of."""
    step: int
    """The last that was reported."""
    step_ms: float | None
    """Median of the last steps; null: none was reported."""
    stall_ms: dict[str, float]
    """Mean of the last steps, by cause."""
    loss: float | None
    dropped: int
    """Statistics that the agent had no room for."""
    knobs: dict[str, Any] | None
    """That hold, by the last report."""
    incumbent: dict[str, Any] | None
    """The best so far."""
    notices: list[str]
    gpu: GpuView | None
    """Null: it trains on none, or is sampled no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialView:
    """A setting that was thought of."""

    number: int
    source: str
    state: str
    reason: str | None
    knobs: dict[str, Any]
    predicted_step_ms: float | None
    step_ms: float | None
    """Of its newest measurement that counts."""
    measurements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionView:
    """What was decided, and why."""

    kind: str
    reason: str
    trial: int | None
    at_unix_s: float
    details: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobsView:
    """Knobs that held from a step on."""

    step: int
    knobs: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class GainView:
    """Of the incumbent over the knobs that the search began from."""

    share: float
    """Of the step time that is saved."""
    error: float
    """Two standard errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDetails:
    """A run with all that was tried and decided."""

    run: RunView
    gain: GainView | None
    """Null: nothing was adopted."""
    steps: list[StepFigures]
    """The last ones."""
    changes: list[KnobsView]
    """The knobs over time; the last changes."""
    trials: list[TrialView]
    decisions: list[DecisionView]


def run_view(brain: Brain, silent_s: float, node: Node | None = None) -> RunView:
    """A run at a glance.

    Args:
        brain: of the run.
        silent_s: since its agent was heard of.
        node: samples its GPU.
    """
    steps = list(brain.steps)[-_RECENT:]
    times = [one.step_ms for one in steps if one.step_ms is not None]
    hello, thought = brain.hello, brain.thought
    model = hello.training.get("model")
    return RunView(
        run=hello.run,
        record=brain.record,
        state=brain.state.name,
        reason=brain.state.reason,
        model=str(model["name"]) if isinstance(model, Mapping) else "",
        ranks=_ranks(hello.training.get("company")),
        pid=hello.pid,
        argv=list(hello.argv),
        began_unix_s=hello.began_unix_s,
        silent_s=round(silent_s, 3),
        step=steps[-1].step if steps else 0,
        step_ms=statistics.median(times) if times else None,
        stall_ms=_stall_ms(steps),
        loss=brain.losses[-1][1] if brain.losses else None,
        dropped=brain.dropped,
        knobs=brain.knobs,
        incumbent=None if thought is None else thought.incumbent.knobs(),
        notices=list(brain.notices),
        gpu=_gpu_view(brain, None if node is None else node.gpu(hello.run)),
    )


def _ranks(company: Any) -> str:
    known = decode(Company, company, "company") if company is not None else ALONE
    return ranks_in_words(known.ranks, known.nodes, known.shards)


def _gpu_view(brain: Brain, found: tuple[str, Seen] | None) -> GpuView | None:
    if found is None:
        return None
    uuid, seen = found
    figures = seen.figures or {}
    utilisation, stall = figures.get("utilisation_percent"), _stall_percent(list(brain.steps))
    idle = None if utilisation is None else 100 - utilisation
    apart = idle is not None and stall is not None and abs(idle - stall) > _MOST_APART
    by_events = "stall by events " + ("not known" if stall is None else f"{stall:.0f}%")
    if idle is None:
        sentence = f"{by_events}, NVML tells nothing: {seen.missing or 'no utilisation was read'}"
    else:
        sentence = f"{by_events}, NVML idle {idle:.0f}%"
    return GpuView(
        uuid=uuid,
        utilisation=utilisation,
        idle=idle,
        stall=stall,
        throttled_by=list(figures.get("throttle_reasons") or ()),
        power_w=figures.get("power_w"),
        sentence=sentence + (": more than 10 points apart" if apart else ""),
        apart=apart,
    )


def _stall_percent(steps: Sequence[StepFigures]) -> float | None:
    """Over the steps of the time that the samplers show."""
    total_ms = stall_ms = 0.0
    for one in reversed(steps):
        if one.step_ms is None or one.stall_ms is None:
            continue
        total_ms += one.step_ms
        stall_ms += sum(one.stall_ms.values())
        if total_ms >= 1e3 * WINDOW_S:
            break
    return 100 * stall_ms / total_ms if total_ms else None


def run_details(brain: Brain, silent_s: float, store: Store | None, node: Node | None = None) -> RunDetails:
    """A run with its trials and decisions.

    Raises:
        StoreError: the store could not be read.
    """
    view, record = run_view(brain, silent_s, node), brain.record
    if store is None or record is None:
        return RunDetails(
            run=view, gain=None, steps=list(brain.steps), changes=_changes(brain), trials=[], decisions=[]
        )
    rows = store.trials(record)
    trials = []
    for row in rows:
        measured = store.measurements(row.trial_id)
        valid = [one.step_ms for one in measured if one.void_reason is None]
        trials.append(
            TrialView(
                number=row.number,
                source=row.source,
                state=row.state.value,
                reason=row.reason,
                knobs=dict(row.knobs),
                predicted_step_ms=row.predicted_step_ms,
                step_ms=valid[-1] if valid else None,
                measurements=len(measured),
            )
        )
    numbers = {row.trial_id: row.number for row in rows}
    decisions = [
        DecisionView(
            kind=one.kind,
            reason=one.reason,
            trial=None if one.trial_id is None else numbers.get(one.trial_id),
            at_unix_s=one.at_unix_s,
            details=dict(one.details),
        )
        for one in store.decisions(record)
    ]
    return RunDetails(
        run=view,
        gain=_gain(decisions),
        steps=list(brain.steps),
        changes=_changes(brain),
        trials=trials,
        decisions=decisions,
    )


def _changes(brain: Brain) -> list[KnobsView]:
    return [KnobsView(step=step, knobs=knobs) for step, knobs in list(brain.changes)]


def _gain(decisions: Sequence[DecisionView]) -> GainView | None:
    """From what was written down: the search itself may be at work."""
    adopted: list[Gain] = []
    for one in decisions:
        if one.kind == "adopt":
            adopted.append(Gain(one.details["gain"], one.details["error"]))
        elif one.kind == "rollback":
            del adopted[-1:]
        elif one.kind == "guard":
            adopted.clear()
    found = in_a_row(adopted)
    return None if found is None else GainView(share=found.share, error=2 * found.error)


def _stall_ms(steps: list[StepFigures]) -> dict[str, float]:
    known = [one.stall_ms for one in steps if one.stall_ms is not None]
    causes = sorted({cause for one in known for cause in one})
    return {cause: statistics.fmean(one.get(cause, 0.0) for one in known) for cause in causes}
