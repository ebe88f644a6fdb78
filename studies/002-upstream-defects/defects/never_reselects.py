"""select_strategy "auto", as in the tutorial, selects once for ever unless initialize() got the training data."""

from __future__ import annotations

from defects.case import Defect, constant, matrix, moved
from defects.peers import Ours
from defects.upstream import Upstream, settings

LR, BEFORE, AFTER = 1e-2, 20, 80
ZENFLOW = {"topk_ratio": 0.1, "select_strategy": "auto", "select_interval": "auto", "update_interval": 4}
SETTINGS = settings(ZENFLOW, lr=LR)
BY_STEP = settings({**ZENFLOW, "select_strategy": "step", "select_interval": 32}, lr=LR)


def follows(run: Upstream | Ours) -> float:
    """Steps of the last four in which the column moves that has had the greatest gradient for 80 steps."""
    seen = matrix(0.0)
    steps, found = [*constant(BEFORE, [0]), *constant(AFTER, [1])], 0
    for number, gradients in enumerate(steps):
        run.step(gradients)
        now = run.weights()[0]
        found += number >= len(steps) - 4 and moved(seen, now, LR, [1]) != 0
        seen = now
    run.end()
    return float(found)


DEFECT = Defect(
    title='select_strategy "auto" without training_data never selects again',
    measure="steps of four in which the most important column of the last 80 steps is updated",
    settings=SETTINGS,
    expected=lambda: 4.0,
    upstream=lambda: follows(Upstream([matrix(0.0)], SETTINGS)),
    ours=lambda: follows(Ours([matrix(0.0)], SETTINGS)),
    control=lambda: (follows(Upstream([matrix(0.0)], BY_STEP)), 4.0),
    control_is='`select_strategy` "step", `select_interval` 32',
)
