"""ZeRO-1 with gradients accumulated in another dtype than the weights'."""

from __future__ import annotations

from typing import Any

from defects.case import COLUMNS, Defect, furthest, matrix, raised, random
from defects.peers import Ours, adamw
from defects.upstream import Upstream, settings

LR, STEPS = 2.0**-6, 24
ZENFLOW = {"topk_ratio": 0.1, "select_strategy": "step", "select_interval": 1000, "update_interval": 1}
STAGE = {"zero_optimization": {"stage": 1}}
SETTINGS = settings(ZENFLOW, lr=LR, dtype="bf16", data_types={"grad_accum_dtype": "fp32"}, **STAGE)
SAME = settings(ZENFLOW, lr=LR, dtype="bf16", **STAGE)
DEFERRED = range(1, COLUMNS)
START = matrix().bfloat16()


def off(seen: Any) -> float:
    return furthest(seen, adamw([START], SETTINGS, STEPS_GIVEN)[-1][0], LR, DEFERRED)


STEPS_GIVEN = [[gradient.bfloat16().float()] for (gradient,) in random(STEPS)]


def upstream(document: dict[str, Any]) -> float | str:
    return raised(lambda: off(Upstream([START], document).run(STEPS_GIVEN)[-1][0]))


def ours() -> float:
    run = Ours([START], SETTINGS)
    figure = off(run.run(STEPS_GIVEN)[-1][0])
    run.end()
    return figure


DEFECT = Defect(
    title="ZeRO-1 with grad_accum_dtype fp32 ends the run",
    measure="distance of the deferred columns from AdamW, in lr, or what was raised",
    settings=SETTINGS,
    expected=lambda: 0.0,
    upstream=lambda: upstream(SETTINGS),
    ours=ours,
    control=lambda: (upstream(SAME), 0.0),
    control_is="without grad_accum_dtype",
    raises=True,
    tolerance=0.6,  # half a step of bf16 between 2 and 4
)
