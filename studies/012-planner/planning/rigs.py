"""Part 1: the planner's step times and stalls beside those measured on emulated accelerators."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from studykit import Results, code_digest, percentile

from zenflow import ZenFlowConfig
from zftune.emulation.machines import load_rig
from zftune.planner.closed_form import floor
from zftune.planner.model import ModelFacts
from zftune.planner.rates import Rates
from zftune.planner.simulate import simulate
from zftune.planner.split import split_of
from zftune.profile.measure import Measurement, Task, measure
from zftune.workload import load_text

RIGS = ("host-bound", "slow-link", "qwen2.5-1.5b-2xa100")
CODE = ("runtime/zenflow", "zftune/profile/measure.py", "zftune/workload")
MODEL = "tiny"
MOST_OFF = 0.005


A_BUCKET: dict[str, Any] = {"bucket_bytes": 50_000}
"""A 32nd of the model's matrices, as a large model has."""


def _sync(**knobs: Any) -> ZenFlowConfig:
    return ZenFlowConfig.zero_offload(select_interval=1 << 20, **A_BUCKET, **knobs).resolved()


def _windows(interval: int, **knobs: Any) -> ZenFlowConfig:
    knobs = {"topk_ratio": 0.05, "select_interval": 1 << 20, **A_BUCKET, **knobs}
    return ZenFlowConfig(update_interval=interval, **knobs).resolved()


GRID: Mapping[str, ZenFlowConfig] = {
    "sync-k0-none": _sync(),
    "sync-k0-bucket": _sync(pipeline="bucket"),
    "sync-k0.2-bucket": _sync(topk_ratio=0.2, pipeline="bucket"),
    "sync-k0-r0.5-none": _sync(offload_ratio=0.5),
    "sync-k0-r0.5-bucket": _sync(offload_ratio=0.5, pipeline="bucket"),
    "sync-k0-bucket-whole": _sync(pipeline="bucket", stream=False),
    "s1-k0.05": _windows(1),
    "s2-k0.05": _windows(2),
    "s4-k0.05": _windows(4),
    "s8-k0.05": _windows(8),
    "s2-k0.2": _windows(2, topk_ratio=0.2),
    "s4-k0.2": _windows(4, topk_ratio=0.2),
    "s8-k0.2": _windows(8, topk_ratio=0.2),
    "s4-k0": _windows(4, topk_ratio=0.0),
    "s4-k0.05-lag1": _windows(4, apply_lag=1),
    "s4-k0.05-lag2": _windows(4, apply_lag=2),
    "s8-k0.05-lag4": _windows(8, apply_lag=4),
    "s2-k0.05-r0.5": _windows(2, offload_ratio=0.5),
    "s4-k0.05-r0.75": _windows(4, offload_ratio=0.75),
    "s4-k0.05-none": _windows(4, pipeline="none"),
    "s4-k0.05-whole": _windows(4, stream=False),
}
QUICK = ("s4-k0.05", "s8-k0.2")
QUICK_RIG = "host-bound"


@dataclass(frozen=True, slots=True)
class Row:
    """One rig and setting, measured and predicted."""

    rig: str
    setting: str
    measured_ms: float
    predicted_ms: float
    floor_ms: float
    measured_stall_ms: float
    predicted_stall_ms: float

    @property
    def off(self) -> float:
        """Of the prediction, relative."""
        return self.predicted_ms / self.measured_ms - 1


def task_for(rig: str) -> Task:
    """The tiny model in bf16 on a rig."""
    return Task(
        model=MODEL,
        corpus=load_text(None),
        dtype=torch.bfloat16,
        micro_batch=1,
        sequence=64,
        seed=0,
        torch_device=torch.device("cpu"),
        rig=load_rig(rig),
    )


def predicted(rig: str, config: ZenFlowConfig) -> tuple[float, float, float]:
    """Step, stall and closed form, in ms."""
    model = ModelFacts.from_name(MODEL)
    elements = sum(math.prod(shape) for shape in model.weights if len(shape) > 1)
    rates = Rates.of_rig(load_rig(rig).for_elements(elements))
    split = split_of(model, config)
    steady = simulate(rates, split, config)
    # Events of the runtime do not see what the device waits for the thread.
    stall_ms = sum(ms for cause, ms in steady.stall_ms.items() if cause != "thread")
    return steady.step_ms, stall_ms, floor(rates, split, config).step_ms


def steps_for(config: ZenFlowConfig) -> int:
    """Whole windows, of which the second half counts."""
    return max(48 if config.overlap_step else 4, 2 * config.longest_window)


def measured(rig: str, config: ZenFlowConfig) -> Measurement:
    """Measure a setting."""
    return measure(task_for(rig), config, steps_for(config), lambda _done, _all: None)


def study(results: Results, *, quick: bool, again: bool, tell: Callable[[str, int, int], None]) -> list[Row]:
    """Measure what is not there yet."""
    rigs, names = ((QUICK_RIG,), QUICK) if quick else (RIGS, tuple(GRID))
    digest, rows = code_digest(*CODE), list[Row]()
    for number, (rig, name) in enumerate([(rig, name) for rig in rigs for name in names]):
        config = GRID[name]
        inputs = {
            "rig": rig,
            "values": {**load_rig(rig).values, **load_rig(rig).thread},
            "clock": "simulated",
            "knobs": dataclasses.asdict(config),
            "steps": steps_for(config),
            "code": digest,
        }
        record = None if again else results.load(f"{rig}--{name}", inputs)
        if record is None:
            tell(f"{rig}: {name}", number, len(rigs) * len(names))
            record = results.save(f"{rig}--{name}", inputs, figures_of(measured(rig, config)))
        rows.append(_row(rig, name, record["figures"]))
    return rows


def figures_of(run: Measurement) -> dict[str, Any]:
    """Of the second half of the measured steps, whole windows: where the log is tight, the first are not steady yet."""
    stats = run.stats[len(run.stats) // 2 :]
    stall = [sum((step.stall_ms or {}).values()) for step in stats]
    causes = {name: statistics.fmean((step.stall_ms or {}).get(name, 0.0) for step in stats) for name in _CAUSES}
    assert run.slack is not None
    return {
        "step_ms": statistics.fmean(step.step_ms or 0.0 for step in stats),
        "stall_ms": statistics.fmean(stall),
        "by_cause": causes,
        "real_work_ms_per_step": 1e3 * run.slack.worked_s / len(run.stats),
    }


_CAUSES = ("host", "h2d", "d2h", "select")


def _row(rig: str, name: str, figures: Mapping[str, Any]) -> Row:
    step, stall, least = predicted(rig, GRID[name])
    return Row(rig, name, figures["step_ms"], step, least, figures["stall_ms"], stall)


HEADS = ("rig", "setting", "measured", "simulated", "off", "closed form", "stall", "simulated")


def cells(row: Row) -> tuple[str, ...]:
    """Of the table."""
    return (
        row.rig,
        row.setting,
        f"{row.measured_ms:.1f} ms",
        f"{row.predicted_ms:.1f} ms",
        f"{row.off:+.3%}",
        f"{row.floor_ms:.1f} ms",
        f"{row.measured_stall_ms:.1f} ms",
        f"{row.predicted_stall_ms:.1f} ms",
    )


def verdicts(rows: Sequence[Row]) -> list[tuple[str, bool]]:
    """Each promise and whether it was kept."""
    off = sorted(abs(row.off) for row in rows)
    median, worst = percentile(off, 0.5), off[-1]
    over = [row for row in rows if row.floor_ms > 1.005 * row.measured_ms]
    return [
        (
            f"step time within {MOST_OFF:.1%}: worst {worst:.3%} of {len(rows)} settings, median {median:.4%}",
            worst <= MOST_OFF,
        ),
        (f"the closed form is a lower bound: above what was measured in {len(over)}", not over),
    ]
