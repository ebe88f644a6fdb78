"""What `zftune explain --json` writes: what `zftune tune --json` says of a search, and every measurement behind it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import TYPE_CHECKING, Any

from zftune import __version__
from zftune.errors import BadInputError
from zftune.explain import words
from zftune.explain.summary import Decided, RunSummary
from zftune.quality import (
    adopted_from,
    allowed_loss_percent,
    coverage_warning,
    most_late_steps,
    selected_share,
    summary,
)
from zftune.store.preset_file import escaped
from zftune.store.store import facts_of, goes_on, is_written_to
from zftune.store.types import Curve, RunRecord, RunState, TrialRecord, TrialState
from zftune.text import slowest_rank
from zftune.tuner.cost import ExplorationCost
from zftune.tuner.states import LEARNING_RATE, SearchOptions

if TYPE_CHECKING:
    from zftune.store.store import Store


SCHEMA = "zftune.explain/1"
TUNE_SCHEMA = "zftune.tune/1"
_FAR_MORE = 1.25  # times the newest movement: less is noise, and no reason to name two
_ENDS, _GOES_ON = ("stop", "guard"), ("resume", "reopen")
_UNKNOWN = (
    "run",
    "budget",
    "start",
    "best",
    "gain",
    "cost",
    "measurements",
    "stopped",
    "feasible",
    "loss",
    "coverage",
    "curve",
    "ranks_ms",
)
"""Of a search of which nothing was written down."""


def explain_document(store: Store, run: RunRecord, clock: Callable[[], float] = time.time) -> dict[str, Any]:
    """Everything about a run; `clock` is the wall clock, s.

    Raises:
        StoreError: the store could not be read.
    """
    told = RunSummary.read(store, run.run_id)
    trials = told.trials
    model, hardware = facts_of(store, run.key)
    document = {
        "schema": SCHEMA,
        "zftune": __version__,
        "run": _run(store, run, told, clock()),
        "device": hardware.gpu or hardware.cpu_model or hardware.hw_id,
        "rig": None if hardware.rig is None else {"name": hardware.rig},
        "workload": {
            "model": model.name or model.model_id,
            "parameters": model.parameters,
            "micro_batch": run.key.micro_batch or None,
            "sequence": run.key.sequence or None,
            "dtype": run.key.dtype,
            "world_size": run.key.world_size,
            "nodes": run.key.nodes,
            "shards": run.key.shards,
            "ranks": run.key.ranks,
            "learning_rate": run.settings.get(LEARNING_RATE),
        },
        "quality": run.key.quality,
        "ranks_ms": list(told.ranks_ms) or None,
        **_search(run, trials, told),
        **_quality(store.curve(run.run_id), run.knobs, trials, told.incumbent),
    }
    slowest = slowest_rank(dict(enumerate(told.ranks_ms)))
    document["notices"] += [] if slowest is None else [slowest]
    return {**document, "verdict": words.verdict(document)}


def _quality(curve: Curve, knobs: Mapping[str, Any], trials: Sequence[TrialRecord], best: int) -> dict[str, Any]:
    """How the training went beside its speed."""
    knobs = curve.changes[-1].knobs if curve.changes else knobs
    found = summary([point.loss for point in curve.points if point.loss is not None])
    since = curve.changes[-1].step if curve.changes else 0
    held = [one.coverage for one in curve.points if one.coverage is not None and one.step - one.steps >= since]
    covered = fmean(held) if held else None  # of what holds now: other settings, which were tried, select others
    start = adopted_from(knobs, trials[0].knobs, trials[best].knobs) if trials else None
    warning = coverage_warning(covered, knobs, start)
    return {
        "loss": None if found is None else {**asdict(found), "sentence": str(found)},
        "coverage": covered,
        "curve": {name: list(rows) for name, rows in asdict(curve).items()},
        "notices": [] if warning is None else [warning],
    }


def tune_document(
    store: Store, run_id: str | None, about: Mapping[str, Any], notices: Sequence[str], conclusion: str
) -> dict[str, Any]:
    """The document of `zftune tune --json`: that of `zftune explain --json`, and what only the command knows.

    `about` has "device", "rig", "workload", "quality", "interrupted"; `conclusion` is the result where nothing was
    written down (`run_id` None).

    Raises:
        StoreError: the store could not be read.
    """
    if run_id is None:
        empty: dict[str, Any] = {name: [] for name in ("trials", "decisions", "history", "rejected")}
        found = {"zftune": __version__, **dict.fromkeys(_UNKNOWN), **empty, "notices": []}
    else:
        found = explain_document(store, next(one for one in store.runs() if one.run_id == run_id))
    document = {**found, **about, "schema": TUNE_SCHEMA, "notices": [*found["notices"], *notices]}
    return {**document, "verdict": words.verdict(document) if run_id is not None else conclusion.splitlines()}


def _run(store: Store, run: RunRecord, told: RunSummary, now: float) -> dict[str, Any]:
    lives = goes_on(store, run, now)
    state = RunState.RUNNING if lives else RunState.LOST if run.state is RunState.RUNNING else run.state
    return {
        "run_id": run.run_id,
        "state": "ended" if state is RunState.LOST else state.value,
        "trained_on": state is RunState.FINISHED and told.trained_on,
        "tuned": lives and is_written_to(store, run, now),
        "backend": run.key.backend,
        "stage": run.key.stage,
        "model_id": run.key.model_id,
        "hw_id": run.key.hw_id,
        "began_unix_s": run.began_unix_s,
        "ended_unix_s": run.ended_unix_s,
        "resumed": len(told.account.earlier),
        "usable_cores": run.usable_cores,
        "settings": dict(run.settings),
        "versions": dict(run.versions),
    }


def _search(run: RunRecord, trials: Sequence[TrialRecord], told: RunSummary) -> dict[str, Any]:
    began_with = run.settings.get("budget_steps")
    moves = told.movement_percent if run.settings.get("movement_percent") is not None else None
    budget = began_with if moves is None else most_late_steps(run.key.quality, moves)
    rows = [_trial(run, row, told) for row in trials]
    ends = [one.decision for one in told.decided if one.decision.kind in (*_ENDS, *_GOES_ON)]
    stopped = ends[-1].reason if ends and ends[-1].kind in _ENDS else None
    total = told.account.total
    cost = ExplorationCost(
        SearchOptions().cost_share, SearchOptions().cost_floor_s, spent_s=total.spent_s, elapsed_s=total.seconds
    )
    return {
        "budget": None if budget is None else _budget(run, budget, told),
        "interrupted": stopped is not None and run.state is RunState.LOST,
        "start": rows[0] if rows else None,
        "best": rows[told.incumbent] if rows else None,
        "gain": gain(told),
        "cost": {
            "spent_s": cost.spent_s,
            "allowed_s": cost.allowed_s,
            "elapsed_s": cost.elapsed_s,
            "steps": total.steps or None,
            "tokens": total.tokens_told,
            **_break_even(told),
        },
        "measurements": told.measurements,
        "stopped": stopped,
        "trials": rows,
        "decisions": [decision(one) for one in told.decided],
        "history": [asdict(one) for one in told.measured],
        "rejected": words.rejected(rows),
        "feasible": _region(run, began_with, budget),
        "notices": [],
    }


def _budget(run: RunRecord, steps: float, told: RunSummary) -> dict[str, Any]:
    """What bounds lateness; the movement is the newest that was measured, beside the largest where that was far more.

    That of the warm-up alone, over which a learning rate may have risen, is told where the search measured none.
    """
    movement, rate = run.settings.get("movement_percent"), run.settings.get("movement_rate")
    if movement is not None and told.movement_percent is not None:
        movement, rate = told.movement_percent, told.movement_rate
    peak = told.peak_movement
    if peak is None or movement is None or peak[0] <= _FAR_MORE * movement:
        peak = None
    return {
        "steps": steps,
        "fixed_because": run.settings.get("fixed_because"),
        "movement_percent": movement,
        "movement_learning_rate": rate,
        "peak_movement_percent": None if peak is None else peak[0],
        "peak_learning_rate": None if peak is None else peak[1],
        "expected_loss_percent": None if movement is None else allowed_loss_percent(run.key.quality, movement)[0],
    }


def gain(told: RunSummary) -> dict[str, Any] | None:
    """Of the incumbent over its reference, with two standard errors; None: nothing was adopted."""
    found = told.gain
    if found is None:
        return None
    return {"share": found.share, "error": 2 * found.error, "reference": told.reference}


def _break_even(told: RunSummary) -> dict[str, float | None]:
    share = 0.0 if told.gain is None else told.gain.saves
    account = told.account
    return {
        "saved_s": account.total.saved_s,
        "break_even_s": account.break_even_s,
        "remaining_s": account.remaining_s(share),
    }


def _trial(run: RunRecord, row: TrialRecord, told: RunSummary) -> dict[str, Any]:
    return {
        **trial(row, told),
        "staleness_steps": words.staleness_steps(row.knobs),
        "quality_cost_steps": _quality_cost(run, row),
        "constraint": row.constraint,
    }


def trial(row: TrialRecord, told: RunSummary) -> dict[str, Any]:
    """A setting, and what became of it."""
    return {
        "number": row.number,
        "knobs": dict(row.knobs),
        "source": row.source,
        "state": row.state.value,
        "reason": told.reason(row),
        "step_ms": told.step_ms(row.number),
        "predicted_step_ms": row.predicted_step_ms,
    }


def _quality_cost(run: RunRecord, row: TrialRecord) -> float | None:
    """The weighted staleness; None: not known, as where it was rejected, by whichever limit."""
    budget = run.settings.get("budget_steps")
    late, ratio = words.staleness_steps(row.knobs), row.knobs.get("topk_ratio")
    if run.settings.get("movement_percent") is not None and late is not None and isinstance(ratio, int | float):
        return (1 - selected_share(ratio)) * late
    if row.number == 0 or not budget or row.constraint is None or row.state is TrialState.REJECTED:
        return None
    return (1 + row.constraint) * float(budget)


def _region(run: RunRecord, began_with: float | None, budget: float | None) -> list[dict[str, float]] | None:
    """What the budget allows now; a run keeps what its first one did."""
    kept: list[dict[str, float]] | None = run.settings.get("feasible")
    if not kept or not began_with or budget is None or budget == began_with:
        return kept
    limits = [(one["topk_ratio"], one["with_any_lag"] * budget / began_with) for one in kept]
    return [{"topk_ratio": k, "update_interval": 2 * stale - 1, "with_any_lag": stale} for k, stale in limits]


def decision(one: Decided) -> dict[str, Any]:
    """What was decided, when, and by which measurements."""
    found = {**asdict(one), "measured": list(one.measured)}
    return {**found.pop("decision"), **found}


LAST = "last"
_SHOWN = 8  # digits of an id
_MOST = 3


def chosen_run(store: Store, name: str) -> tuple[RunRecord, str | None]:
    """The run of an id or its beginning, or with "last" the one that trained last and measured something.

    Returns:
        The run, and a sentence where others trained after it, although the last was asked for.

    Raises:
        BadInputError: there is no such run, or there are several; names those that are near.
        StoreError: the store could not be read.
    """
    runs = _by_end(store)
    if not runs:
        raise BadInputError(f"RUN '{_cut(name)}': the store has no runs yet, `zftune run --online` makes one")
    if name == LAST:
        return _last(store, runs)
    found = [run for run in runs if name and run.run_id.startswith(name)]
    if len(found) == 1:
        return found[0], None
    if found:
        raise BadInputError(f"RUN '{_cut(name)}': {len(found)} runs begin with that: {_ids(found)}")
    from zenflow.names import near_names

    ids = [run.run_id[:_SHOWN] for run in runs]
    near = near_names(name[:_SHOWN], ids, 0.4) or ids
    raise BadInputError(
        f"RUN '{_cut(name)}' is not in the store; give an id, its beginning or 'last' (near: {', '.join(near[:_MOST])})"
    )


def _by_end(store: Store) -> list[RunRecord]:
    """All runs, those that trained last first: one that goes on before all, one that was resumed by its later end."""
    now = time.time()

    def until(run: RunRecord) -> tuple[float, float]:
        if run.ended_unix_s is not None:
            return run.ended_unix_s, run.began_unix_s
        return math.inf if goes_on(store, run, now) else run.began_unix_s, run.began_unix_s

    return sorted(store.runs(), key=until, reverse=True)


def _last(store: Store, runs: Sequence[RunRecord]) -> tuple[RunRecord, str | None]:
    """The first of `runs` (the last trained first) with a measurement; if there is none, the first."""
    told = next((run for run in runs if _has_measured(store, run)), runs[0])
    before = runs.index(told)
    if before == 0:
        return told, None
    newer = f"run {_ids(runs[:1])}" if before == 1 else f"{before} runs"
    return told, f"This is the last run with a measurement; {newer} after it measured nothing."


def _has_measured(store: Store, run: RunRecord) -> bool:
    return any(store.measurements(trial.trial_id) for trial in store.trials(run.run_id))


def _ids(runs: Sequence[RunRecord]) -> str:
    """Beginnings that tell the runs apart."""
    length = next(n for n in range(_SHOWN, 65) if len({run.run_id[:n] for run in runs}) == len(runs))
    ids = [run.run_id[:length] for run in runs]
    return ", ".join(ids[:_MOST]) + ("" if len(ids) <= _MOST else f" and {len(ids) - _MOST} more")


def _cut(name: str) -> str:
    return escaped(name)[:80]
