"""Simulated time: whose turn it is, when it moves, what ends a wait, and that faults of waiting show every time."""

from __future__ import annotations

import gc
import queue
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from zenflow.clock import REAL_CLOCK, Clock
from zftune.emulation.clock import DeadlockError, SimulatedClock

SOON_S = 30.0


@pytest.fixture
def clock() -> Iterator[SimulatedClock]:
    made = SimulatedClock()
    yield made
    made.close()


@pytest.fixture(params=["real", "simulated"])
def either(request: pytest.FixtureRequest) -> Clock:
    """What both clocks promise, by both."""
    if request.param == "real":
        return REAL_CLOCK
    simulated: SimulatedClock = request.getfixturevalue("clock")
    return simulated


def started(clock: Clock, target: Callable[[], object], name: str = "worker") -> object:
    thread = clock.thread(target, name)
    thread.start()
    return thread


def test_time_begins_at_0_and_moves_straight_to_what_is_waited_for(clock: SimulatedClock) -> None:
    assert clock.now() == 0
    clock.sleep(3600)
    assert clock.now() == 3600
    clock.sleep_until(10)  # is over
    assert clock.now() == 3600


def test_time_stands_still_while_a_thread_runs(clock: SimulatedClock) -> None:
    reached = []

    def work() -> None:
        clock.sleep(1)
        reached.append(clock.now())

    thread = clock.thread(work, "worker")
    thread.start()
    threading.Event().wait(0.05)  # of the machine's time: the clock knows nothing of it
    assert (reached, clock.now()) == ([], 0)
    thread.join()
    assert reached == [1]


def test_those_of_one_moment_go_on_in_the_order_in_which_they_began_to_wait(clock: SimulatedClock) -> None:
    for _ in range(20):
        order: list[int] = []

        def wait(number: int, order: list[int] = order, moment_s: float = clock.now() + 1) -> None:
            clock.sleep_until(moment_s)
            order.append(number)

        for number in range(6):
            started(clock, lambda number=number: wait(number))  # type: ignore[misc]
        clock.sleep(2)
        assert order == list(range(6))


def test_a_queue_is_in_order(either: Clock) -> None:
    there, back = either.queue("there"), either.queue("back")

    def serve() -> None:
        while (item := there.get()) is not None:
            back.put(2 * item)

    thread = either.thread(serve, "worker")
    thread.start()
    for item in (1, 2, 3):
        there.put(item)
    assert [back.get() for _ in range(3)] == [2, 4, 6]
    there.put(None)
    thread.join(SOON_S)
    assert not thread.is_alive()


def test_an_event_and_its_time_limit(either: Clock) -> None:
    event = either.event("it")
    began_s = either.now()
    assert not event.wait(0.02)
    assert either.now() - began_s >= 0.02

    def later() -> None:
        either.sleep(0.01)
        event.set()

    started(either, later)
    assert event.wait(SOON_S)
    assert event.is_set()
    assert event.wait()


def test_a_condition_wakes_all_that_wait_and_limits_the_time(either: Clock) -> None:
    changed, values = either.condition("values"), list[int]()
    got = []

    def take(least: int) -> Callable[[], None]:
        def wait() -> None:
            with changed:
                changed.wait_for(lambda: len(values) >= least)
                got.append((least, list(values)))

        return wait

    threads = [either.thread(take(least), f"from {least}") for least in (2, 1)]
    for thread in threads:
        thread.start()
    with changed:
        assert changed.wait_for(lambda: bool(values), 0.01) is False
    for value in (1, 2):
        with changed:
            values.append(value)
            changed.notify_all()
        either.sleep(0.05)
    for thread in threads:
        thread.join(SOON_S)
    first, second = sorted(got)
    assert first[1]
    assert second == (2, [1, 2])


def test_whoever_looks_whether_a_thread_lives_is_told_when_it_ends(either: Clock) -> None:
    never = either.event("what never happens")
    thread = either.thread(lambda: either.sleep(0.01), "worker")
    thread.start()
    while not never.wait(either.poll_s) and thread.is_alive():
        pass
    assert not thread.is_alive()


def test_a_thread_without_part_takes_part_while_it_waits(clock: SimulatedClock) -> None:
    done, slept = clock.event("the stranger"), list[float]()

    def stranger() -> None:
        clock.sleep(3)
        slept.append(clock.now())
        done.set()

    thread = threading.Thread(target=stranger)
    thread.start()
    while not done.wait(1):  # time moves for both
        pass
    thread.join()
    assert slept == [3]


def test_time_goes_on_without_a_thread_that_waits_outside(clock: SimulatedClock) -> None:
    outside: queue.SimpleQueue[float] = queue.SimpleQueue()

    def work() -> None:
        clock.sleep(5)
        outside.put(clock.now())

    started(clock, work)
    with clock.outside():
        assert outside.get(timeout=SOON_S) == 5
    assert clock.now() == 5
    clock.sleep(1)
    assert clock.now() == 6


def test_closing_lets_the_others_go_on(clock: SimulatedClock) -> None:
    items = clock.queue("items")
    thread = clock.thread(items.get, "worker")
    thread.start()
    clock.close()
    items.put(1)
    thread.join(SOON_S)
    assert not thread.is_alive()


def test_a_finalizer_may_put_and_set_wherever_it_runs(clock: SimulatedClock) -> None:
    items, event = clock.queue("items"), clock.event("it")
    worker = clock.thread(lambda: [items.get() for _ in range(200)], "worker")
    worker.start()

    ended: list[Callable[[], None]] = []

    class Thing:
        def __init__(self) -> None:
            self.circle = self

    def end(say: Callable[[], None]) -> None:
        say()
        ended.append(say)

    def collect_all(count: int) -> None:
        until = time.monotonic() + SOON_S
        while len(ended) < count and time.monotonic() < until:
            gc.collect()  # in vain while the worker is about it

    gc.set_threshold(1)  # in the middle of anything that allocates, deciding whose turn it is as well
    try:
        for _ in range(200):
            weakref.finalize(Thing(), end, lambda: items.put(None))
            clock.sleep(1)
        collect_all(200)
        weakref.finalize(Thing(), end, event.set)
        collect_all(201)
        assert event.wait(1)
        worker.join(10)
    finally:
        gc.set_threshold(700, 10, 10)
    assert not worker.is_alive()


@pytest.mark.parametrize("outside", [False, True])
def test_an_interrupt_leaves_the_clock_as_it_should_be(clock: SimulatedClock, outside: bool) -> None:
    """The worker runs, in the machine's time, while the main thread is interrupted."""
    runs, struck = threading.Event(), threading.Event()
    work, main = clock.queue("work"), threading.main_thread().ident

    def serve() -> None:
        while (wait_s := work.get()) is not None:
            runs.set()
            struck.wait(SOON_S)
            time.sleep(wait_s)
            clock.sleep(1)

    def interrupt() -> None:
        runs.wait(SOON_S)
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)
        struck.set()

    thread = clock.thread(serve, "worker")
    thread.start()
    threading.Thread(target=interrupt).start()
    work.put(0.3)

    def wait() -> None:
        if not outside:
            clock.event("what never happens").wait()
        with clock.outside():
            time.sleep(SOON_S)

    with pytest.raises(KeyboardInterrupt):
        wait()
    at_s = clock.now()  # a lock that is about to be waited for does not hear of a signal before it was waited for
    clock.sleep(5)
    assert clock.now() == at_s + 5
    work.put(None)
    thread.join()
    assert not thread.is_alive()


def test_a_deadlock_says_who_waits_for_what(clock: SimulatedClock) -> None:
    work = clock.queue("work")
    thread = clock.thread(work.get, "the worker")
    thread.start()
    with pytest.raises(DeadlockError, match=r"MainThread for the answer; the worker for work$"):
        clock.event("the answer").wait()
    work.put(None)  # and all goes on
    thread.join()


def test_a_wait_that_looks_whether_others_live_can_be_a_deadlock(clock: SimulatedClock) -> None:
    started(clock, clock.queue("work").get)
    answer = clock.event("the answer")
    with pytest.raises(DeadlockError):
        answer.wait(clock.poll_s)


def test_a_condition_that_nobody_notifies_is_a_deadlock_though_it_holds(clock: SimulatedClock) -> None:
    changed, values = clock.condition("a value"), list[int]()
    started(clock, lambda: values.append(1))
    with changed, pytest.raises(DeadlockError, match="a value"):
        changed.wait_for(lambda: bool(values))
    with changed:
        assert changed.wait_for(lambda: bool(values))


def test_no_deadlock_while_somebody_is_outside(clock: SimulatedClock) -> None:
    answer, release = clock.event("the answer"), threading.Event()

    def work() -> None:
        with clock.outside():
            release.wait(SOON_S)
        answer.set()

    started(clock, work)
    threading.Timer(0.05, release.set).start()
    assert answer.wait()
