"""Memory of the host that copies reach, on the simulated CUDA device: registered, refused, given up."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterable
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.tiers import fast
from tests.support.zenflow.device_cases import HYPER, KNOBS, WINDOWS, RuntimeCases, loss_of, model_on
from tests.support.zenflow.simulated_cuda import SimulatedCuda
from zenflow import UnsupportedError, ZenFlowAdamW, ZenFlowConfig, device

pytestmark = pytest.mark.simulated_cuda(arrival=0.0)


def trained(gpu: SimulatedCuda, knobs: dict[str, Any]) -> tuple[ZenFlowAdamW, torch.nn.Module]:
    model = model_on(gpu.device, torch.bfloat16)
    optimizer = ZenFlowAdamW(model.parameters(), config=ZenFlowConfig(**knobs), module=model, **HYPER)
    for step in range(5):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer, model


# Given up while copies are under way.


def by_knobs(optimizer: ZenFlowAdamW, model: torch.nn.Module) -> None:
    optimizer.set_knobs(offload_ratio=0.3)
    loss_of(model, 8).backward()
    optimizer.step()


def by_its_end(optimizer: ZenFlowAdamW, model: torch.nn.Module) -> None:
    optimizer.flush()


def by_a_checkpoint(optimizer: ZenFlowAdamW, model: torch.nn.Module) -> None:
    saved = optimizer.state_dict()
    loss_of(model, 8).backward()
    optimizer.load_state_dict(saved)


def by_dropping_gradients(optimizer: ZenFlowAdamW, model: torch.nn.Module) -> None:
    loss_of(model, 8).backward()
    optimizer.abandon()


WAYS = {"knobs": by_knobs, "end": by_its_end, "checkpoint": by_a_checkpoint, "dropped gradients": by_dropping_gradients}


@pytest.mark.smoke
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("way", fast(["knobs"], all_of=list(WAYS)))
def test_memory_is_unregistered_when_no_copy_uses_it_any_more(gpu: SimulatedCuda, way: str, waits: bool) -> None:
    unregister = device._unregister

    def at_once(runtime: Any, torch_device: torch.device, address: int, streams: Iterable[Any]) -> None:
        unregister(runtime, torch_device, address, ())

    with mock.patch.object(device, "_unregister", unregister if waits else at_once):
        optimizer, model = trained(gpu, KNOBS["zero-offload"] if way == "knobs" else WINDOWS)
        assert gpu.registered
        WAYS[way](optimizer, model)
        optimizer.close()
        del optimizer
        gc.collect()
    assert not gpu.registered
    found = gpu.taken_problems()
    assert bool(found["unregistered"]) is not waits, found


# Refused.


@pytest.mark.smoke
def test_memory_that_the_driver_does_not_pin_changes_no_bit(gpu: SimulatedCuda) -> None:
    """And no launch finds what the failed call has left; one warning says that copies make training wait."""
    gpu.most_registered_bytes = 0
    cases = RuntimeCases()
    with pytest.warns(UserWarning, match=r"the driver does not pin \d+ bytes of host memory .CUDA error 2") as told:
        ours = cases.trained(gpu.device, WINDOWS)
    assert len(told) == 1, [str(one.message) for one in told]
    assert set(gpu.taken_problems()) == {"pageable"}
    theirs = cases.trained(torch.device("cpu"), WINDOWS)
    cases.assert_bitwise([[weight.cpu() for weight in weights] for weights in ours], theirs)


def test_memory_is_registered_on_the_device_of_the_weights(gpu: SimulatedCuda) -> None:
    """Though another one is current, which would be given a context."""
    gpu.set_device(1)
    optimizer = trained(gpu, WINDOWS)[0]
    assert gpu.registered
    optimizer.close()
    del optimizer
    gc.collect()
    gpu.set_device(0)
    assert not gpu.registered
    assert gpu.contexts == {0}, gpu.contexts


def test_the_capture_of_a_graph_is_refused_in_a_sentence(gpu: SimulatedCuda) -> None:
    optimizer, model = trained(gpu, WINDOWS)
    loss_of(model, 8).backward()
    gpu.capturing = True
    leaves = functools.partial(optimizer._training.runtime.fetch, torch.ones(3).to(gpu.device))
    for act in (leaves, optimizer.step):
        with pytest.raises(UnsupportedError, match=r"a CUDA graph is being captured.*call step"):
            act()
    gpu.capturing = False
    optimizer.step()
    optimizer.close()
