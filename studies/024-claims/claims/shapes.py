"""Models of 1.5B to 70B on one to eight GPUs, planned: steps, what bounds them, and where five times is possible."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from studykit import Job as Measurement
from studykit import code_digest

from claims import selection, upstream
from claims.rigs import PLANNED_CODE
from zenflow import ZenFlowConfig
from zftune.planner.choosing import fits
from zftune.planner.closed_form import predict
from zftune.planner.model import Job, Machine, ModelFacts, Prediction
from zftune.planner.rates import Rates
from zftune.planner.split import totals_of

MODELS = ("Qwen2.5-1.5B", "Qwen2.5-3B", "Llama-2-7B", "Llama-2-13B", "Qwen2.5-32B", "Llama-2-70B")
MACHINES: Mapping[str, tuple[int, ...]] = {
    "a100-80-sxm": (1, 2, 4, 8),
    "h100-sxm": (1, 2, 4, 8),
    "a100-80-pcie": (1, 2, 4),
    "gh200": (1,),
    "rtx4090": (1,),
}
TOKENS = (128, 512, 2048, 8192)
"""Of a step on each GPU, one sequence."""
USUAL = 2048
ROOM = 16 << 30
"""For updated weights on their way, so that no staging of a gigabyte is what limits."""
SYSTEMS: Mapping[str, ZenFlowConfig] = {
    "no offload": ZenFlowConfig.zero_offload(offload_ratio=0.0, pipeline="bucket"),
    "ZeRO-Offload": ZenFlowConfig.zero_offload(),
    "published": ZenFlowConfig(topk_ratio=0.1, update_interval=4, staging_bytes=ROOM),
    "S = 16": ZenFlowConfig(topk_ratio=0.1, update_interval=16, staging_bytes=ROOM),
}
CODE = (
    *PLANNED_CODE,
    "zftune/planner/choosing.py",
    *(f"studies/024-claims/claims/{part}.py" for part in ("shapes", "selection", "upstream")),
    *(f"runtime/zenflow/{part}.py" for part in ("config", "layout", "schedule", "host/places")),
)


def job(model: str, machine: str) -> Measurement:
    """One model on one kind of machine."""
    inputs = {
        "systems": {name: repr(config) for name, config in SYSTEMS.items()},
        "tokens": TOKENS,
        "gpus": MACHINES[machine],
        "code": code_digest(*CODE, f"zftune/machines/{machine}.toml"),
    }
    return Measurement(f"shape--{model}--{machine}", inputs, figures, (model, machine))


def figures(model_name: str, machine_name: str) -> dict[str, Any]:
    """By how many GPUs: steps by tokens where late updates fit; what selecting takes of one."""
    torch.set_num_threads(1)
    model, machine = ModelFacts.from_name(model_name), Machine.load(machine_name)
    found: dict[str, Any] = {
        "elements_a_column": selection.elements_a_column(model),
        "cheaper_in_bytes": selection.cheaper(model),
        "gpus": {},
    }
    for gpus in MACHINES[machine_name]:
        cells = {tokens: cell(model, machine, gpus, tokens) for tokens in TOKENS}
        found["gpus"][gpus] = {tokens: one for tokens, one in cells.items() if one is not None}
    return found


def cell(model: ModelFacts, machine: Machine, gpus: int, tokens: int) -> dict[str, Any] | None:
    """Steps of the systems that fit; None where the published setting does not."""
    job = Job(seq=tokens, gpus=gpus, checkpointing=True)
    published = predict(model, machine, job, SYSTEMS["published"])
    if not fits(published, machine):
        return None
    found = {name: predict(model, machine, job, config) for name, config in SYSTEMS.items()}
    rates, split = Rates.of(model, machine, job), totals_of(model, SYSTEMS["published"])
    columns = sum(math.prod(shape) for shape in model.weights if len(shape) > 1)
    return {
        "systems": {name: told(one, machine) for name, one in found.items()},
        "upstream": upstream.steps_ms(rates, columns / gpus, found["no offload"].stall_ms),
        "selecting": {
            "energies_ms": rates.add_up_ms(split.words),
            "reading_ms": rates.device_ms(model.element_bytes * split.scored) / rates.ranks,
        },
    }


def told(one: Prediction, machine: Machine) -> dict[str, Any]:
    """Of a prediction."""
    return {
        "step_ms": one.step_ms,
        "stall_ms": one.stall_ms,
        "fits": fits(one, machine),
        "bound_by": one.bound_by,
        "loads_ms": dict(one.loads_ms),
    }
