"""Twin-Flow splits whole sub-groups, of a billion elements by default, so on most models the ratio does nothing."""

from __future__ import annotations

from torch import nn

import zenflow
from defects.case import COLUMNS, ROWS, Defect, matrix
from defects.upstream import Upstream, settings, two_devices

LR, RATIOS = 1e-2, (0.0, 0.25, 0.5, 0.75, 1.0)
WEIGHTS = [matrix(seed=seed) for seed in range(4)]
OFFLOAD = {"device": "cpu", "pin_memory": False}


def document(ratio: float, **stage: object) -> dict[str, object]:
    return settings(
        None,
        lr=LR,
        zero_optimization={
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "offload_optimizer": {**OFFLOAD, "ratio": ratio},
            **stage,
        },
    )


def upstream(**stage: object) -> float:
    """Different shares of sub-groups on the GPU over the ratios."""
    shares = set()
    for ratio in RATIOS:
        with two_devices():
            run = Upstream(WEIGHTS, document(ratio, **stage))
        devices = list(run.optimizer.subgroup_to_device.values())
        shares.add(sum(device != "cpu" for device in devices) / len(devices))
    return float(len(shares))


def ours() -> float:
    """Different amounts of host memory for state over the ratios."""
    amounts = set()
    for ratio in RATIOS:
        weights = [nn.Parameter(weight.clone()) for weight in WEIGHTS]
        config = zenflow.ZenFlowConfig.from_ds_config(document(ratio))
        optimizer = zenflow.ZenFlowAdamW(weights, lr=LR, config=config)
        for weight in weights:
            weight.grad = matrix(1.0)
        optimizer.step()
        amounts.add(round(optimizer.host_bytes()["state"] / (ROWS * COLUMNS)))
        optimizer.close()
    return float(len(amounts))


DEFECT = Defect(
    title="Twin-Flow: the ratio splits whole sub-groups (1e9 elements by default), so it does little or nothing",
    measure=f"different splits of four equal weights over the ratios {RATIOS}",
    settings=document(0.5),
    expected=lambda: float(len(RATIOS)),
    upstream=upstream,
    ours=ours,
    control=lambda: (upstream(sub_group_size=ROWS * COLUMNS), float(len(RATIOS))),
    control_is="a sub_group_size of one weight",
)
