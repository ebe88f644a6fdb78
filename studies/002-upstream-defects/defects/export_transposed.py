"""zero_to_fp32 reads the masters in the weights' shape, though they lie transposed."""

from __future__ import annotations

import torch
from torch import Tensor

from defects.case import Defect
from defects.checkpoints import exported, exported_by_us
from defects.upstream import settings

LR = 1e-2
ZENFLOW = {"topk_ratio": 0.1, "select_strategy": "step", "select_interval": 8, "update_interval": 1}
SETTINGS = settings(ZENFLOW, lr=LR)
OFFLOAD = settings(None, lr=LR)


def correlation(pair: tuple[Tensor, Tensor]) -> float:
    return float(torch.corrcoef(torch.stack([tensor.flatten() for tensor in pair]))[0, 1])


DEFECT = Defect(
    title="zero_to_fp32 exports transposed weights",
    measure="correlation of the exported weight with the trained one",
    settings=SETTINGS,
    expected=lambda: 1.0,
    upstream=lambda: correlation(exported(SETTINGS)),
    ours=lambda: correlation(exported_by_us(SETTINGS)),
    ours_is="the model's own weights, saved after flush()",
    control=lambda: (correlation(exported(OFFLOAD)), 1.0),
    control_is="ZeRO-Offload, the same without the zenflow section",
)
