"""Host memory is pinned beside training: in parts, by other threads, once, and its time is known."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.support.zenflow.small import Stack, seeded, tokens_of
from zenflow import CpuDevice, HostMemoryError, ZenFlowAdamW, ZenFlowConfig

SOON_S = 30.0
PART_BYTES = 4096
CONFIG = ZenFlowConfig(topk_ratio=0.2, update_interval=4, bucket_bytes=1024, host_threads=1)


@dataclass(frozen=True)
class Pinned:
    """One call of `pin`."""

    nbytes: int
    thread: str


@dataclass
class PinningDevice(CpuDevice):
    """A CPU whose memory has to be pinned, which lasts while its gate is closed."""

    calls: list[Pinned] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    fails: bool = False
    pin_bytes = PART_BYTES

    def __post_init__(self) -> None:
        CpuDevice.__init__(self)
        self.gate.set()

    def pin(self, array: NDArray[np.uint8]) -> None:
        self.calls.append(Pinned(array.nbytes, threading.current_thread().name))
        if self.fails:
            raise MemoryError("no more memory can be pinned")
        assert self.gate.wait(SOON_S)

    @property
    def pinned_bytes(self) -> int:
        return sum(call.nbytes for call in self.calls)


class Run:
    """A small model in training."""

    def __init__(self, device: CpuDevice, config: ZenFlowConfig = CONFIG) -> None:
        self.model = seeded(Stack)
        self.optimizer = ZenFlowAdamW(self.model.parameters(), lr=0.05, config=config, module=self.model, device=device)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.model(tokens_of(self.optimizer.steps)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def ready(self) -> None:
        """Wait until nothing more is being pinned."""
        log = self.optimizer._training.runtime.log
        with log._pool._changed:
            assert log._pool._changed.wait_for(lambda: not log._pool._places.coming_bytes, SOON_S)

    def weights(self) -> list[Tensor]:
        self.optimizer.flush()
        return [parameter.detach().clone() for parameter in self.model.parameters()]


@pytest.fixture
def device() -> Iterator[PinningDevice]:
    made = PinningDevice()
    yield made
    made.gate.set()


@pytest.fixture
def run(device: PinningDevice) -> Iterator[Run]:
    made = Run(device)
    yield made
    device.gate.set()
    made.optimizer.abandon()


def like_plain(run: Run, changes: dict[int, int], steps: int) -> bool:
    """Whether a run has the weights of one on a CPU that pins nothing; `changes` of S by step."""
    plain = Run(CpuDevice())
    for step in range(steps):
        if step in changes:
            plain.optimizer.set_knobs(update_interval=changes[step])
        plain.train(1)
    same = all(torch.equal(a, b) for a, b in zip(run.weights(), plain.weights(), strict=True))
    plain.optimizer.abandon()
    return same


def test_it_is_pinned_once_in_parts_and_never_by_the_training_thread(run: Run, device: PinningDevice) -> None:
    run.train(1)
    run.ready()
    first = len(device.calls)
    used = run.optimizer.host_bytes()
    assert device.pinned_bytes == used["log"] + used["staging"]
    run.train(9)
    assert len(device.calls) == first  # neither a hook nor a later step needs more
    run.optimizer.set_knobs(update_interval=8)
    run.ready()  # without a step
    longer = device.calls[first:]
    assert sum(call.nbytes for call in longer) == used["log"]  # twice as much in all
    for interval in (4, 8, 4, 8):
        run.optimizer.set_knobs(update_interval=interval)
        run.train(12)
    run.ready()
    assert len(device.calls) == first + len(longer)
    assert all(call.nbytes <= PART_BYTES for call in device.calls)
    assert max(call.nbytes for call in device.calls) == PART_BYTES
    assert all(call.thread.startswith("zenflow-pin") for call in device.calls)


def test_training_goes_on_until_it_needs_the_memory(run: Run, device: PinningDevice) -> None:
    run.train(5)
    run.ready()
    device.gate.clear()
    run.optimizer.set_knobs(update_interval=8)
    run.train(4)  # the change, and three of the longer window, which the memory of the shorter ones has room for
    assert run.optimizer.config.update_interval == 8
    assert run.optimizer._training.runtime.log._pool._places.coming_bytes
    done: list[int] = []

    def train() -> None:
        run.train(8)
        done.append(8)

    training = threading.Thread(target=train, daemon=True)
    training.start()
    training.join(0.1)
    assert not done  # a window of eight steps does not fit into what is there
    device.gate.set()
    training.join(SOON_S)
    assert done
    assert like_plain(run, {5: 8}, 17)


def test_memory_that_cannot_be_pinned_is_an_error_where_it_is_needed(run: Run, device: PinningDevice) -> None:
    run.train(5)
    run.ready()
    device.fails = True
    run.optimizer.set_knobs(update_interval=8)
    with pytest.raises(MemoryError, match="no more memory can be pinned"):
        run.train(12)


def test_what_shorter_windows_leave_is_kept_until_somebody_needs_it(run: Run, device: PinningDevice) -> None:
    run.train(5)
    run.ready()
    short = run.optimizer.host_bytes()
    run.optimizer.set_knobs(update_interval=8)
    run.train(9)
    run.ready()
    run.optimizer.set_knobs(update_interval=4)
    run.train(9)
    kept = run.optimizer.host_bytes()
    assert (kept["log"], kept["spare"]) == (short["log"], short["log"])
    run.optimizer.flush()  # no entry is in the log
    with pytest.raises(HostMemoryError, match="somebody needs"):
        run.optimizer._training.runtime.require_host_bytes([1 << 60], "somebody", "lower it")
    left = run.optimizer.host_bytes()
    assert left["spare"] < PART_BYTES
    assert left["log"] == short["log"]
    assert run.optimizer.steps == 23
    run.train(8)
    run.optimizer.flush()
    assert run.optimizer.host_bytes()["log"] == short["log"]


def test_its_time_is_in_the_log_and_in_the_steps(
    run: Run, device: PinningDevice, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "zenflow"):
        run.train(1)
        run.ready()
        run.train(6)
    lines = [record.getMessage() for record in caplog.records if "pinned" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith("pinned 0.00 GB of host memory in ")
    first, *others = run.optimizer.history(wait=True)
    assert first.pin_ms > 0
    assert [one.pin_ms for one in others[1:]] == [0.0] * 5
