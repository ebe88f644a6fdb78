"""Selected columns have no fp32 master: an update below half a step of bf16 vanishes, every time."""

from __future__ import annotations

from torch import Tensor

from defects.case import Defect, constant, matrix
from defects.peers import Ours, adamw
from defects.upstream import Upstream, settings

LR, STEPS = 2e-5, 128  # a usual learning rate, on weights of the usual size
ZENFLOW = {"topk_ratio": 0.5, "select_strategy": "step", "select_interval": 1000, "update_interval": 4}
SETTINGS = settings(ZENFLOW, lr=LR, dtype="bf16")
IN_FP32 = settings(ZENFLOW, lr=LR)
SELECTED = range(5)
START = matrix() * 0.02


def unmoved(before: Tensor, after: Tensor) -> float:
    """Share of the selected elements that are where they were."""
    return float((before.float() == after.float())[:, list(SELECTED)].float().mean())


def upstream(document: dict[str, object], start: Tensor) -> float:
    return unmoved(start, Upstream([start], document).run(constant(STEPS, SELECTED))[-1][0])


def ours() -> float:
    run = Ours([START.bfloat16()], SETTINGS)
    figure = unmoved(START.bfloat16(), run.run(constant(STEPS, SELECTED))[-1][0])
    run.end()
    return figure


def expected(start: Tensor) -> float:
    return unmoved(start, adamw([start], SETTINGS, constant(STEPS, SELECTED))[-1][0].to(start.dtype))


DEFECT = Defect(
    title="bf16: selected columns have no fp32 master, updates below its resolution vanish",
    measure=f"share of selected elements that {STEPS} equal gradients have not moved at all",
    settings=SETTINGS,
    expected=lambda: expected(START.bfloat16()),
    upstream=lambda: upstream(SETTINGS, START.bfloat16()),
    ours=ours,
    control=lambda: (upstream(IN_FP32, START), expected(START)),
    control_is="weights in fp32",
)
