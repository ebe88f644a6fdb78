"""A model that FSDP2 has sharded, on emulated accelerators: its collectives take simulated time, beside compute."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.tiers import fast
from tests.support.zenflow import fsdp_cases
from tests.support.zenflow.fsdp_cases import OVERLAPPED, model_of, my_part, sharded
from tests.support.zenflow.rank_runs import Results, results_of_ranks
from zenflow import StepStats, UnsupportedError, ZenFlowAdamW, ZenFlowConfig
from zenflow.device import Direction, HostSpan, Transfer
from zftune.emulation import EmulatedAccelerator, Rig

RANKS, WIDTH, STEPS = 2, 8, 4
FIELDS = ("step_ms", "comm_ms", "stall_ms")
COMM_GBPS, LATENCY_US = 1e-5, 50.0


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = torch.tanh(x @ self.weight.t())
        return x + inner.mean(1, keepdim=True)


class Chain(nn.Module):
    """Blocks of one weight each, and one that only the root has."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(size) for size in sizes])
        self.head = nn.Linear(WIDTH, 2 * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.head(x)
        return y.square().sum()


def rig_of(forward_ms: float, backward_ms: float, **more: Any) -> Rig:
    fast = dict.fromkeys(("link_d2h_gbps", "link_h2d_gbps", "host_gbps"), 1e6)
    network = {"comm_gbps": COMM_GBPS, "comm_latency_us": LATENCY_US}
    times = {"forward_ms": forward_ms, "backward_ms": backward_ms}
    return Rig("ranks", "", device_gbps=None, scale=1.0, **{**fast, **network, **times, **more})


def collective_ms(size: int) -> float:
    """Of a reduce-scatter, or an all-gather, of a block of this size: a rank sends all but its own share."""
    nbytes = 4 * size * WIDTH * WIDTH
    return LATENCY_US / 1e3 + nbytes * (RANKS - 1) / RANKS / (COMM_GBPS * 1e6)


def energies_ms(weights: int) -> float:
    """The all-reduce of `step()` in fp32: four words, and of each weight one more and its energies."""
    nbytes = 4 * (4 + weights + WIDTH * weights)
    return LATENCY_US / 1e3 + 2 * nbytes * (RANKS - 1) / RANKS / (COMM_GBPS * 1e6)


ROOT_MS, SMALL_MS = collective_ms(2), collective_ms(1)
SIZE = 20
LARGE_MS = collective_ms(SIZE)


@dataclass(frozen=True)
class Timed:
    """A model on a rig of each rank, and how long a step takes."""

    forward_ms: tuple[float, float]
    """Of a block on each rank."""
    backward_ms: tuple[float, float]
    sizes: tuple[int, ...]
    expected_ms: float
    reshards: bool = True


PASS_MS = 0.6 * LARGE_MS
TIMED = {
    # The first two all-gathers have nothing to go beside, and neither have the last two reduce-scatters.
    "compute": Timed((500.0, 1000.0), (900.0, 2000.0), (1, 1, 1), 9000.0 + 2 * (ROOT_MS + SMALL_MS)),
    # Blocks are gathered twice and reduced once; the root stays gathered between the passes.
    "network": Timed((1e-9, 1e-9), (1e-9, 1e-9), (1, 1, 1), 9 * SMALL_MS + 2 * ROOT_MS),
    # A large block is gathered beside the two before it, and again for backward beside its own forward.
    "two ahead": Timed(
        (PASS_MS, PASS_MS), (9e3, 9e3), (1, 1, SIZE), 2 * PASS_MS + LARGE_MS + 27e3 + 2 * (ROOT_MS + SMALL_MS)
    ),
    # Nothing is gathered in backward; the second block's backward ends when the third's gradient is reduced.
    "kept": Timed(
        (5.0, 5.0), (20.0, 20.0), (1, 1, SIZE), 2 * LARGE_MS + 45.0 + 2 * ROOT_MS + 3 * SMALL_MS, reshards=False
    ),
    # One rank has a slow forward, the other a slow backward, which begins when both have the last block's weights.
    "meeting": Timed(
        (1e3, 1.0), (1.0, 2e3), (1, 1, 1), 2e3 + SMALL_MS + 6e3 + 2 * (ROOT_MS + SMALL_MS)
    ),
}  # fmt: skip


def train_chain(case: Timed, rank: int) -> dict[str, Any]:
    """Without offloading, so that a step is compute and collectives."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model, count = Chain(case.sizes), len(case.sizes)
    for unit in (*model.layers, model):
        fully_shard(unit, reshard_after_forward=case.reshards and unit is not model)
    device = EmulatedAccelerator(rig_of(count * case.forward_ms[rank], count * case.backward_ms[rank]))
    config = ZenFlowConfig.zero_offload(offload_ratio=0.0, pipeline="bucket")
    optimizer = ZenFlowAdamW(model.parameters(), lr=1e-3, config=config, module=model, device=device)
    device.attach(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(2, WIDTH)).backward()
        optimizer.step()
    found = optimizer.history(wait=True)
    optimizer.close()
    device.close()
    steps = found[1:]  # a step is counted from the end of the one before
    return {
        "step_ms": [one.step_ms for one in steps],
        "comm_ms": [one.comm_ms for one in steps],
        "stall_ms": [one.stall_ms for one in steps],
    }


HOST_MS, LATE_FORWARD_MS, LATE_BACKWARD_MS = 900.0, 20.0, 60.0
"""Of each of the chain's blocks: its update, which reads and writes 32 bytes an element, and its passes."""


def train_late(rank: int) -> dict[str, Any]:
    """All state on a slow host, whose updates of a step end in the next one's forward."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = Chain((1, 1, 1))
    for unit in (*model.layers, model):
        fully_shard(unit)
    nbytes = 32 * WIDTH * WIDTH // RANKS
    rig = rig_of(3 * LATE_FORWARD_MS, 3 * LATE_BACKWARD_MS, host_gbps=nbytes / HOST_MS / 1e6)
    device = EmulatedAccelerator(rig)
    config = ZenFlowConfig.zero_offload(pipeline="bucket", bucket_bytes=4 * WIDTH * WIDTH)  # a block
    optimizer = ZenFlowAdamW(model.parameters(), lr=1e-3, config=config, module=model, device=device)
    device.attach(model)
    for _ in range(STEPS + 1):
        optimizer.zero_grad()
        model(torch.ones(2, WIDTH)).backward()
        optimizer.step()
    found = optimizer.history(wait=True)
    optimizer.close()
    device.close()
    return {"step_ms": [one.step_ms for one in found[2:]]}  # in the first forward no use was seen yet


class Watch:
    """Whether a copy ever began before its gradient was reduced."""

    def __init__(self, device: EmulatedAccelerator) -> None:
        self._device = device
        self.copies = self.early = 0

    def transferred(self, direction: Direction, transfer: Transfer) -> None:
        if direction == "d2h":
            assert self._device._network is not None
            self.copies += 1
            self.early += transfer.begin < self._device._network.reduced_t

    def worked(self, name: str, span: HostSpan) -> None: ...


def train_overlapped(rank: int) -> dict[str, Any]:
    """Deferred columns, during whose backward gradients leave."""
    links = {"link_d2h_gbps": 2e-5, "link_h2d_gbps": 2e-5, "host_gbps": 1e-4}
    model = sharded(model_of())
    device = EmulatedAccelerator(rig_of(20.0 + 3 * rank, 40.0, **links))
    device.observer = watch = Watch(device)
    optimizer = ZenFlowAdamW(model.parameters(), lr=1e-2, config=OVERLAPPED, module=model, device=device)
    device.attach(model)
    losses = []
    for step in range(1, fsdp_cases.STEPS + 1):
        optimizer.zero_grad()
        loss = fsdp_cases.loss_of(model, fsdp_cases.tokens_of(step, 0)[my_part(rank)], recompute=False)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    found: list[StepStats] = optimizer.history(wait=True)
    optimizer.close()
    device.close()
    steps = [(one.step_ms, one.stall_ms, one.d2h_bytes, one.h2d_bytes) for one in found]
    return {"steps": repr(steps), "losses": losses, "copies": watch.copies, "early": watch.early}


def say_of_host(rank: int) -> dict[str, Any]:
    from torch.distributed.fsdp import CPUOffloadPolicy

    model = sharded(model_of(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    device = EmulatedAccelerator(rig_of(1.0, 2.0))
    try:
        with pytest.raises(UnsupportedError) as raised:
            device.attach(model)
    finally:
        device.close()
    return {"said": str(raised.value)}


WORK = {
    **{name: partial(train_chain, case) for name, case in TIMED.items()},
    "late": train_late,
    "overlapped": train_overlapped,
    "overlapped again": train_overlapped,
    "on the host": say_of_host,
}
"""What all ranks do together."""
TRIED = fast(["overlapped", "overlapped again"], all_of=list(WORK))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    found = results_of_ranks(tmp_path_factory.mktemp("ranks"), "tests.system.zenflow.test_fsdp_rigs", TRIED, RANKS)
    for results in found:
        for result in results.values():
            assert "error" not in result, result["trace"]
    return found


@pytest.mark.parametrize("name", TIMED)
def test_collectives_take_their_time_beside_compute(ranks: Results, name: str) -> None:
    case = TIMED[name]
    expected = case.expected_ms + energies_ms(len(case.sizes) + 1)
    for results in ranks:
        assert results[name]["step_ms"] == pytest.approx([expected] * (STEPS - 1), rel=1e-8)


def test_units_wait_for_their_own_weights_alone(ranks: Results) -> None:
    """The root has two blocks of weights and is needed first; a block's forward lies beside the next one's update."""
    forward_ms = 5 * HOST_MS + SMALL_MS + LATE_FORWARD_MS
    expected = forward_ms + 3 * LATE_BACKWARD_MS + SMALL_MS + ROOT_MS + energies_ms(4)
    for results in ranks:
        assert results["late"]["step_ms"] == pytest.approx([expected] * (STEPS - 1), rel=1e-8)


@pytest.mark.parametrize("name", TIMED)
def test_what_is_not_compute_is_waiting_in_collectives(ranks: Results, name: str) -> None:
    case = TIMED[name]
    for rank, results in enumerate(ranks):
        compute_ms = len(case.sizes) * (case.forward_ms[rank] + case.backward_ms[rank])
        for step_ms, comm_ms, stall_ms in zip(*(results[name][field] for field in FIELDS), strict=True):
            assert sum(comm_ms.values()) == pytest.approx(step_ms - compute_ms)
            assert stall_ms["comm"] == pytest.approx(sum(comm_ms.values()))
            assert sum(stall_ms.values()) == stall_ms["comm"]


def test_each_collective_is_told_apart(ranks: Results) -> None:
    """By the slower rank, which waits for nobody."""
    expected = {"gather": ROOT_MS + SMALL_MS, "reduce_scatter": ROOT_MS + SMALL_MS, "all_reduce": energies_ms(4)}
    for comm_ms in ranks[1]["compute"]["comm_ms"]:
        assert comm_ms == pytest.approx(expected)


@pytest.mark.smoke
def test_gradients_leave_when_they_are_reduced(ranks: Results) -> None:
    for results in ranks:
        assert results["overlapped"]["copies"] > 0
        assert results["overlapped"]["early"] == 0


@pytest.mark.smoke
def test_simulated_ranks_repeat_to_the_last_digit(ranks: Results) -> None:
    for results in ranks:
        first, second = results["overlapped"], results["overlapped again"]
        assert first["steps"] == second["steps"]
        assert first["losses"] == second["losses"]
    assert ranks[0]["overlapped"]["losses"] != ranks[1]["overlapped"]["losses"]  # each has a part of the batch


def test_weights_on_the_host_are_refused(ranks: Results) -> None:
    for results in ranks:
        assert results["on the host"]["said"] == (
            "the model's weights are on the host (CPUOffloadPolicy); on a rig they must be on the device: it "
            "has no times for FSDP2's copies"
        )
