"""A window's gradients are averaged into one update, so the deferred columns make one update where AdamW makes S."""

from __future__ import annotations

from defects.case import COLUMNS, Defect, constant, matrix, moved
from defects.peers import Ours, adamw
from defects.upstream import Upstream, settings

LR, STEPS = 1e-2, 256
ZENFLOW = {"topk_ratio": 0.1, "select_strategy": "step", "select_interval": 1000}
SETTINGS = settings({**ZENFLOW, "update_interval": 4}, lr=LR)
EACH_STEP = settings({**ZENFLOW, "update_interval": 1}, lr=LR)
DEFERRED = range(1, COLUMNS)


def upstream(document: dict[str, object]) -> float:
    return moved(matrix(0.0), Upstream([matrix(0.0)], document).run(constant(STEPS))[-1][0], LR * STEPS, DEFERRED)


def ours() -> float:
    run = Ours([matrix(0.0)], SETTINGS)
    figure = moved(matrix(0.0), run.run(constant(STEPS))[-1][0], LR * STEPS, DEFERRED)
    run.end()
    return figure


def expected() -> float:
    return moved(matrix(0.0), adamw([matrix(0.0)], SETTINGS, constant(STEPS))[-1][0], LR * STEPS, DEFERRED)


DEFECT = Defect(
    title="one update with a window's mean: the deferred columns train at a fraction of the learning rate",
    measure=f"distance of the deferred columns after {STEPS} equal gradients, of lr × steps",
    settings=SETTINGS,
    expected=expected,
    upstream=lambda: upstream(SETTINGS),
    ours=ours,
    ours_is='`deferred_update="replay"`, the default',
    control=lambda: (upstream(EACH_STEP), expected()),
    control_is="`update_interval` 1",
    by_design=True,
)
