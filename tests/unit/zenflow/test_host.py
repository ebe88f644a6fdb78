"""The host engine: order, errors that surface, a worker that dies, closing with work in the queue."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.zenflow.host_calls import SOON_S, Calls, within
from zenflow import CpuDevice, HostEngineError, ZenFlowAdamW, ZenFlowConfig, ZenFlowError
from zenflow.device import HostSpan, Mark, Transfer
from zenflow.host.engine import HostEngine, Job

SYNC = ZenFlowConfig(topk_ratio=0.0, update_interval=1, overlap_step=False)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert [thread.name for thread in threading.enumerate() if thread not in before] == []


def job(name: str, work: Callable[[], object], result: Tensor | None = None) -> Job:
    task: Any = work
    return Job(name, CpuDevice(), task, nbytes=0, inputs=[], result=result)


def test_a_job_that_is_held_fails_with_the_engines_end_and_not_before(engine: HostEngine) -> None:
    held = engine.submit(Job("held", CpuDevice(), None, nbytes=0, inputs=[], not_before=7))
    finished = [held.finished]
    engine.close()
    assert [*finished, held.finished] == [False, True]
    with pytest.raises(HostEngineError, match="the host engine was closed"):
        held.wait(engine)


def test_an_engine_that_nobody_ended_ends_with_a_held_job() -> None:
    engine = HostEngine(CpuDevice(), Calls())
    engine.submit(Job("held", CpuDevice(), None, nbytes=0, inputs=[], not_before=7))
    engine._at_exit()
    assert not engine.alive


def test_jobs_run_in_the_order_in_which_they_were_submitted(engine: HostEngine) -> None:
    done: list[int] = []
    jobs = [engine.submit(job(str(i), lambda i=i: done.append(i))) for i in range(50)]  # type: ignore[misc]
    jobs[-1].wait(engine)
    assert done == list(range(50))
    assert all(one.finished for one in jobs)


def fail() -> None:
    raise ValueError("a bad day")


def test_a_failed_job_raises_in_every_wait_and_the_next_one_runs_or_says_why(engine: HostEngine) -> None:
    bad = engine.submit(job("updating w", fail, torch.zeros(1)))
    for wait in (bad.wait, bad.receive, bad.wait):
        with pytest.raises(HostEngineError, match="updating w failed: a bad day") as caught:
            wait(engine)
        assert isinstance(caught.value.__cause__, ValueError)
    assert engine.alive


def test_a_worker_that_is_gone_is_noticed() -> None:
    engine = HostEngine(CpuDevice(), Calls())
    gate = threading.Event()
    engine.submit(job("held", lambda: gate.wait(SOON_S)))
    engine._waiting.put(None)  # what the feeding thread takes for its end
    stuck = engine.submit(job("updating w", lambda: None))
    gate.set()
    with pytest.raises(HostEngineError, match="thread is gone; updating w was not finished"):
        within(SOON_S, lambda: stuck.wait(engine))
    with pytest.raises(HostEngineError, match="thread is gone; more cannot be submitted"):
        engine.submit(job("more", lambda: None))
    engine.close()


def test_closing_fails_what_is_queued_and_ends_the_thread() -> None:
    engine = HostEngine(CpuDevice(), Calls())
    entered, gate = threading.Event(), threading.Event()
    done: list[int] = []

    def hold() -> None:
        entered.set()
        gate.wait(SOON_S)
        done.append(1)

    first = engine.submit(job("first", hold))
    rest = [engine.submit(job(f"job {i}", lambda: done.append(2))) for i in range(5)]
    assert entered.wait(SOON_S)
    closing = threading.Thread(target=engine.close)
    closing.start()
    while not engine._closing:
        time.sleep(0.001)
    gate.set()
    closing.join(SOON_S)
    assert not closing.is_alive()
    assert not engine.alive
    first.wait(engine)
    for one in rest:
        with pytest.raises(HostEngineError, match="was closed"):
            one.wait(engine)
    assert done == [1]
    within(SOON_S, engine.close)  # again


# Through the optimizer.


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
