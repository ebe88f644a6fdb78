"""What `zftune tune --json` writes: the knobs that were found, how that is known, and everything that was tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from zftune.store.types import ranks_in_words
from zftune.tuner.scores import Gain, score
from zftune.tuner.space import Space
from zftune.tuner.states import Trial

if TYPE_CHECKING:
    from zftune.tuner.builtin import Training
    from zftune.tuner.run import TunedRun
    from zftune.tuner.search import Search

SCHEMA = "zftune.tune/1"
_FEASIBLE_POINTS = 40


def build_document(run: TunedRun, training: Training, device_name: str) -> dict[str, Any]:
    """Put it together.

    Args:
        run: the tuned training.
        training: what was trained.
        device_name: the GPU's name, or what stands for one.
    """
    from zftune.telemetry import fingerprint, hardware, software

    task, rig, search, company = run.task, training.rig, run.search, training.company
    machine = hardware()
    return {
        "schema": SCHEMA,
        "device": device_name,
        "rig": None if rig is None else {"name": rig.name, "source": rig.source},
        "workload": {
            **training.workload.describe(micro_batch=task.micro_batch, sequence=task.sequence, text=task.corpus.name),
            "world_size": company.ranks,
            "nodes": company.nodes,
            "shards": company.shards,
            "ranks": ranks_in_words(company.ranks, company.nodes, company.shards),
        },
        "fingerprint": fingerprint(training.workload.module, machine=machine, rig=None if rig is None else rig.name),
        "hardware": machine,
        "software": software(),
        "seed": task.seed,
        "run_id": run.run_id,
        "steps": run.steps,
        "interrupted": run.interrupted,
        "origin": run.origin or None,
        "coverage": run.coverage_source or None,
        "overhead_s": round(run.overhead_s, 3),
        "notices": run.notices,
        **(nothing_found(run.quality) if search is None else search_document(search)),
    }


def nothing_found(quality: str) -> dict[str, Any]:
    """What stands for a search that had not begun."""
    names = ("budget", "start", "best", "gain", "cost", "measurements", "stopped", "feasible")
    return {"quality": quality, **dict.fromkeys(names), "trials": [], "decisions": []}


def search_document(search: Search) -> dict[str, Any]:
    """What a search found, and how."""
    book, space = search.book, search.book.space
    gain = book.gain
    return {
        "quality": space.quality,
        "budget": {"steps": space.budget, "fixed_because": space.fixed_because or None},
        "start": trial_document(search, book.trials[0]),
        "best": trial_document(search, book.incumbent),
        "gain": None if gain is None else gain_document(gain),
        "cost": {
            "spent_s": search.cost.spent_s,
            "allowed_s": search.cost.allowed_s,
            "elapsed_s": search.cost.elapsed_s,
        },
        "measurements": search.measurements,
        "stopped": next((note.reason for note in reversed(search.notes) if note.kind in ("stop", "guard")), None),
        "trials": [trial_document(search, trial) for trial in book.trials],
        "decisions": [asdict(note) for note in search.notes],
        "feasible": feasible(space),
    }


def feasible(space: Space) -> list[dict[str, float]] | None:
    """How long a window may be at each k; None where k and S do not vary.

    Args:
        space: of a search.

    Returns:
        `update_interval`: the longest with the least lag; `with_any_lag`: the longest with the most lag. Staleness is
        linear in S, so that these need not be whole.
    """
    names = {one.name: one.choices for one in space.dimensions}
    if space.fixed_because or not space.budget or not {"topk_ratio", "update_interval"} <= set(names):
        return None
    most = max(names["topk_ratio"])
    found = []
    for share in (most * (index / _FEASIBLE_POINTS) ** 2 for index in range(_FEASIBLE_POINTS + 1)):
        one, other = (_costs(space, share, interval, names.get("overlap_step")) for interval in (1, 2))
        if other[0] > one[0]:
            longest, any_lag = (1 + (space.budget - low) / (high - low) for low, high in zip(one, other, strict=True))
            found.append({"topk_ratio": share, "update_interval": longest, "with_any_lag": any_lag})
    return found


def _costs(space: Space, share: float, interval: int, overlaps: Sequence[bool] | None) -> tuple[float, float]:
    """The least and the most that a k and an S cost, by lag."""
    costs = [
        space.cost(replace(space.base, topk_ratio=share, update_interval=interval, apply_lag=lag, overlap_step=overlap))
        for lag in (1, interval)
        for overlap in (overlaps or (space.base.overlap_step,))
    ]
    return min(costs), max(costs)


def gain_document(gain: Gain) -> dict[str, float]:
    """A gain and two standard errors of it, shares of the old step time."""
    return {"share": gain.share, "error": 2 * gain.error}


def trial_document(search: Search, trial: Trial) -> dict[str, Any]:
    """One setting."""
    tokens = search.book.tokens
    return {
        "number": trial.number,
        "knobs": trial.setting.knobs(),
        "source": trial.source,
        "state": trial.state.value,
        "reason": trial.reason or None,
        "step_ms": score(trial.samples) * tokens / 1e3 if trial.samples else None,
        "predicted_step_ms": search.book.forecast(trial.setting).step_ms,
        "staleness_steps": trial.setting.mean_staleness_steps,
        "quality_cost_steps": search.book.space.cost(trial.setting),
        "constraint": trial.constraint,
    }
