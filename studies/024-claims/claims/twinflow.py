"""Twin-Flow alone: steps and device memory over the ratio, nothing late; beside DeepSpeed's whole sub-groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from studykit import Job as Measurement
from studykit import code_digest

from claims.rigs import MODEL, PLANNED_CODE, SIMULATED_CODE, measured, rig_inputs, rig_of
from zenflow import ZenFlowConfig
from zftune.planner.choosing import limits
from zftune.planner.closed_form import predict
from zftune.planner.memory import state_bytes
from zftune.planner.model import Job, Machine, ModelFacts
from zftune.planner.rates import Rates
from zftune.planner.simulate import simulate
from zftune.planner.split import split_of

RATIOS = tuple(number / 20 for number in range(20, -1, -1))
RIGS = ("qwen2.5-1.5b-2xa100", "llama2-7b-4xa100")
PUBLISHED: Mapping[str, tuple[str, str, int]] = {
    "OPT-30B, 8 H100": ("OPT-30B", "h100-sxm", 8),
    "OPT-13B, 8 A100-40": ("OPT-13B", "a100-40-sxm", 8),
    "Llama-2-7B, 1 A100-80": ("Llama-2-7B", "a100-80-sxm", 1),
}
"""The two that its makers measured, 6 and 3 times, of which neither batch nor ratio is published; and one GPU."""
TOKENS = 512
SUB_GROUP = 10**9
"""DeepSpeed's `sub_group_size`, in elements."""
CODE = (*PLANNED_CODE, "studies/024-claims/claims/twinflow.py")


def rig_job(rig: str, ratios: Sequence[float] = RATIOS) -> Measurement:
    """Some ratios, trained on a rig."""
    inputs = {**rig_inputs(rig), "ratios": ratios, "code": code_digest(*SIMULATED_CODE, *CODE)}
    return Measurement(f"twin-flow--{rig}", inputs, on_rig, (rig, ratios))


def shape_job(name: str) -> Measurement:
    """Every ratio, planned for a model on a machine."""
    digest = code_digest(*CODE, "zftune/planner/choosing.py", f"zftune/machines/{PUBLISHED[name][1]}.toml")
    inputs = {"of": PUBLISHED[name], "ratios": RATIOS, "tokens": TOKENS, "code": digest}
    return Measurement(f"twin-flow--{name.replace(', ', '--').replace(' ', '-')}", inputs, planned, (name,))


def exact(ratio: float, *, pipeline: Any = "bucket") -> ZenFlowConfig:
    """Nothing late; "none": in DeepSpeed's order."""
    return ZenFlowConfig.zero_offload(offload_ratio=ratio, pipeline=pipeline)


def offloaded_by_sub_groups(ratio: float, groups: int) -> float:
    """The share that DeepSpeed offloads: it keeps the first int((1 - ratio) * groups) sub-groups."""
    return 1 - int((1 - ratio) * groups) / groups


def on_rig(rig: str, ratios: Sequence[float]) -> dict[str, Any]:
    """Each ratio's step in both orders, measured and planned, and the device's state."""
    torch.set_num_threads(1)
    model, rates = ModelFacts.from_name(MODEL), Rates.of_rig(rig_of(rig))
    rows = []
    for ratio in ratios:
        bucket, turn = exact(ratio), exact(ratio, pipeline="none")
        rows.append(
            {
                "ratio": ratio,
                "step_ms": measured(rig, bucket)["step_ms"],
                "planned_ms": simulate(rates, split_of(model, bucket), bucket).step_ms,
                "in_turn_ms": simulate(rates, split_of(model, turn), turn).step_ms,
                "state_bytes": state_bytes(model, bucket),
            }
        )
    return {"rows": rows}


def planned(name: str) -> dict[str, Any]:
    """The same for a model on a machine; DeepSpeed's ratio is taken to whole sub-groups, in its order."""
    torch.set_num_threads(1)
    model_name, machine_name, gpus = PUBLISHED[name]
    model, machine = ModelFacts.from_name(model_name), Machine.load(machine_name)
    job = Job(seq=TOKENS, gpus=gpus, checkpointing=True)
    groups = max(1, -(-model.trainable // gpus // SUB_GROUP))
    device, _ = limits(machine)
    turns: dict[float, tuple[float, int]] = {}
    rows = []
    for ratio in RATIOS:
        whole = offloaded_by_sub_groups(ratio, groups)
        if whole not in turns:
            turn = predict(model, machine, job, exact(whole, pipeline="none"))
            turns[whole] = turn.step_ms, turn.memory.device_bytes
        bucket = predict(model, machine, job, exact(ratio))
        rows.append(
            {
                "ratio": ratio,
                "step_ms": bucket.step_ms,
                "device_bytes": bucket.memory.device_bytes,
                "fits": bucket.memory.device_bytes <= device,
                "by_sub_groups": whole,
                "by_sub_groups_ms": turns[whole][0],
                "by_sub_groups_device_bytes": turns[whole][1],
                "by_sub_groups_fits": turns[whole][1] <= device,
            }
        )
    return {"rows": rows, "sub_groups": groups, "limit_bytes": device}
