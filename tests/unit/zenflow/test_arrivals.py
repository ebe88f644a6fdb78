"""The room for what is on its way over the link: its bound, and weights that do not depend on it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

import pytest
import torch

from tests.support.tiers import repeated
from tests.support.zenflow.cases import assert_same, case_of, run
from zenflow import ZenFlowAdamW, ZenFlowConfig
from zenflow.device import CpuDevice, HostSpan, Mark, Transfer
from zftune.emulation import EmulatedAccelerator, Rig


@pytest.fixture
def device() -> Iterator[EmulatedAccelerator]:
    rates = {"link_d2h_gbps": 1.0, "link_h2d_gbps": 1.0, "host_gbps": 1.0}
    accelerator = EmulatedAccelerator(
        Rig("arrivals", "", forward_ms=1.0, backward_ms=1.0, device_gbps=None, scale=1.0, **rates)
    )
    yield accelerator
    accelerator.close()


@pytest.mark.parametrize("seed", range(repeated(12)))
def test_weights_do_not_depend_on_the_room(seed: int, device: EmulatedAccelerator) -> None:
    case = case_of(seed, bucket_bytes=40, topk_ratio=0.1, offload_ratio=1.0)
    config = ZenFlowConfig(**{**vars(case.config), "staging_bytes": 1})
    ample = run(case, ZenFlowAdamW)
    narrow = run(case, lambda groups, **more: ZenFlowAdamW(groups, device=device, **more), config=config)
    assert_same(case, narrow, ample)


# What waits for the way to the host.


class HeldTransfer(Transfer):
    """A copy that the training thread has to wait for before it is over, and with it those before it."""

    def __init__(self, link: HeldLink, nbytes: int) -> None:
        self.begin = self.end = link.mark()
        self.nbytes = nbytes
        self.over = threading.Event()
        self._link = link

    def wait(self) -> None:
        if threading.get_ident() == self._link.trainer:
            self._link.let_through(self)
        self.over.wait()

    def done(self) -> bool:
        return self.over.is_set()


class HeldLink(CpuDevice):
    """A device whose link to the host moves nothing until the training thread waits for it."""

    in_host_memory = False

    def __init__(self) -> None:
        super().__init__()
        self.trainer = threading.get_ident()
        self.held: deque[HeldTransfer] = deque()
        self.peak_bytes_held = 0

    def d2h(self, source: torch.Tensor, target: torch.Tensor) -> Transfer:
        target.copy_(source)
        self.held.append(HeldTransfer(self, source.nbytes))
        self.peak_bytes_held = max(self.peak_bytes_held, sum(one.nbytes for one in self.held))
        return self.held[-1]

    def let_through(self, last: HeldTransfer | None) -> None:
        while self.held and (last is None or last in self.held):
            self.held.popleft().over.set()


@pytest.mark.parametrize("topk_ratio", [0.0, 0.2], ids=["all deferred", "some selected"])
def test_no_more_waits_for_the_link_in_the_first_step_than_in_later_ones_arrives(topk_ratio: float) -> None:
    weights = [torch.nn.Parameter(torch.randn(32, 64)) for _ in range(6)]
    nbytes = sum(weight.nbytes for weight in weights)
    device, selections = HeldLink(), 4096
    config = ZenFlowConfig(
        topk_ratio=topk_ratio, update_interval=2, bucket_bytes=1024, staging_bytes=nbytes // 8, host_threads=1
    )
    optimizer = ZenFlowAdamW(weights, config=config, device=device)
    peaks = []
    for _ in range(3):
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer.step()
        peaks.append(device.peak_bytes_held)
        device.let_through(None)
    optimizer.close()
    assert nbytes // 16 < peaks[0] <= nbytes // 8 + selections
    assert peaks[-1] > nbytes // 2  # gradients of a step, as many as there are


class BothWays(HeldLink):
    """Counts what was asked for and is not done with."""

    def __init__(self) -> None:
        super().__init__()
        self.coming_bytes = self.peak_coming_bytes = 0

    def h2d(self, source: torch.Tensor, after: HostSpan, asked: Mark) -> tuple[Transfer, torch.Tensor]:
        self.coming_bytes += source.nbytes
        self.peak_coming_bytes = max(self.peak_coming_bytes, self.coming_bytes)
        return super().h2d(source, after, asked)

    def join(self, transfer: Transfer, tensor: torch.Tensor) -> None:
        super().join(transfer, tensor)
        self.coming_bytes -= tensor.nbytes


def test_columns_change_tier_within_staging_bytes() -> None:
    weights = [torch.nn.Parameter(torch.randn(32, 64)) for _ in range(6)]
    state = 32 * (3 * 32 + 1) * 4  # of half of a weight's columns
    device = BothWays()
    config = ZenFlowConfig(topk_ratio=0.5, update_interval=2, staging_bytes=2 * state, host_threads=1)
    optimizer = ZenFlowAdamW(weights, config=config, device=device)
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.randn_like(weight)
            weight.grad[:, 32:] *= 10  # not the columns that are selected at first
        optimizer.step()
        held = device.peak_bytes_held
        device.let_through(None)
    moved = optimizer.history(wait=True)[-1].migrated_bytes
    gradients = sum(weight.nbytes for weight in weights) // 2
    optimizer.close()
    assert moved == 2 * 6 * state
    assert state <= device.peak_coming_bytes <= 2 * state  # one or two, as fast as the host's thread is
    assert 2 * state <= held <= gradients + 2 * state + 4096  # selections
