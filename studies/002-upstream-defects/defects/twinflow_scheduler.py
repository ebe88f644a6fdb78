"""Twin-Flow (offload_optimizer.ratio): the part that stays on the GPU does not follow the learning rate scheduler."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import zenflow
from defects.case import Defect, matrix
from defects.upstream import Upstream, settings, two_devices

LR, STEPS, RATIO = 1e-2, 6, 0.5
LAST = 0.5  # the scheduler's factor in the last step
OFFLOAD = {"device": "cpu", "pin_memory": False}
STAGE = {"stage": 3, "sub_group_size": 60, "stage3_param_persistence_threshold": 0}
SETTINGS = settings(None, lr=LR, zero_optimization={**STAGE, "offload_optimizer": {**OFFLOAD, "ratio": RATIO}})
WHOLE = settings(None, lr=LR, zero_optimization={**STAGE, "offload_optimizer": OFFLOAD})
WEIGHTS = [matrix(0.0), matrix(0.0)]
ONES = [matrix(1.0), matrix(1.0)]


def factor(step: int) -> float:
    return 1.0 if step == 0 else LAST


def spread(seen: list[list[Tensor]]) -> float:
    """Between the longest and the shortest of the weights' last steps, in the scheduled lr."""
    lengths = [float((a - b).mean()) / (LR * LAST) for a, b in zip(seen[-2], seen[-1], strict=True)]
    return max(lengths) - min(lengths)


def upstream(document: dict[str, object]) -> float:
    import deepspeed

    with two_devices():
        run = Upstream(WEIGHTS, document)
    scheduler = torch.optim.lr_scheduler.LambdaLR(run.engine.optimizer.optimizer, factor)
    seen = []
    for _ in range(STEPS):
        run.step(ONES)
        scheduler.step()
        with deepspeed.zero.GatheredParameters(list(run.engine.module.weights)):
            seen.append(run.weights())
    return spread(seen)


def ours() -> float:
    weights = [nn.Parameter(weight.clone()) for weight in WEIGHTS]
    config = zenflow.ZenFlowConfig.from_ds_config(SETTINGS)
    optimizer = zenflow.ZenFlowAdamW(weights, lr=LR, weight_decay=0.0, config=config)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    seen = []
    for _ in range(STEPS):
        for weight in weights:
            weight.grad = matrix(1.0)
        optimizer.step()
        scheduler.step()
        seen.append([weight.detach().clone() for weight in weights])
    optimizer.close()
    return spread(seen)


DEFECT = Defect(
    title="Twin-Flow: the part on the GPU ignores the learning rate scheduler",
    measure="difference between the two parts' last steps under equal gradients, in the scheduled lr",
    settings=SETTINGS,
    expected=lambda: 0.0,
    upstream=lambda: upstream(SETTINGS),
    ours=ours,
    control=lambda: (upstream(WHOLE), 0.0),
    control_is="without a ratio: everything on the host",
)
