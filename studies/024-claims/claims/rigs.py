"""Steps and stalls on every rig, trained in simulated time; and what DeepSpeed's own schedule takes at its rates."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from studykit import Job, code_digest

from claims import upstream
from zenflow import StepStats, ZenFlowConfig
from zftune.emulation import Rig
from zftune.emulation.machines import load_rig, rig_names
from zftune.planner.closed_form import floor
from zftune.planner.model import ModelFacts
from zftune.planner.rates import Rates
from zftune.planner.simulate import simulate
from zftune.planner.split import split_of
from zftune.profile.measure import Task, measure
from zftune.workload import load_text

FROM_PUBLISHED = ("llama2-7b-4xa100", "llama3-8b-gh200", "qwen2.5-1.5b-2xa100")
"""Rigs after published steps; the others are made up."""
NEVER = 1 << 20
"""As `select_interval`: selections stay as they are, so that all windows are alike."""
SYSTEMS: Mapping[str, ZenFlowConfig] = {
    "no offload": ZenFlowConfig.zero_offload(offload_ratio=0.0, pipeline="bucket"),
    "ZeRO-Offload": ZenFlowConfig.zero_offload(),
    "exact": ZenFlowConfig.zero_offload(pipeline="bucket"),
    "published": ZenFlowConfig(topk_ratio=0.1, update_interval=4, select_interval=NEVER),
    "S = 16": ZenFlowConfig(topk_ratio=0.1, update_interval=16, select_interval=NEVER),
}
MODEL, SEQUENCE = "tiny", 16
_STEP = (
    *("arrivals", "clock", "config", "deferred", "device", "emulator", "gradients", "host/engine", "importance"),
    *("layout", "rig", "schedule", "staging", "streaming", "training", "windows"),
)
SIMULATED_CODE = (
    *(f"runtime/zenflow/{part}.py" for part in _STEP),
    "zftune/profile/measure.py",
    "zftune/workload/model.py",
)
"""What decides when things happen in a step in simulated time."""
PLANNED_CODE = (
    *(f"zftune/planner/{part}.py" for part in ("closed_form", "memory", "model", "rates", "resources", "simulate")),
    "zftune/planner/split.py",
)
"""What plans a step."""
CODE = (*SIMULATED_CODE, *PLANNED_CODE, *(f"studies/024-claims/claims/{part}.py" for part in ("rigs", "upstream")))


def job(rig: str) -> Job:
    """All systems on one rig."""
    systems = {name: repr(config) for name, config in SYSTEMS.items()}
    inputs = {**rig_inputs(rig), "clock": "simulated", "systems": systems, "code": code_digest(*CODE)}
    return Job(f"rig--{rig}", inputs, figures, (rig,))


def rig_inputs(rig: str) -> dict[str, Any]:
    """What a rig's file says."""
    spec = load_rig(rig)
    return {"rig": rig, "values": dict(spec.values), "effects": dict(spec.effects)}


def names() -> Sequence[str]:
    """Of all rigs, those after published steps first."""
    return (*FROM_PUBLISHED, *(name for name in rig_names() if name not in FROM_PUBLISHED))


def task_for(rig: str | None, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Task:
    """The smallest workload on a rig, or on this CPU."""
    return Task(
        model=MODEL,
        corpus=load_text(None),
        dtype=dtype,
        micro_batch=1,
        sequence=SEQUENCE,
        seed=seed,
        torch_device=torch.device("cpu"),
        rig=None if rig is None else load_rig(rig),
    )


def elements() -> int:
    """Of the workload's weights that have columns: what a rig's times stand for."""
    return sum(math.prod(shape) for shape in ModelFacts.from_name(MODEL).weights if len(shape) > 1)


def rig_of(name: str) -> Rig:
    """A rig for the workload."""
    return load_rig(name).for_elements(elements())


def figures(rig: str) -> dict[str, Any]:
    """Each system's step and stall, measured and planned, and what it waits for; upstream's step."""
    torch.set_num_threads(1)
    rates, model = Rates.of_rig(rig_of(rig)), ModelFacts.from_name(MODEL)
    found: dict[str, Any] = {}
    for name, config in SYSTEMS.items():
        split = split_of(model, config)
        found[name] = {
            **measured(rig, config),
            "planned_ms": simulate(rates, split, config).step_ms,
            "bound_by": floor(rates, split, config).bound_by,
        }
    return {"systems": found, "upstream": upstream.steps_ms(rates, elements())}


def measured(rig: str, config: ZenFlowConfig) -> dict[str, float]:
    """Of the second half of the steps, whole windows: the first ones are not steady yet."""
    steps = max(48 if config.overlap_step else 4, 4 * config.longest_window)
    run = measure(task_for(rig), config.resolved(), steps, lambda _done, _all: None)
    stats: Sequence[StepStats] = run.stats[len(run.stats) // 2 :]
    return {
        "step_ms": statistics.fmean(one.step_ms or 0.0 for one in stats),
        "stall_ms": statistics.fmean(sum((one.stall_ms or {}).values()) for one in stats),
    }
