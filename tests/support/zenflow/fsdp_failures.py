"""What goes wrong on one rank of several that have rows, and what each of them is told."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.support.zenflow.fsdp_cases import EXACT, Case, Run, model_of, my_part, sharded
from zenflow import HostMemoryError, ZenFlowConfig
from zenflow.host.native import NativeBackend
from zenflow.late_weights import LateWeights, PendingUpdate
from zenflow.staging import Dispatcher

AT, STEPS, RANK = 4, 7, 1
"""The step in which it goes wrong, the last one that is tried, and the rank."""


def _gradient_that_cannot_leave(run: Run, patch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise HostMemoryError("the host has less memory")

    patch.setattr(Dispatcher, "together", refuse)


def _missing_gradient(run: Run, _: pytest.MonkeyPatch) -> None:
    weight: Any = run.model.get_parameter("blocks.0.up.weight")
    weight.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))


def _host_that_fails(run: Run, _: pytest.MonkeyPatch) -> None:
    backend = run.optimizer._training.engine.backend
    assert isinstance(backend, NativeBackend)
    backend.engine.inject("fail", 0, 0.0, 0)


def _step_that_fails_half_way(run: Run, patch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("something is wrong here")

    patch.setattr(run.optimizer._training.model.windows, "apply", fail)


FAULTS: dict[str, Callable[[Run, pytest.MonkeyPatch], None]] = {
    "gradient that cannot leave": _gradient_that_cannot_leave,
    "missing gradient": _missing_gradient,
    "host that fails": _host_that_fails,
    "step that fails half-way": _step_that_fails_half_way,
}


TOLD_BY_STEP = ("host that fails", "step that fails half-way")
"""Faults that have nothing to do with how gradients come."""


def failing(
    fault: Callable[[Run, pytest.MonkeyPatch], None],
    rank: int,
    config: ZenFlowConfig = EXACT,
    *,
    partitioned: bool = False,
) -> dict[str, Any]:
    """By step what this rank was told, and then by `flush` and `state_dict`; and the weights after each step."""
    model = model_of() if partitioned else sharded(model_of())
    run = Run(Case(config, partitioned=partitioned), model, my_part(rank))
    told: dict[str, str] = {}
    weights = []
    with pytest.MonkeyPatch.context() as patch:
        for number in range(1, STEPS + 1):
            if number == AT and rank == RANK:
                fault(run, patch)
            error = _error(partial(run.step, number))
            if error:
                told[str(number)] = error
                break
            weights.append(run.weights())
        told["flush"], told["state_dict"] = _error(run.optimizer.flush), _error(run.optimizer.state_dict)
    run.optimizer.abandon()
    return {"told": told, "weights": weights}


def _error(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - it is the result
        return f"{type(error).__name__}: {error}"
    return ""


def failing_late(rank: int) -> dict[str, Any]:
    """The same of a host that fails while its weights are late, and how many of them were late on this rank."""
    late: list[bool] = []
    leave = LateWeights.leave

    def noted(waits: LateWeights, flight: PendingUpdate) -> bool:
        late.append(leave(waits, flight))
        return late[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LateWeights, "leave", noted)
        found = failing(_host_that_fails, rank, replace(EXACT, pipeline="bucket"))
    return {**found, "late": sum(late)}


def not_finite(rank: int) -> dict[str, Any]:
    """The weights before and after a step in which one rank's batch has an infinite loss, and after the next."""
    run = Run(Case(replace(EXACT, skip_nonfinite=True)), sharded(model_of()), my_part(rank)).steps(1, AT)
    weights = [run.weights()]
    for factor in (torch.inf if rank == RANK else 1.0, 1.0):
        run.factor = factor
        run.step(AT)
        weights.append(run.weights())
    run.optimizer.abandon()
    return {"weights": weights}


def let_go_alone(rank: int) -> dict[str, Any]:
    """Weights of ranks that have whole ones, of which one gives its optimizer up, before and after."""
    case = Case(replace(EXACT, update_interval=4, topk_ratio=0.3, overlap_step=True), partitioned=True)
    run = Run(case, model_of(), my_part(rank)).steps(1, AT + 1)
    pending, before = run.optimizer._training.pending_steps, run.weights()
    if rank == RANK:
        del run.optimizer
        gc.collect()
    torch.distributed.barrier()  # which would not end if that rank asked for the others' rows
    if rank != RANK:
        run.optimizer.abandon()
    return {"weights": [before, run.weights()], "pending": pending}


WORK: dict[str, Callable[[int], Any]] = {
    **{name: partial(failing, fault) for name, fault in FAULTS.items()},
    **{f"{name}, partitioned": partial(failing, FAULTS[name], partitioned=True) for name in TOLD_BY_STEP},
    "let go alone": let_go_alone,
    "late": failing_late,
    "not finite": not_finite,
}
