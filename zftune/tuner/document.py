"""What `zftune tune --json` writes: the knobs that were found, how that is known, and everything that was tried."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from zftune.tuner.scores import Gain, score
from zftune.tuner.states import Trial

if TYPE_CHECKING:
    from zftune.tuner.builtin import Training
    from zftune.tuner.run import TunedRun
    from zftune.tuner.search import Search

SCHEMA = "zftune.tune/1"


def build_document(run: TunedRun, training: Training, device_name: str) -> dict[str, Any]:
    """Put it together.

    Args:
        run: the tuned training.
        training: what was trained.
        device_name: the GPU's name, or what stands for one.
    """
    from zftune.telemetry import fingerprint, hardware, software

    task, rig, search = run.task, training.rig, run.search
    machine = hardware()
    return {
        "schema": SCHEMA,
        "device": device_name,
        "rig": None if rig is None else {"name": rig.name, "source": rig.source},
        "workload": training.workload.describe(
            micro_batch=task.micro_batch, sequence=task.sequence, text=task.corpus.name
        ),
        "fingerprint": fingerprint(training.workload.module, machine=machine, rig=None if rig is None else rig.name),
        "hardware": machine,
        "software": software(),
        "seed": task.seed,
        "steps": run.steps,
        "interrupted": run.interrupted,
        "coverage": run.coverage_source or None,
        "overhead_s": round(run.overhead_s, 3),
        "notices": run.notices,
        **(_nothing(run.quality) if search is None else search_document(search)),
    }


def _nothing(quality: str) -> dict[str, Any]:
    """The search had not begun."""
    names = ("budget", "start", "best", "gain", "cost", "measurements", "stopped")
    return {"quality": quality, **dict.fromkeys(names), "trials": [], "decisions": []}


def search_document(search: Search) -> dict[str, Any]:
    """What a search found, and how."""
    book, space = search.book, search.book.space
    gain = book.gain
    step_s = book.incumbent_step_ms / 1e3
    return {
        "quality": space.quality,
        "budget": {"steps": space.budget, "fixed_because": space.fixed_because or None},
        "start": trial_document(search, book.trials[0]),
        "best": trial_document(search, book.incumbent),
        "gain": None if gain is None else gain_document(gain),
        "cost": {
            "spent_s": search.cost.spent_s,
            "allowed_s": search.cost.allowed_s(step_s),
            "elapsed_s": search.cost.elapsed_s,
        },
        "measurements": search.measurements,
        "stopped": next((note.reason for note in reversed(search.notes) if note.kind in ("stop", "guard")), None),
        "trials": [trial_document(search, trial) for trial in book.trials],
        "decisions": [asdict(note) for note in search.notes],
    }


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
