"""Selected gradients are neither unscaled nor checked: an overflow reaches the weights before it is noticed."""

from __future__ import annotations

from torch import Tensor

from defects.case import COLUMNS, Defect, matrix, raised, random
from defects.peers import Ours
from defects.upstream import Upstream, settings

LR, STEPS, BAD = 1e-3, 4, 1
ZENFLOW = {"topk_ratio": 0.1, "select_strategy": "step", "select_interval": 1000, "update_interval": 4}
SETTINGS = settings(ZENFLOW, lr=LR, dtype="bf16")
OFFLOAD = settings(None, lr=LR, dtype="bf16")


def gradients() -> list[list[Tensor]]:
    steps = random(STEPS)
    steps[BAD] = [steps[BAD][0].clone()]
    steps[BAD][0][0, :] = float("inf")
    return steps


def bad(weight: Tensor) -> float:
    """Share of the columns in which a weight is not finite."""
    return float((~weight.isfinite()).any(dim=0).sum()) / COLUMNS


def upstream(document: dict[str, object]) -> float | str:
    return raised(lambda: bad(Upstream([matrix().bfloat16()], document).run(gradients())[-1][0]))


def ours() -> float:
    run = Ours([matrix().bfloat16()], SETTINGS, skip_nonfinite=True)
    figure = bad(run.run(gradients())[-1][0])
    run.end()
    return figure


DEFECT = Defect(
    title="a step whose gradient is infinite is not skipped in the selected columns",
    measure=f"share of the columns with a weight that is not finite, {STEPS - BAD} steps after one infinite gradient",
    settings=SETTINGS,
    expected=lambda: 0.0,
    upstream=lambda: upstream(SETTINGS),
    ours=ours,
    ours_is="`skip_nonfinite`, which skips a step as bf16.check_grad_overflow, on by default, does",
    control=lambda: (upstream(OFFLOAD), 0.0),
    control_is="ZeRO-Offload, the same without the zenflow section",
)
