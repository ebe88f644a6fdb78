"""Mistakes that are planted in the runtime's CUDA path: the simulated device finds each of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.tiers import fast
from tests.support.zenflow.device_cases import HYPER, KNOBS, WINDOWS, RuntimeCases, loss_of, model_on
from tests.support.zenflow.simulated_cuda import SimulatedCuda
from tests.support.zenflow.simulated_order import Stream
from tests.support.zenflow.simulated_tensor import SimulatedTensor
from zenflow import ZenFlowAdamW, ZenFlowConfig, staging
from zenflow.device import CudaDevice
from zenflow.host.engine import HostEngine, Job
from zenflow.windows import Windows

pytestmark = pytest.mark.simulated_cuda(arrival=0.0)

Method = Callable[..., Any]


def nothing(*_: object, **__: object) -> None:
    """What a call does that somebody forgot."""


def forgotten(method: Method) -> Method:
    return nothing


def without(owner: type, name: str) -> Callable[[Method], Method]:
    """A method that forgets to call another one."""

    def forgetful(method: Method) -> Method:
        def mistaken(*args: Any, **kwargs: Any) -> Any:
            with mock.patch.object(owner, name, nothing):
                return method(*args, **kwargs)

        return mistaken

    return forgetful


def ends_before_the_copy(d2h: Method) -> Method:
    def mistaken(device: CudaDevice, *args: Any) -> Any:
        with torch.cuda.stream(device._d2h_stream):
            early = device.mark()
        transfer = d2h(device, *args)
        transfer.end = early
        return transfer

    return mistaken


def takes_work_at_once(start: Method) -> Method:
    def mistaken(engine: HostEngine, job: Job) -> None:
        job.inputs = []
        start(engine, job)

    return mistaken


def forgets_what_it_sent(submit: Method) -> Method:
    def mistaken(windows: Windows, bucket: Any, *args: Any, **kwargs: Any) -> Any:
        bucket.sent = None
        return submit(windows, bucket, *args, **kwargs)

    return mistaken


@dataclass(frozen=True)
class Mistake:
    """Methods that are mistaken, the kind of problem that shows it, and the knobs under which it does."""

    methods: tuple[tuple[type, str, Callable[[Method], Method]], ...]
    kind: str
    knobs: Mapping[str, Any] = field(default_factory=lambda: WINDOWS)


MISTAKES = {
    "a copy down does not wait for the kernels before it": Mistake(
        ((CudaDevice, "d2h", without(Stream, "wait_event")),), "race"
    ),
    "a copy down does not hold its source": Mistake(
        ((CudaDevice, "d2h", without(SimulatedTensor, "record_stream")),), "freed"
    ),
    "a copy down is said to be over before it begins": Mistake(  # with a selection, indices are read, and it ends there
        ((CudaDevice, "d2h", ends_before_the_copy),), "host", KNOBS["zero-offload"]
    ),
    "kernels do not wait for a copy up": Mistake(((CudaDevice, "join", without(Stream, "wait_event")),), "race"),
    "a copy up does not hold its target": Mistake(
        ((CudaDevice, "join", without(SimulatedTensor, "record_stream")),), "freed"
    ),
    "host memory is not registered": Mistake(((CudaDevice, "pin", forgotten),), "pageable"),
    "the host takes work before its inputs are there": Mistake(
        ((HostEngine, "_start", takes_work_at_once),), "host", KNOBS["zero-offload"]
    ),
    # That the host waits for the gradients to be produced would do, too.
    "a result is overwritten before it was sent": Mistake(
        ((Windows, "_submit", forgets_what_it_sent), (CudaDevice, "wait_for", forgotten)),
        "host",
        {"topk_ratio": 0.0, "update_interval": 1, "bucket_bytes": 2000},
    ),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", fast([*MISTAKES][:2], all_of=list(MISTAKES)))
def test_a_mistake_is_found(gpu: SimulatedCuda, name: str) -> None:
    mistake = MISTAKES[name]
    with contextlib.ExitStack() as planted, contextlib.suppress(Exception):
        for owner, method, mistaken in mistake.methods:
            planted.enter_context(mock.patch.object(owner, method, mistaken(getattr(owner, method))))
        RuntimeCases().trained(gpu.device, dict(mistake.knobs))
    found = gpu.taken_problems()
    assert found[mistake.kind], found


def arrives_late(gpu: SimulatedCuda, *, forgets: bool) -> bool:
    """Whether a gradient arrives where the host has written since."""
    model = model_on(gpu.device, torch.bfloat16)
    optimizer = ZenFlowAdamW(model.parameters(), config=ZenFlowConfig(**KNOBS["windows"]), module=model, **HYPER)
    for step in range(4):
        loss_of(model, step).backward()
        if step < 3:
            optimizer.step()
            optimizer.zero_grad()
    training = optimizer._training
    void = without(CudaDevice, "block_on")(staging.void) if forgets else staging.void
    with mock.patch.object(staging, "void", void):
        for watch in training.gradients._streamer._watches.values():
            watch.forget()
    log = training.runtime.log
    places, written = [], []
    tiers = [weight.deferred for weight in training.model.weights if weight.deferred is not None]
    for part in (part for tier in tiers for part in tier.parts):
        place, pieces, _ = log.write(part.entry_bytes // 2, torch.bfloat16, torch.Tensor.zero_)
        places.append(place)
        written += pieces
    torch.cuda.synchronize()
    found = any(bool(piece.any()) for piece in written)
    log.give_back(places)
    optimizer.abandon()
    return found


@pytest.mark.smoke
def test_a_gradient_that_is_forgotten_before_it_arrived(gpu: SimulatedCuda) -> None:
    """Where it was to arrive, the host may write at once: its copy has been waited for."""
    assert not arrives_late(gpu, forgets=False)
    # Without that wait it is a race, which a busy machine may win now and then.
    assert any(arrives_late(gpu, forgets=True) for _ in range(8))
