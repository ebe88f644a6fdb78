"""Simulated time: real work is done in full and takes no time; the time that it would take is slept instead.

Threads that take part have one turn between them: time stands still while one of them runs, and moves only when all of
them wait, then straight to the earliest moment that one waits for. So a wait still is a wait of one thread for another,
nothing sleeps, and the order of events repeats.
"""

from __future__ import annotations

import heapq
import itertools
import math
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from zenflow.clock import Clock, Condition, Event, Queue, Thread
from zenflow.errors import ZenFlowError
from zenflow.signals import HeldSignals

T = TypeVar("T")


class DeadlockError(ZenFlowError, RuntimeError):
    """In simulated time every thread waits and none for a moment in time; the message says who waits for what."""


class _Party:
    """A thread that takes part."""

    __slots__ = ("error", "gate", "guest", "name", "number", "signal", "until", "waits_for", "woken")

    def __init__(self, name: str, *, guest: bool) -> None:
        self.name = name
        self.guest = guest
        """Whether the clock did not start it: then somebody relies on its going on."""
        self.gate = threading.Lock()
        """Released when it has the turn; a lock, since nothing in C is interrupted half-way."""
        self.gate.acquire()
        self.waits_for: str | None = None
        """None: it runs, or could."""
        self.signal: _Signal | None = None
        self.until: float | None = None
        self.number = 0
        """Of the wait: one that was woken may still be listed among those that wait for a moment."""
        self.woken = False
        self.error: DeadlockError | None = None


class _Signal:
    """Those that wait for one thing, in the order in which they began to."""

    __slots__ = ("name", "parties")

    def __init__(self, name: str) -> None:
        self.name = name
        self.parties: deque[_Party] = deque()


class SimulatedClock(Clock):
    """Time that begins at 0 and moves only while all threads that take part wait.

    The thread that makes it takes part, and every `thread` of it; another one does so while it waits through this
    clock, or in `taking_part`. Threads that could go on at the same moment do so one after the other, in the order in
    which they were woken. A wait that nobody can end any more raises `DeadlockError` in a thread that the clock did not
    start.
    """

    simulated = True
    poll_s = math.inf
    """Waits that have this limit end when a thread has ended."""

    def __init__(self) -> None:
        self._now = 0.0
        self._process = os.getpid()
        self._mutex = threading.Lock()
        self._owner = 0
        """The thread that has the mutex."""
        self._signals: deque[_Signal] = deque()
        """Raised and not passed on yet: a finalizer must not wait for the mutex."""
        self._ready: deque[_Party] = deque()
        self._timed: list[tuple[float, int, _Party]] = []  # a heap
        self._numbers = itertools.count(1)
        self._parties: list[_Party] = []
        self._outside = 0
        self._local = threading.local()
        self._running: _Party | None = self._join()
        self._maker: _Party | None = self._running

    def now(self) -> float:
        return self._now

    def sleep_until(self, moment_s: float) -> None:
        if moment_s > self._now:
            self._wait(_Signal("a moment"), lambda: False, moment_s)

    def event(self, name: str) -> Event:
        return _SimulatedEvent(self, name)

    def queue(self, name: str) -> Queue[Any]:
        return _SimulatedQueue(self, name)

    def condition(self, name: str) -> Condition:
        return _SimulatedCondition(self, name)

    def thread(self, target: Callable[[], object], name: str) -> Thread:
        return _SimulatedThread(self, target, name)

    @contextmanager
    def outside(self) -> Iterator[None]:
        party = self._mine()
        if party is None:
            yield
            return
        with self._entered():
            self._outside += 1
            self._running = None
        try:
            yield
        finally:
            self._take_turn(party, returns=True)

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """Have the calling thread take part: time stands still while it runs."""
        if self._mine() is not None:
            yield
            return
        party = self._join()
        self._take_turn(party)
        try:
            yield
        finally:
            self._leave(party)

    def close(self) -> None:
        """Let the other threads go on without the one that made the clock, which takes no part any more."""
        party, self._maker = self._maker, None
        if party is None or os.getpid() != self._process:
            return
        if self._mine() is party:
            del self._local.party
        with self._entered():
            self._parties.remove(party)
            if self._running is party:
                self._running = None

    # --- who takes part ----------------------------------------------------------------------------------------------

    def _mine(self) -> _Party | None:
        return getattr(self._local, "party", None)

    def _join(self, party: _Party | None = None) -> _Party:
        party = party or _Party(threading.current_thread().name, guest=True)
        self._local.party = party
        self._parties.append(party)
        return party

    def _leave(self, party: _Party) -> None:
        del self._local.party
        with self._entered():
            self._parties.remove(party)
            self._running = None

    def _take_turn(self, party: _Party, *, returns: bool = False) -> None:
        with _uninterrupted():  # without the turn there is nothing that an interrupt could be told
            with self._entered():
                self._outside -= returns
                self._ready.append(party)
            party.gate.acquire()

    # --- waiting -----------------------------------------------------------------------------------------------------

    def _wait(self, signal: _Signal, holds: Callable[[], bool], until: float | None) -> bool:
        """Give the turn up until a signal comes (true) or a moment has (false); true at once where it `holds`."""
        if self._owner == threading.get_ident():
            return False  # a finalizer, below somebody who decides whose turn it is
        if self._mine() is None:
            with self.taking_part():
                return self._wait(signal, holds, until)
        party = self._mine()
        assert party is not None
        try:
            with self._entered():
                if holds():
                    return True
                party.waits_for, party.signal, party.until = signal.name, signal, until
                party.number, party.woken = next(self._numbers), False
                signal.parties.append(party)
                if until is not None and until < math.inf:
                    heapq.heappush(self._timed, (until, party.number, party))
                self._running = None
            party.gate.acquire()
        except BaseException:  # Ctrl-C: whoever is interrupted has to have the turn to go on
            self._take_back(party)
            raise
        error, party.error = party.error, None
        if error is not None:
            raise error
        return party.woken

    def _take_back(self, party: _Party) -> None:
        """Wait for the turn of a thread that was interrupted anywhere in a wait."""
        with _uninterrupted():
            with self._entered():
                if party.signal is not None and party in party.signal.parties:
                    party.signal.parties.remove(party)
                party.signal = party.until = party.waits_for = party.error = None
                party.number = 0
                if self._running is not party and party not in self._ready:
                    self._ready.append(party)
                opened = self._running is party
            if opened:
                party.gate.acquire(blocking=False)  # unless the turn was never given up
            else:
                party.gate.acquire()

    def _raise_signal(self, signal: _Signal) -> None:
        """Wake all that wait for it; what they wait for has been changed before."""
        if os.getpid() != self._process:
            return  # a forked child has none of these threads
        self._signals.append(signal)
        self._pass_on()

    # --- whose turn it is --------------------------------------------------------------------------------------------

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Change what is known of parties; then see whose turn it is."""
        with _uninterrupted(), self._mutex:
            self._owner = threading.get_ident()
            try:
                yield
                self._dispatch()
            finally:
                self._owner = 0
        self._pass_on()

    def _pass_on(self) -> None:
        # Whoever has the mutex passes on what is raised meanwhile: it may be this very thread, below a finalizer.
        while self._signals:
            with _uninterrupted():
                if not self._mutex.acquire(blocking=False):
                    return
                self._owner = threading.get_ident()
                try:
                    while self._signals:
                        for party in list(self._signals.popleft().parties):
                            self._wake(party, woken=True)
                    self._dispatch()
                finally:
                    self._owner = 0
                    self._mutex.release()

    def _wake(self, party: _Party, *, woken: bool) -> None:
        if party.signal is not None:
            party.signal.parties.remove(party)
        party.signal = party.until = party.waits_for = None
        party.number, party.woken = 0, woken
        self._ready.append(party)

    def _dispatch(self) -> None:
        if self._running is not None:
            return
        if not self._ready:
            self._move()
        if self._ready:
            self._running = self._ready.popleft()
            self._running.gate.release()

    def _move(self) -> None:
        """Go to the earliest moment that anybody waits for; where there is none, see whether that can end well."""
        while self._timed:
            moment_s, number, party = heapq.heappop(self._timed)
            if party.number == number:
                self._now = max(self._now, moment_s)
                self._wake(party, woken=False)
                return
        stuck = next((party for party in self._parties if party.guest and party.waits_for is not None), None)
        if stuck is not None and not self._outside and not self._signals:
            waits = "; ".join(f"{party.name} for {party.waits_for}" for party in self._parties if party.waits_for)
            stuck.error = DeadlockError(f"all threads wait and none for a moment in time: {waits}")
            self._wake(stuck, woken=False)

    def _ended(self, party: _Party, signal: _Signal) -> None:
        """A thread is over: those that would look whether it lives do so."""
        for other in self._parties:
            if other.until == math.inf:
                self._wake(other, woken=False)
        for other in list(signal.parties):
            self._wake(other, woken=True)
        self._parties.remove(party)
        self._running = None


def _uninterrupted() -> HeldSignals:
    """Ctrl-C waits until whose turn it is has been decided: half of that would stop everybody."""
    return HeldSignals((signal.SIGINT,), patient=True)


class _SimulatedEvent:
    def __init__(self, clock: SimulatedClock, name: str) -> None:
        self._clock = clock
        self._signal = _Signal(name)
        self._happened = False

    def is_set(self) -> bool:
        return self._happened

    def set(self) -> None:
        self._happened = True
        self._clock._raise_signal(self._signal)

    def clear(self) -> None:
        self._happened = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._happened:
            until = None if timeout is None else self._clock.now() + timeout
            self._clock._wait(self._signal, self.is_set, until)
        return self._happened


class _SimulatedQueue(Generic[T]):
    def __init__(self, clock: SimulatedClock, name: str) -> None:
        self._clock = clock
        self._signal = _Signal(name)
        self._items: deque[T] = deque()

    def put(self, item: T) -> None:
        self._items.append(item)
        self._clock._raise_signal(self._signal)

    def get(self) -> T:
        while not self._items:
            self._clock._wait(self._signal, lambda: bool(self._items), None)
        return self._items.popleft()


class _SimulatedCondition:
    def __init__(self, clock: SimulatedClock, name: str) -> None:
        self._clock = clock
        self._signal = _Signal(name)
        self._lock = threading.RLock()  # for threads that take no part

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *details: Any) -> None:
        self._lock.release()

    def notify_all(self) -> None:
        self._clock._raise_signal(self._signal)

    def wait(self, timeout: float | None = None) -> bool:
        until = None if timeout is None else self._clock.now() + timeout
        # Left only when it is listed as waiting, or a notice that comes in between would be lost.
        left = False

        def leave() -> bool:
            nonlocal left
            self._lock.release()
            left = True
            return False

        try:
            return self._clock._wait(self._signal, leave, until)
        finally:
            if left:
                self._lock.acquire()

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        until = None if timeout is None else self._clock.now() + timeout
        while not (value := predicate()):
            if until is not None and self._clock.now() >= until:
                break
            woken = self.wait(None if until is None else until - self._clock.now())
            if not woken and until == math.inf:
                return predicate()
        return value


class _SimulatedThread:
    def __init__(self, clock: SimulatedClock, target: Callable[[], object], name: str) -> None:
        self._clock = clock
        self._target = target
        self._party = _Party(name, guest=False)
        self._over = _Signal(f"the end of {name}")
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        with self._clock._entered():
            self._clock._parties.append(self._party)
            self._clock._ready.append(self._party)
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive() and self._party in self._clock._parties

    def join(self, timeout: float | None = None) -> None:
        if self._thread is threading.current_thread() or os.getpid() != self._clock._process:
            return
        if self.is_alive():
            until = None if timeout is None else self._clock.now() + timeout
            if not self._clock._wait(self._over, lambda: not self.is_alive(), until):
                return
        self._thread.join(timeout)

    def _run(self) -> None:
        self._party.gate.acquire()
        self._clock._local.party = self._party
        try:
            self._target()
        finally:
            with self._clock._entered():
                self._clock._ended(self._party, self._over)
