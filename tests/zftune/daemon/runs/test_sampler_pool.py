"""Searches take turns, with pauses, and share processes: see zftune.daemon.runs.sampler_pool."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from zftune.daemon.runs import sampler_pool
from zftune.daemon.runs.sampler_pool import _LONGEST_REST_S, _REST, FairLock, SamplerPool, queued_s
from zftune.tuner.sampler_process import SamplerError, SamplerProcess

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


def test_after_work_the_next_begins_late(pauses: Pauses) -> None:
    turns = FairLock()
    began_s = time.thread_time()
    with turns.working():
        work(WORK_S)
    most_s = time.thread_time() - began_s
    with turns.working():
        pass
    assert pauses.slept_s[0] == 0
    assert min(_REST * WORK_S, _LONGEST_REST_S) <= pauses.slept_s[1] + 1e-9
    assert pauses.slept_s[1] <= _REST * most_s + 1e-9


def test_who_only_waited_leaves_no_pause(pauses: Pauses) -> None:
    turns = FairLock()
    with turns.working():
        pauses.now_s += 10 * _LONGEST_REST_S
    with turns.working():
        pass
    assert pauses.slept_s[1] < 0.5 * _LONGEST_REST_S


def test_no_pause_is_longer_than_allowed(pauses: Pauses) -> None:
    turns = FairLock()
    with turns.working():
        work(2 * _LONGEST_REST_S / _REST)
    with turns.working():
        pass
    assert pauses.slept_s[1] == pytest.approx(_LONGEST_REST_S)


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


def test_who_fails_gives_its_turn_back() -> None:
    turns = FairLock()
    with pytest.raises(OSError, match="disk"), turns.working():
        raise OSError("disk full")
    taken = threading.Event()

    def take() -> None:
        with turns.working():
            taken.set()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join(SOON_S)
    assert taken.is_set()


def test_waiting_without_a_turn_takes_none() -> None:
    turns = FairLock()
    with turns.waiting():
        pass
    with turns.working(), turns.waiting():
        pass
    with turns.waiting():  # its turn is over
        pass
    assert not turns._turn.locked()


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


def test_who_waits_for_a_process_of_the_pool_knows_for_how_long(
    pool: SamplerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, waiting, second = pool.take(threading.Event(), lambda: False), threading.Event(), pool.lend()
    take = pool.take

    def taking(turn: threading.Event, unwanted: Callable[[], bool]) -> SamplerProcess:
        waiting.set()
        return take(turn, unwanted)

    monkeypatch.setattr(pool, "take", taking)

    def ask() -> None:
        with pytest.raises(SamplerError, match="was ended"):
            second.ask(abs, -3)

    thread = threading.Thread(target=ask)
    assert queued_s(second) == 0
    thread.start()
    assert waiting.wait(SOON_S)
    assert queued_s(second) > 0
    second.close()
    thread.join(SOON_S)
    assert (queued_s(second), queued_s(taken)) == (0, 0)


def test_a_process_that_is_closed_while_it_thinks_is_looked_at_before_it_ends() -> None:
    """Once it has ended nobody knows any more for how long it has waited for a core."""
    asked, waited_s = threading.Event(), 100.0

    def core_wait_s(pid: int) -> float | None:
        asked.set()
        return None if sampler.closed else waited_s  # it is being killed from then on

    sampler = SamplerProcess(core_wait_s=core_wait_s)

    def ask() -> None:
        with pytest.raises(SamplerError, match="was ended"):
            sampler.ask(time.sleep, SOON_S)

    thread = threading.Thread(target=ask)
    thread.start()
    assert asked.wait(SOON_S)
    with sampler._lock:  # what is read when it is asked has been read
        waited_s = 107.0
    sampler.close()
    thread.join(SOON_S)
    assert sampler.waited_s == 7.0


def test_each_run_counts_what_its_own_questions_wait_for_a_core(
    pool: SamplerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = iter((100.0, 106.0, 110.0, 111.0, 120.0, 122.0))
    monkeypatch.setattr("zftune.tuner.sampler_process._core_wait_s", lambda _: next(readings))
    one, other = pool.lend(), pool.lend()
    one.ask(abs, -1)  # from 100 to 106
    other.ask(abs, -1)
    one.ask(abs, -1)
    assert (one.waited_s, other.waited_s) == (8.0, 1.0)
    assert [len(run.notices) for run in (one, other)] == [1, 0]
