"""What `zftune explain --json` writes: what `zftune tune --json` says of a search, and every measurement behind it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from zftune import __version__
from zftune.explain import words
from zftune.explain.replay import Decided, Replay, replay
from zftune.store.facts import facts_of, goes_on
from zftune.store.types import RunRecord, RunState, TrialRecord, TrialState
from zftune.tuner.scores import ExplorationCost

if TYPE_CHECKING:
    from zftune.store.store import Store

SCHEMA = "zftune.explain/1"
_QUALITY = "(1 - coverage)"
_INTERRUPTED = "Interrupted"
_UNFINISHED = (TrialState.ABORTED, TrialState.CRASHED, TrialState.VOID)


def explain_document(store: Store, run: RunRecord, clock: Callable[[], float] = time.time) -> dict[str, Any]:
    """Everything about a run.

    Args:
        store: open.
        run: of the store.
        clock: wall clock, seconds.

    Raises:
        StoreError: the store could not be read.
    """
    trials, told = read(store, run, clock)
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
            "micro_batch": run.key.micro_batch,
            "sequence": run.key.sequence,
            "dtype": run.key.dtype,
            "world_size": run.key.world_size,
            "nodes": run.key.nodes,
            "shards": run.key.shards,
            "ranks": run.key.ranks,
        },
        "quality": run.key.quality,
        **_search(run, trials, told),
    }
    return {**document, "verdict": words.verdict(document)}


def with_rows(document: Mapping[str, Any], store: Store, run_id: str) -> dict[str, Any]:
    """The document of a tuned run with what only its rows tell: every measurement, and when it broke even.

    Args:
        document: of `zftune tune --json`, whose search had begun.
        store: open.
        run_id: of the run.

    Raises:
        StoreError: the store could not be read.
    """
    run = next(one for one in store.runs() if one.run_id == run_id)
    _, told = read(store, run, time.time)
    return {
        **document,
        "run_id": run_id,
        "decisions": [_decision(one) for one in told.decided],
        "history": [asdict(one) for one in told.measured],
        "cost": {**document["cost"], **_break_even(told)},
    }


def read(store: Store, run: RunRecord, clock: Callable[[], float]) -> tuple[list[TrialRecord], Replay]:
    """A run's trials, and what its rows tell.

    Raises:
        StoreError: the store could not be read.
    """
    trials = store.trials(run.run_id)
    measurements = {row.trial_id: store.measurements(row.trial_id) for row in trials}
    told = replay(trials, measurements, store.decisions(run.run_id))
    now = clock()
    until = now if goes_on(store, run, now) else run.ended_unix_s if run.state is RunState.FINISHED else None
    trains_on = run.key.backend == "zenflow"  # others train nothing but trials
    if until is not None and told.measured and trains_on and facts_of(store, run.key)[1].rig is None:
        told.go_on(max(0.0, until - told.last_unix_s))
    return trials, told


def _run(store: Store, run: RunRecord, told: Replay, now: float) -> dict[str, Any]:
    died = run.state is RunState.RUNNING and not goes_on(store, run, now)  # and nobody has closed it yet
    return {
        "run_id": run.run_id,
        "state": RunState.LOST.value if died else run.state.value,
        "backend": run.key.backend,
        "stage": run.key.stage,
        "model_id": run.key.model_id,
        "hw_id": run.key.hw_id,
        "began_unix_s": run.began_unix_s,
        "ended_unix_s": run.ended_unix_s,
        "resumed": sum(one.decision.kind == "resume" for one in told.decided),
        "usable_cores": run.usable_cores,
        "settings": dict(run.settings),
        "versions": dict(run.versions),
    }


def _search(run: RunRecord, trials: Sequence[TrialRecord], told: Replay) -> dict[str, Any]:
    budget = run.settings.get("budget_steps")
    rows = [_trial(run, row, told) for row in trials]
    gain = told.gain
    ends = [one.decision for one in told.decided if one.decision.kind in ("stop", "guard", "resume")]
    stopped = ends[-1].reason if ends and ends[-1].kind != "resume" else None
    cost = ExplorationCost(
        spent_s=told.account.spent_s, elapsed_s=told.account.elapsed_s, start_step_s=(told.start_step_ms or 0.0) / 1e3
    )
    return {
        "budget": None if budget is None else {"steps": budget, "fixed_because": run.settings.get("fixed_because")},
        "interrupted": stopped is not None and stopped.startswith(_INTERRUPTED),
        "start": rows[0] if rows else None,
        "best": rows[told.incumbent] if rows else None,
        "gain": None if gain is None else {"share": gain.share, "error": 2 * gain.error},
        "cost": {
            "spent_s": cost.spent_s,
            "allowed_s": cost.allowed_s,
            "elapsed_s": cost.elapsed_s,
            **_break_even(told),
        },
        "measurements": told.measurements,
        "stopped": stopped,
        "trials": rows,
        "decisions": [_decision(one) for one in told.decided],
        "history": [asdict(one) for one in told.measured],
        "rejected": words.rejected(rows),
        "feasible": _region(run, rows, budget),
        "notices": [],
    }


def _break_even(told: Replay) -> dict[str, float | None]:
    share = 0.0 if told.gain is None else told.gain.share
    account = told.account
    return {
        "saved_s": account.saved_s,
        "break_even_s": account.break_even_s,
        "remaining_s": account.remaining_s(share),
    }


def _trial(run: RunRecord, row: TrialRecord, told: Replay) -> dict[str, Any]:
    plans = run.key.backend == "zenflow"  # others have no planner
    return {
        "number": row.number,
        "knobs": dict(row.knobs),
        "source": row.source,
        "state": row.state.value,
        "reason": row.reason or (told.reasons.get(row.number) if row.state in _UNFINISHED else None),
        "step_ms": told.step_ms(row.number),
        "predicted_step_ms": row.predicted_step_ms if plans else None,
        "staleness_steps": words.staleness_steps(row.knobs, run.key.backend),
        "quality_cost_steps": _quality_cost(row, run.settings.get("budget_steps")),
        "constraint": row.constraint,
    }


def _quality_cost(row: TrialRecord, budget: float | None) -> float | None:
    """What its constraint says of (1 - coverage) x staleness; None: it says nothing of that."""
    by_quality = row.state is not TrialState.REJECTED or (row.reason or "").startswith(_QUALITY)
    if row.number == 0 or not budget or row.constraint is None or not by_quality:
        return None
    return (1 + row.constraint) * budget


def _region(run: RunRecord, rows: Sequence[Mapping[str, Any]], budget: float | None) -> list[dict[str, float]] | None:
    if "feasible" in run.settings:
        kept: list[dict[str, float]] | None = run.settings["feasible"]
        return kept
    return _feasible(rows, budget) if run.key.backend == "zenflow" else None


def _feasible(rows: Sequence[Mapping[str, Any]], budget: float | None) -> list[dict[str, float]] | None:
    """How long a window may be at each k that was judged; see `zftune.tuner.document.feasible`."""
    found: dict[float, list[float]] = defaultdict(list)
    for row in rows:
        k, cost, stale = row["knobs"].get("topk_ratio"), row["quality_cost_steps"], row["staleness_steps"]
        if budget and cost and stale and isinstance(k, int | float):
            found[float(k)].append(budget * stale / cost)
    most = [(k, sum(limits) / len(limits)) for k, limits in sorted(found.items())]
    # With a lag of one step a gradient waits (S + 1) / 2 steps on average, with a lag of S steps it waits S.
    limits = [{"topk_ratio": k, "update_interval": 2 * stale - 1, "with_any_lag": stale} for k, stale in most]
    return limits if len(limits) > 1 else None


def _decision(one: Decided) -> dict[str, Any]:
    decision = one.decision
    return {
        "kind": decision.kind,
        "reason": decision.reason,
        "trial": one.trial,
        "details": dict(decision.details),
        "step": decision.step,
        "at_s": one.at_s,
        "at_unix_s": decision.at_unix_s,
        "incumbent": one.incumbent,
        "measured": list(one.measured),
    }
