"""The selected columns' step count has the weights' dtype: in bf16, 256 + 1 is 256."""

from __future__ import annotations

import torch

from defects.case import Defect, constant, matrix
from defects.peers import Ours
from defects.upstream import Upstream, settings

LR, STEPS = 1e-2, 300
ZENFLOW = {"topk_ratio": 0.1, "select_strategy": "step", "select_interval": 10000, "update_interval": 4}
SETTINGS = settings(ZENFLOW, lr=LR, dtype="bf16")
IN_FP32 = settings(ZENFLOW, lr=LR)


def upstream(document: dict[str, object], dtype: torch.dtype) -> float:
    run = Upstream([matrix().to(dtype)], document)
    run.run(constant(STEPS))
    (state,) = run.optimizer.selective_optimizer.state.values()
    return float(state["step"])


def ours() -> float:
    run = Ours([matrix().bfloat16()], SETTINGS)
    run.run(constant(STEPS))
    (state,) = run.optimizer.state_dict()["state"].values()
    run.end()
    selected = state["slots"] < 0  # these have no place on the host
    return float(state["count"][selected].min())


def expected() -> float:
    """What torch's optimizer keeps."""
    weight = torch.nn.Parameter(matrix())
    optimizer = torch.optim.AdamW([weight], lr=LR)
    for (gradient,) in constant(STEPS):
        weight.grad = gradient
        optimizer.step()
    return float(optimizer.state[weight]["step"])


DEFECT = Defect(
    title="bf16: the selected columns' step count sticks at 256",
    measure=f"their step count after {STEPS} steps",
    settings=SETTINGS,
    expected=expected,
    upstream=lambda: upstream(SETTINGS, torch.bfloat16),
    ours=ours,
    control=lambda: (upstream(IN_FP32, torch.float32), expected()),
    control_is="weights in fp32",
)
