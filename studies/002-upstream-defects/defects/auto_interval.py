"""update_interval "auto" sets the accumulation to 0, and the loss is divided by it."""

from __future__ import annotations

import warnings

from defects.case import Defect, matrix, random
from defects.peers import Ours, adamw
from defects.upstream import Upstream, settings

LR = 1e-2
ZENFLOW = {"topk_ratio": 0.1, "select_strategy": "auto", "select_interval": "auto", "update_interval": "auto"}
SETTINGS = settings(ZENFLOW, lr=LR)
FOUR = settings({**ZENFLOW, "update_interval": 4}, lr=LR)


def upstream(document: dict[str, object]) -> float:
    seen = Upstream([matrix()], document).run(random(1))[-1][0]
    return float((~seen.isfinite()).float().mean())


def ours() -> float:
    with warnings.catch_warnings(action="ignore"):  # "auto" stands for 4 and says so
        run = Ours([matrix()], SETTINGS)
    seen = run.run(random(12))[-1][0]
    run.end()
    off = (seen - adamw([matrix()], SETTINGS, random(12))[-1][0]).abs().nan_to_num(nan=1.0)
    return float((off > 1e-5).float().mean())


DEFECT = Defect(
    title='update_interval "auto", the default: NaN in every selected column in step 1',
    measure="share of the weights that are NaN after one step; a tenth is selected",
    settings=SETTINGS,
    expected=lambda: 0.0,
    upstream=lambda: upstream(SETTINGS),
    ours=ours,
    ours_is="share of the weights that are not AdamW's after 12 steps and a flush",
    control=lambda: (upstream(FOUR), 0.0),
    control_is="`update_interval` 4",
    quick=True,
)
