"""At a reselection every master is overwritten with the bf16 weight: what had not yet reached it is lost."""

from __future__ import annotations

from defects.case import COLUMNS, Defect, constant, matrix, moved
from defects.peers import Ours, adamw
from defects.upstream import Upstream, settings

LR, STEPS = 2.0**-13, 128  # together two steps of bf16 between 1 and 2
ZENFLOW = {"topk_ratio": 0.1, "select_strategy": "step", "select_interval": 8, "update_interval": 1}
SETTINGS = settings(ZENFLOW, lr=LR, dtype="bf16")
NEVER = settings({**ZENFLOW, "select_interval": 1000}, lr=LR, dtype="bf16")
DEFERRED = range(1, COLUMNS)
START = matrix(1.5).bfloat16()


def upstream(document: dict[str, object]) -> float:
    trace = Upstream([START], document).run(constant(STEPS))
    return moved(START, trace[-1][0], LR * STEPS, DEFERRED)


def ours() -> float:
    run = Ours([START], SETTINGS)
    figure = moved(START, run.run(constant(STEPS))[-1][0], LR * STEPS, DEFERRED)
    run.end()
    return figure


def expected() -> float:
    return moved(START, adamw([START], SETTINGS, constant(STEPS))[-1][0].bfloat16(), LR * STEPS, DEFERRED)


DEFECT = Defect(
    title="bf16: a reselection truncates every fp32 master to the bf16 weight",
    measure=f"distance of the deferred columns after {STEPS} steps of equal gradients, of lr × steps",
    settings=SETTINGS,
    expected=expected,
    upstream=lambda: upstream(SETTINGS),
    ours=ours,
    control=lambda: (upstream(NEVER), expected()),
    control_is="no reselection",
)
