"""Runs as the HTTP interface has them: from the sessions in memory, and the rest from `RunSummary`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from zftune.daemon.protocol.messages import StepFigures
from zftune.daemon.runs import states
from zftune.daemon.runs.session import RunSession
from zftune.daemon.server.sampling import WINDOW_S, Node, Seen
from zftune.errors import StoreError
from zftune.explain.summary import RunSummary
from zftune.explain.words import over
from zftune.quality import adopted_from, assumed_coverage, coverage_warning, summary
from zftune.store.account import Account, saved_with_error
from zftune.store.types import Curve, CurvePoint, KnobChange, ranks_in_words
from zftune.text import slowest_rank
from zftune.tuner.evidence import ERRORS
from zftune.words import DECISIONS, RUN_STATES, shares

V = TypeVar("V")
_RECENT = 20
_ELSEWHERE = "another training has gone on with it; zftune explain tells of it"
_MOST_APART = 10.0
"""Percentage points between waiting by events and idleness by NVML: more than that is pointed out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuView:
    """A run's GPU over the last seconds, beside what the run's own events say. Percentages; null: not known."""

    uuid: str
    """Of the GPU, as NVML has it."""
    utilisation: float | None
    """By NVML."""
    idle: float | None
    """The rest."""
    stall: float | None
    """Of the step time, by the run's events."""
    throttled_by: list[str]
    """Why clocks are lowered."""
    power_w: float | None
    """Watts; null: not known."""
    sentence: str
    """Both in words, or why NVML tells nothing."""
    apart: bool
    """Whether the two differ by more than 10 points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossView:
    """What losses show as far as their noise lets one see."""

    first: float
    """Mean of the first quarter of the steps."""
    last: float
    """Mean of the last quarter."""
    error: float | None
    """Two standard errors of either; null: there are too few to know."""
    trend: str
    """falling, rising, level (no more than noise) or unknown."""
    sentence: str
    """All of it in words, with no more digits than the noise leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoverageView:
    """Share of the gradient energy in the selected columns."""

    measured: float
    """Mean of the last steps."""
    assumed: float
    """What the planner takes where nothing is measured, at the same topk_ratio."""
    warning: str | None
    """A sentence where the first is far below the second; null: it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run at a glance."""

    run: str
    """Id of the run in this daemon."""
    record: str | None
    """Its run in the store; null: nothing is written down."""
    state: str
    """warming, baseline, searching, confirming, frozen, drifted, paused or ended."""
    title: str
    """The state as people read it."""
    reason: str
    """Why it is in that state."""
    model: str
    """Name of the model."""
    ranks: str
    """How many train it, and how they share its weights, in words."""
    pid: int
    """Of its process."""
    argv: list[str]
    """Its command."""
    began_unix_s: float
    """When it began, in seconds since 1970."""
    silent_s: float
    """Since its agent was heard of."""
    step: int
    """The last that is over, counted from 1; figures of it come later."""
    step_ms: float | None
    """Median of the last steps; null: none was reported."""
    stall_ms: dict[str, float]
    """Mean of the last steps, by cause."""
    loss: float | None
    """The newest; null: none is known."""
    loss_step: int | None
    """The last step that was over when the script gave that loss: it lags behind `step`."""
    losses: LossView | None
    """What the losses show, from the first step on; null: none is known."""
    coverage: CoverageView | None
    """Null: nothing is selected, or nothing was heard of it."""
    dropped: int
    """Statistics that the agent had no room for."""
    knobs: dict[str, Any] | None
    """That hold, by the last report."""
    incumbent: dict[str, Any] | None
    """The best so far."""
    notices: list[str]
    """Sentences: what is not as it should be."""
    account: AccountView
    """What it took, spent and gained."""
    gain: GainView | None
    """Of the best so far, as the search has it; null: nothing was adopted."""
    gpu: GpuView | None
    """Null: it trains on none, or is sampled no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialView:
    """A setting, and what became of it."""

    number: int
    """0, 1, .. in its run; 0 is the starting point."""
    source: str
    """Who proposed it: start, planner, search or preset."""
    state: str
    """planned, in_flight, measured, rejected, crashed or void."""
    fate: str
    """The state as people read it."""
    reason: str | None
    """Why it was rejected, or not measured to its end; null: it was neither."""
    knobs: dict[str, Any]
    """The setting."""
    predicted_step_ms: float | None
    """By the planner; null: not predicted."""
    step_ms: float | None
    """Mean of its blocks; null: it was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionView:
    """What was decided, and why."""

    kind: str
    """In a word of the interface."""
    title: str
    """The kind as people read it."""
    reason: str
    """Why, in a sentence."""
    trial: int | None
    """Number of the setting that it is about; null: about none."""
    at_unix_s: float
    """When, in seconds since 1970."""
    details: dict[str, Any]
    """Figures and marks of the sentence, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GainView:
    """Of the incumbent over the knobs that the search began from, or what quality or GPU memory put in their place."""

    share: float
    """Of the step time that is saved."""
    error: float
    """Two standard errors."""
    text: str
    """Share and error, with no more digits than the error leaves."""
    over: str | None = None
    """What it is over, in words; null in `run`: the store is not asked there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountView:
    """What the run took, spent and gained so far, over all the processes that have trained it."""

    steps: int
    """Steps that were taken."""
    elapsed_s: float
    """By the clock of the training."""
    tokens: int | None
    """Tokens in these steps; null: not told."""
    spent_s: float
    """By exploring: beyond what the incumbent would have taken."""
    saved_s: float
    """By the incumbents, against what they gain over."""
    saved: str
    """The same in words: with the error of the gain, where it is known."""
    break_even_s: float | None
    """After how many seconds the savings had caught up with the cost; null: they have not, or there were none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDetails:
    """A run with all that was tried and decided."""

    run: RunView
    """At a glance."""
    gain: GainView | None
    """Null: nothing was adopted."""
    steps: list[StepFigures]
    """The last ones."""
    curve: list[CurvePoint]
    """Step time, loss and coverage from the first step on, in at most 256 points, each the mean of some steps."""
    changes: list[KnobChange]
    """The knobs over time; the last changes."""
    trials: list[TrialView]
    """Every setting that was thought of."""
    incumbent: int | None
    """The trial whose knobs are the best so far; null: nothing is written down."""
    decisions: list[DecisionView]
    """What was decided, oldest first."""


def run_view(brain: RunSession, silent_s: float, node: Node | None = None) -> RunView:
    """A run at a glance.

    `silent_s`: since its agent's last report; `node` samples its GPU.
    """
    elsewhere = _trains_elsewhere(brain)
    steps, curve = list(brain.steps)[-_RECENT:], brain.curve.curve()
    since = curve.changes[-1].step if curve.changes else 0  # those before selected other columns
    times = [one.step_ms for one in steps if one.step_ms is not None]
    hello, thought = brain.hello, brain.thought
    training = hello.training
    found = None if thought is None else thought.gain
    gain = None if found is None else {"share": found.share, "error": ERRORS * found.error}
    return RunView(
        run=hello.run,
        record=brain.record,
        state=brain.state.name,
        title=RUN_STATES["running"] if elsewhere else states.title(brain.state),
        reason=_ELSEWHERE if elsewhere else brain.reason,
        model=training.model.name,
        ranks=ranks_in_words(training.company.ranks, training.company.nodes, training.company.shards),
        pid=hello.pid,
        argv=list(hello.argv),
        began_unix_s=hello.began_unix_s,
        silent_s=round(silent_s, 3),
        step=brain.step,
        step_ms=statistics.median(times) if times else None,
        stall_ms=_stall_ms(steps),
        loss=brain.losses[-1][1] if brain.losses else None,
        loss_step=brain.losses[-1][0] if brain.losses else None,
        losses=_loss_view(curve),
        coverage=_coverage_view(brain, [one for one in steps if one.step > since]),
        dropped=brain.dropped,
        knobs=None if brain.knobs is None else brain.knobs.knobs(),
        incumbent=None if thought is None else thought.incumbent.knobs(),
        notices=list(brain.notices),
        account=_account_view(_account(brain), gain),
        gain=None if gain is None else _gain_view(gain),
        gpu=_gpu_view(brain, None if node is None else node.gpu(hello.run)),
    )


def _trains_elsewhere(brain: RunSession) -> bool:
    """Whether a run has ended here, and another process has resumed it."""
    if brain.store is None or brain.record is None or not brain.over:
        return False
    return brain.store.trained_by(brain.record) not in (None, brain.hello.run)


def _account(brain: RunSession) -> Account:
    """Of one that has ended here, by the store, since another process may have resumed it."""
    if brain.store is None or brain.record is None or not brain.over:
        return brain.account
    try:
        found = brain.store.account(brain.record)
    except StoreError:  # what was heard of it still holds
        return brain.account
    return brain.account if found is None or found.total.seconds < brain.account.total.seconds else found


def _account_view(account: Account, gain: Mapping[str, float] | None) -> AccountView:
    total = account.total
    what = "saved" if total.saved_s >= 0 else "given up"
    saved = f"{saved_with_error(total.saved_s, gain).replace('+/-', '±')} {what}" if total.saved_s else "nothing saved"
    found = {**asdict(total), "elapsed_s": total.seconds, "tokens": total.tokens_told}
    return _shown(AccountView, found, saved=saved, break_even_s=account.break_even_s)


def _gain_view(gain: Mapping[str, Any], **more: str) -> GainView:
    return _shown(GainView, gain, text=shares(gain["share"], gain["error"], "±"), **more)


def _gpu_view(brain: RunSession, found: tuple[str, Seen] | None) -> GpuView | None:
    if found is None:
        return None
    uuid, seen = found
    figures = seen.figures or {}
    utilisation, stall = figures.get("utilisation_percent"), _stall_percent(list(brain.steps))
    idle = None if utilisation is None else 100 - utilisation
    apart = idle is not None and stall is not None and abs(idle - stall) > _MOST_APART
    by_events = "stall by events " + ("not known" if stall is None else f"{stall:.0f}%")
    if idle is None:
        sentence = f"{by_events}, no figure of NVML: {seen.missing or 'no utilisation was read'}"
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


def run_details(brain: RunSession, silent_s: float, node: Node | None = None) -> RunDetails:
    """A run with its trials and decisions."""
    view, curve = run_view(brain, silent_s, node), brain.curve.curve()
    shown: dict[str, Any] = {"curve": list(curve.points), "changes": list(curve.changes)}
    run = None if brain.store is None or brain.record is None else brain.store.run(brain.record)
    if brain.store is None or run is None:
        none: dict[str, Any] = {"gain": None, "trials": [], "incumbent": None, "decisions": []}
        return RunDetails(run=view, steps=list(brain.steps), **shown, **none)
    found = RunSummary.read(brain.store, run)
    trials, decisions, gain = found.trials(), found.decisions(), found.gain
    if trials:  # what is written down, so that no figure is of another moment than its neighbours
        slowest = None if found.state is None else slowest_rank(dict(enumerate(found.state.ranks_ms)))
        decided = {one["reason"] for one in decisions}
        notices = [one for one in [*view.notices, slowest] if one is not None and one not in decided]
        view = replace(view, incumbent=trials[found.best]["knobs"], notices=notices)
    return RunDetails(
        run=view,
        gain=None if gain is None else _gain_view(gain, over=over(gain)),
        steps=list(brain.steps),
        **shown,
        trials=[_shown(TrialView, one) for one in trials],
        incumbent=found.best if trials else None,
        decisions=[_shown(DecisionView, one, title=DECISIONS.get(one["kind"], one["kind"])) for one in decisions],
    )


def _shown(view: type[V], found: Mapping[str, Any], **more: Any) -> V:
    """What a view shows of a part of `zftune explain --json`."""
    names: Any = view.__dataclass_fields__  # type: ignore[attr-defined]
    return view(**{name: found[name] for name in names if name in found}, **more)


def _loss_view(curve: Curve) -> LossView | None:
    found = summary([point.loss for point in curve.points if point.loss is not None])
    return None if found is None else _shown(LossView, asdict(found), sentence=str(found))


def _coverage_view(brain: RunSession, steps: Sequence[StepFigures]) -> CoverageView | None:
    known = [one.coverage for one in steps if one.coverage is not None]
    if not known or brain.knobs is None:
        return None
    measured, knobs, thought = statistics.fmean(known), brain.knobs.knobs(), brain.thought
    start = None if thought is None else adopted_from(knobs, thought.start.knobs(), thought.incumbent.knobs())
    return CoverageView(
        measured=measured,
        assumed=assumed_coverage(brain.knobs.topk_ratio),
        warning=coverage_warning(measured, knobs, start),
    )


def _stall_ms(steps: list[StepFigures]) -> dict[str, float]:
    known = [one.stall_ms for one in steps if one.stall_ms is not None]
    causes = sorted({cause for one in known for cause in one})
    return {cause: statistics.fmean(one.get(cause, 0.0) for one in known) for cause in causes}
