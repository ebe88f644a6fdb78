"""Loading a checkpoint, and one window at a learning rate of zero, moves weights: masters of columns once selected."""

from __future__ import annotations

from defects.case import COLUMNS, Defect, constant, furthest
from defects.checkpoints import SAVED_AFTER, reloaded, reloaded_by_us
from defects.upstream import settings

LR, INTERVAL = 1e-2, 4
ZENFLOW = {"topk_ratio": 0.1, "select_strategy": "step", "select_interval": 1000, "update_interval": INTERVAL}
SETTINGS = settings(ZENFLOW, lr=LR)
OFFLOAD = settings(None, lr=LR)


def upstream(document: dict[str, object]) -> float:
    run, saved = reloaded(document, constant(SAVED_AFTER, [0]))
    for group in run.optimizer.optimizer.param_groups:
        group["lr"] = 0.0
    seen = run.run(constant(INTERVAL, [1]))  # another column is important now
    return furthest(saved, seen[-1][0], LR, range(COLUMNS))


def ours() -> float:
    """Nothing is flushed when it saves, so what was pending, at the former learning rate, is applied first."""
    run, _ = reloaded_by_us(SETTINGS, constant(SAVED_AFTER, [0]))
    run.optimizer.flush()
    saved = run.weights()[0]
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
    seen = run.run(constant(INTERVAL, [1]))
    run.end()
    return furthest(saved, seen[-1][0], LR, range(COLUMNS))


DEFECT = Defect(
    title="after a resume, columns that were selected before fall back to stale masters",
    measure="furthest that a weight moves in one window after loading, at a learning rate of 0, in the former lr",
    settings=SETTINGS,
    expected=lambda: 0.0,
    upstream=lambda: upstream(SETTINGS),
    ours=ours,
    control=lambda: (upstream(OFFLOAD), 0.0),
    control_is="ZeRO-Offload, the same without the zenflow section",
)
