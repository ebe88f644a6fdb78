"""0.19.7 and 0.19.8: initialize() puts each matrix's transposed memory into the model."""

from __future__ import annotations

import torch

from defects.case import Defect, matrix
from defects.peers import Ours
from defects.upstream import Upstream, settings

LR = 1e-2
ZENFLOW = {"topk_ratio": 0.1, "select_strategy": "step", "select_interval": 8, "update_interval": 4}
SETTINGS = settings(ZENFLOW, lr=LR)


def changed(document: dict[str, object]) -> float:
    """Share of a weight's elements that initialize() has changed, before any step."""
    return float((Upstream([matrix()], document).weights()[0] != matrix()).float().mean())


def ours() -> float:
    run = Ours([matrix()], SETTINGS)
    run.optimizer.flush()
    figure = float((run.weights()[0] != matrix()).float().mean())
    run.end()
    return figure


DEFECT = Defect(
    title="initialize() scrambles every pretrained 2-D weight (0.19.7 and 0.19.8)",
    measure="share of a weight's elements that differ after initialize(), before any step",
    settings=SETTINGS,
    expected=lambda: float((torch.nn.Parameter(matrix()).detach() != matrix()).float().mean()),
    upstream=lambda: changed(SETTINGS),
    ours=ours,
    control=lambda: (changed(settings(None, lr=LR)), 0.0),
    control_is="ZeRO-Offload, the same without the zenflow section",
)
