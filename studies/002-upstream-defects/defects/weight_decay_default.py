"""Without weight_decay in the JSON, selected columns get torch's default and the others DeepSpeed's."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from defects.case import Defect, matrix
from defects.peers import Ours, adamw
from defects.upstream import Upstream, settings

LR, STEPS = 1e-1, 4
ZENFLOW = {"topk_ratio": 0.5, "select_strategy": "step", "select_interval": 1000, "update_interval": 1}
EXPLICIT = settings(ZENFLOW, lr=LR)
EXPLICIT["optimizer"]["params"]["weight_decay"] = 0.01
SETTINGS = copy.deepcopy(EXPLICIT)
del SETTINGS["optimizer"]["params"]["weight_decay"]
ZEROS = [[matrix(0.0)]] * STEPS


def spread(weight: Tensor) -> float:
    """Between the weakest and the strongest decay that a column gets, as a weight_decay."""
    decay = (1 - weight.mean(dim=0)) / (LR * STEPS)
    return float(decay.max() - decay.min())


def upstream(document: dict[str, Any]) -> float:
    return spread(Upstream([matrix(1.0)], document).run(ZEROS)[-1][0])


def ours() -> float:
    run = Ours([matrix(1.0)], SETTINGS)
    figure = spread(run.run(ZEROS)[-1][0])
    run.end()
    return figure


DEFECT = Defect(
    title="weight_decay left out: selected columns decay by 0.01, the others by 0",
    measure="difference between the columns' weight_decay, from weights of 1 with gradients of 0",
    settings=SETTINGS,
    expected=lambda: spread(adamw([matrix(1.0)], SETTINGS, ZEROS)[-1][0]),
    upstream=lambda: upstream(SETTINGS),
    ours=ours,
    control=lambda: (upstream(EXPLICIT), 0.0),
    control_is="weight_decay 0.01 in the JSON",
)
