"""The user's gradient accumulation is overwritten with the update interval; train_batch_size stays as it was."""

from __future__ import annotations

from defects.case import Defect, constant, matrix, moved
from defects.peers import Ours, adamw
from defects.upstream import Upstream, settings

LR, PASSES, ACCUMULATED = 1e-2, 8, 2
ZENFLOW = {"topk_ratio": 0.1, "select_strategy": "step", "select_interval": 1000, "update_interval": 4}
SETTINGS = settings(ZENFLOW, lr=LR, train_batch_size=ACCUMULATED, gradient_accumulation_steps=ACCUMULATED)
ALONE = settings(ZENFLOW, lr=LR)
OFFLOAD = settings(None, lr=LR, train_batch_size=ACCUMULATED, gradient_accumulation_steps=ACCUMULATED)


def updates_of(document: dict[str, object]) -> float:
    return moved(matrix(0.0), Upstream([matrix(0.0)], document).run(constant(PASSES))[-1][0], LR, [0])


def ours() -> float:
    run = Ours([matrix(0.0)], SETTINGS)
    parameter = run.parameters[0]
    for number, (gradient,) in enumerate(constant(PASSES), start=1):
        part = gradient / ACCUMULATED
        parameter.grad = part if parameter.grad is None else parameter.grad + part
        if number % ACCUMULATED == 0:
            run.optimizer.step()
            run.optimizer.zero_grad()
    run.optimizer.flush()
    figure = moved(matrix(0.0), run.weights()[0], LR, [0])
    run.end()
    return figure


def expected() -> float:
    return moved(matrix(0.0), adamw([matrix(0.0)], SETTINGS, constant(PASSES // ACCUMULATED))[-1][0], LR, [0])


DEFECT = Defect(
    title="gradient_accumulation_steps is overwritten with update_interval",
    measure=f"updates of a selected column in {PASSES} backward passes, {ACCUMULATED} of which are to be one step",
    settings=SETTINGS,
    expected=expected,
    upstream=lambda: updates_of(SETTINGS),
    ours=ours,
    control=lambda: (updates_of(OFFLOAD), expected()),
    control_is="ZeRO-Offload, the same without the zenflow section",
    quick=True,
)
