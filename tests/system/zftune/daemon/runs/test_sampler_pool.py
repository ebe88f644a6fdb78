"""Searches take turns, with pauses, and share processes: see zftune.daemon.runs.sampler_pool."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from zftune.daemon.runs import sampler_pool
from zftune.daemon.runs.sampler_pool import FairLock, SamplerPool
from zftune.tuner.sampler_process import SamplerProcess

pytestmark = pytest.mark.smoke

WORK_S = 0.02
SOON_S = 30.0


def work(seconds: float) -> None:
    """Use the processor for so long."""
    ends_s = time.thread_time() + seconds
    while time.thread_time() < ends_s:
        pass


class Pauses:
    """Stands for the clock of the turns, which goes on as a test says, and keeps how long each turn waited to begin."""

    thread_time = staticmethod(time.thread_time)

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept_s: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Pauses:
    made = Pauses()
    monkeypatch.setattr(sampler_pool, "time", made)
    return made


def test_one_works_at_a_time_and_others_while_it_waits() -> None:
    turns = FairLock()
    at_work: list[int] = []
    most: list[int] = []
    waits: list[int] = []

    def think() -> None:
        with turns.working():
            at_work.append(1)
            most.append(len(at_work))
            work(WORK_S / 4)
            at_work.pop()
            with turns.waiting():
                both.wait(SOON_S)  # all wait at once: nobody holds the turn
                waits.append(1)
            at_work.append(1)
            most.append(len(at_work))
            at_work.pop()

    both = threading.Barrier(3)
    threads = [threading.Thread(target=think) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    assert (len(waits), max(most), len(most)) == (3, 1, 6)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[SamplerPool]:
    monkeypatch.setattr(SamplerProcess, "ready", SamplerProcess.start)  # nothing is loaded that takes seconds
    made = SamplerPool(most=1)
    yield made
    made.close()


def test_a_process_that_died_while_nobody_used_it_costs_no_run_its_answers(pool: SamplerPool) -> None:
    first = pool.lend().ask(os.getpid)
    assert pool.lend().ask(os.getpid) == first  # one for all
    (idle,) = pool._idle
    os.kill(first, signal.SIGKILL)
    ends_s = time.monotonic() + SOON_S
    while not idle.died:
        assert time.monotonic() < ends_s
        time.sleep(0.002)
    later = pool.lend()
    assert later.ask(os.getpid) != first
    assert later.ask(os.getpid) != first
    assert idle.closed
