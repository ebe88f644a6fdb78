"""The host's bias correction counts backward passes, not updates."""

from __future__ import annotations

from defects.case import COLUMNS, Defect, constant, matrix, moved
from defects.peers import Ours, adamw
from defects.upstream import Upstream, settings

LR, INTERVAL = 1e-2, 4
ZENFLOW = {"topk_ratio": 0.1, "select_strategy": "step", "select_interval": 1000}
SETTINGS = settings({**ZENFLOW, "update_interval": INTERVAL}, lr=LR)
EACH_STEP = settings({**ZENFLOW, "update_interval": 1}, lr=LR)
DEFERRED = range(1, COLUMNS)


def upstream(document: dict[str, object], steps: int) -> float:
    return moved(matrix(0.0), Upstream([matrix(0.0)], document).run(constant(steps))[-1][0], LR, DEFERRED)


def ours() -> float:
    run = Ours([matrix(0.0)], SETTINGS, deferred_update="mean")
    figure = moved(matrix(0.0), run.run(constant(INTERVAL))[-1][0], LR, DEFERRED)
    run.end()
    return figure


def expected() -> float:
    return moved(matrix(0.0), adamw([matrix(0.0)], SETTINGS, constant(1))[-1][0], LR, DEFERRED)


DEFECT = Defect(
    title="the host's bias correction counts backward passes instead of updates",
    measure="length of the deferred columns' first update, in lr",
    settings=SETTINGS,
    expected=expected,
    upstream=lambda: upstream(SETTINGS, INTERVAL),
    ours=ours,
    ours_is='`deferred_update="mean"`, which makes one update of a window, as upstream does',
    control=lambda: (upstream(EACH_STEP, 1), expected()),
    control_is="`update_interval` 1",
)
