"""Errors of the host surface in the step that meets them, and an optimizer that was ended says so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

from zenflow import CpuDevice, HostEngineError, ZenFlowAdamW, ZenFlowConfig, ZenFlowError
from zenflow.device import HostSpan, Mark, Transfer

SOON_S = 30.0  # a hang, on however busy a machine
SYNC = ZenFlowConfig(topk_ratio=0.0, update_interval=1, overlap_step=False)


def within(seconds: float, work: Callable[[], object]) -> None:
    """Run `work` in a thread that may hang, and fail if it does."""
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    if errors:
        raise errors[0]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert [thread.name for thread in threading.enumerate() if thread not in before] == []


class Failing(CpuDevice):
    """Host work fails from the n-th piece on, or in that one only."""

    def __init__(self, after: int, *, once: bool = False) -> None:
        super().__init__()
        self._left = after
        self._once = once

    def host_work(
        self, finish: Callable[[], HostSpan], nbytes: int, inputs: Sequence[Transfer], submitted: Mark
    ) -> HostSpan:
        span = finish()
        self._left -= 1
        if self._left == -1 or (self._left < 0 and not self._once):
            raise OSError("no memory left")
        return span


class BrokenUplink(CpuDevice):
    """Cannot send anything back, as when the accelerator's memory is full."""

    def h2d(self, source: Tensor, after: HostSpan, asked: Mark) -> tuple[Transfer, Tensor]:
        raise MemoryError("the accelerator's memory is full")


class NoThread(CpuDevice):
    """Refuses a second thread."""

    def enter_thread(self) -> None:
        raise OSError("no such accelerator")


def trained(device: CpuDevice, config: ZenFlowConfig, steps: int = 8) -> ZenFlowAdamW:
    module = nn.Sequential(nn.Linear(5, 4, bias=False))
    optimizer = ZenFlowAdamW(module.parameters(), config=config, device=device, module=module)
    for _ in range(steps):
        for weight in module.parameters():
            weight.grad = torch.ones_like(weight)
        try:
            optimizer.step()
        except BaseException:
            optimizer.abandon()
            raise
    return optimizer


OVERLAPPED = ZenFlowConfig(topk_ratio=0.3, update_interval=2, select_interval=50)


@pytest.mark.parametrize("config", [SYNC, OVERLAPPED], ids=["sync", "overlapped"])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_an_error_on_the_host_surfaces_in_step(after: int, config: ZenFlowConfig) -> None:
    with pytest.raises(HostEngineError, match=r"0\.weight failed: no memory left") as caught:
        within(SOON_S, lambda: trained(Failing(after), config))
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize(("piece", "name"), [(0, "reading the masters"), (2, "moving columns")])
def test_an_error_in_work_that_nobody_waits_for_surfaces_too(piece: int, name: str) -> None:
    """Masters that were not read, or states that did not arrive, would corrupt every later update."""
    weight = nn.Parameter(torch.ones(3, 4))
    config = ZenFlowConfig(topk_ratio=0.5, update_interval=2, select_interval=1)
    optimizer = ZenFlowAdamW([weight], config=config, device=Failing(piece, once=True))

    def train() -> None:  # pieces: the masters; then, of a window, columns that leave, columns that join, the rest
        for step in range(8):
            loud = [1.0, 1.0, 9.0, 9.0] if step % 2 else [9.0, 9.0, 1.0, 1.0]
            weight.grad = torch.tensor([loud] * 3)
            optimizer.step()

    try:
        with pytest.raises(HostEngineError, match=f"{name} of 0 failed: no memory left"):
            train()
    finally:
        optimizer.abandon()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("config", [SYNC, OVERLAPPED], ids=["sync", "overlapped"])
def test_an_error_of_the_way_back_names_its_cause(config: ZenFlowConfig) -> None:
    with pytest.raises((HostEngineError, MemoryError), match="memory is full"):
        within(SOON_S, lambda: trained(BrokenUplink(), config))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_cannot_start_names_its_cause() -> None:
    with pytest.raises(HostEngineError, match="no such accelerator"):
        within(SOON_S, lambda: trained(NoThread(), SYNC))


@pytest.mark.parametrize("end", ["close", "abandon"])
def test_after_the_end_step_is_a_sentence(end: str) -> None:
    optimizer = trained(CpuDevice(), OVERLAPPED, steps=3)
    getattr(optimizer, end)()
    getattr(optimizer, end)()
    optimizer.close()
    optimizer.flush()
    with pytest.raises(ZenFlowError, match=r"step\(\) was called after close\(\): make a new optimizer"):
        optimizer.step()


def test_close_applies_what_is_pending_and_abandon_does_not() -> None:
    results = []
    for end in ("close", "abandon"):
        optimizer = trained(CpuDevice(), ZenFlowConfig(topk_ratio=0.0, update_interval=4), steps=2)
        (weight,) = optimizer.param_groups[0]["params"]
        before = weight.detach().clone()
        getattr(optimizer, end)()
        results.append(torch.equal(weight.detach(), before))
    assert results == [False, True]
