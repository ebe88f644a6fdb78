"""Processes that think, shared by all runs: each holds torch and Optuna in memory, and few think at a time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from zftune.tuner.sampler_process import ANSWER_S, SamplerError, SamplerProcess

_REST = 3.0
"""For each second of work: searches take a quarter of the interpreter at most."""
_LONGEST_REST_S = 0.1


class FairLock:
    """Of the threads of one daemon."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._rested_at_s = 0.0
        """When the next may begin; of whose turn it is."""
        self._mine = threading.local()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Work when it is this thread's turn; it must not wait for another thread that works."""
        self._begin()
        try:
            yield
        finally:
            self._end()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let others work while this thread waits for a process."""
        if not getattr(self._mine, "held", False):
            yield
            return
        self._end()
        try:
            yield
        finally:
            self._begin()

    def _begin(self) -> None:
        self._turn.acquire()
        time.sleep(max(0.0, self._rested_at_s - time.monotonic()))
        self._mine.held, self._mine.began_s = True, time.thread_time()

    def _end(self) -> None:
        worked_s = time.thread_time() - self._mine.began_s
        self._mine.held = False
        self._rested_at_s = time.monotonic() + min(_REST * worked_s, _LONGEST_REST_S)
        self._turn.release()


_MOST = 2


class SamplerPool:
    """A pool of at most `most` sampler processes, started on request; each may use `share` of a core."""

    def __init__(self, most: int = _MOST, share: float = 1.0, answer_s: float = ANSWER_S) -> None:
        self.turns = FairLock()
        """Of those who think without a process."""
        self._share, self._answer_s = share, answer_s
        self._free = most
        self._idle: list[SamplerProcess] = []
        self._waiting: deque[threading.Event] = deque()
        """Of each that waits for room, in turn; set when it has it, or when somebody who waits gives up."""
        self._closed = False
        self._lock = threading.Lock()

    def lend(self) -> SamplerProcess:
        """One for a run, which asks for a process only while it needs an answer."""
        return PooledSampler(self)

    def take(self, turn: threading.Event, unwanted: Callable[[], bool]) -> SamplerProcess:
        """A process; waits until one is free, in turn.

        `turn`, set from outside, makes it look again whether it is `unwanted`.

        Raises:
            SamplerError: nobody does, or the pool was closed.
        """
        with self._lock:
            has_room = self._free > 0
            if has_room:
                self._free -= 1
            else:
                self._waiting.append(turn)
        if not has_room:
            turn.wait()
        with self._lock:
            if not has_room and turn in self._waiting:  # woken, and it is not its turn
                self._waiting.remove(turn)
                raise SamplerError("the search process was ended")
            if self._closed or unwanted():
                self._leave_room()
                raise SamplerError("the processes that think were ended")
            while self._idle:
                idle = self._idle.pop()
                if not idle.died:
                    return idle
                idle.close()
        return SamplerProcess(self._answer_s, self._share)

    def give_back(self, sampler_process: SamplerProcess, *, sound: bool) -> None:
        """Take a process back; `sound`: it can be asked again."""
        with self._lock:
            keep = sound and not self._closed and not sampler_process.closed
            if keep:
                self._idle.append(sampler_process)
        if not keep:
            sampler_process.close()
        with self._lock:
            self._leave_room()

    def close(self) -> None:
        """End those that are idle; the others end when they are given back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for turn in self._waiting:
                turn.set()
        for one in idle:
            one.close()

    def _leave_room(self) -> None:
        """To the next in turn; under the lock."""
        if self._waiting:
            self._waiting.popleft().set()
        else:
            self._free += 1


class PooledSampler(SamplerProcess):
    """What a run takes for its own process."""

    def __init__(self, pool: SamplerPool) -> None:
        super().__init__()
        self.turns = pool.turns
        self._pool = pool
        self._using: SamplerProcess | None = None
        self._used_before_s = 0.0
        self._turn = threading.Event()
        self._queued_at_s: float | None = None
        """Since when it waits for a process that others have; None: it does not."""

    @property
    def queued_s(self) -> float:
        """For how long its question has waited until another run's is answered; 0: it does not wait."""
        since_s = self._queued_at_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    @property
    def waited_s(self) -> float:
        with self._lock:
            waits_s = 0.0 if self._using is None else self._using.waited_s - self._used_before_s
            return self._heeded(self._waited_s + waits_s)

    def start(self) -> None:
        if self._closed:
            raise SamplerError("the search process was ended")

    def ready(self) -> None:
        self.start()  # it gets ready with the first question: others may need the room

    def ask(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        with self.turns.waiting():
            return self._ask(function, *args, **named)

    def _ask(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        self.start()
        self._turn = threading.Event()
        if self._closed:  # since it was looked at
            self._turn.set()
        self._queued_at_s = time.monotonic()
        try:
            sampler_process = self._pool.take(self._turn, lambda: self._closed)
        finally:
            self._queued_at_s = None
        sound = False
        try:
            with self._lock:
                self._using = None if self._closed else sampler_process
                self._used_before_s = sampler_process.waited_s
            self.start()
            sampler_process.ready()
            answer = sampler_process.ask(function, *args, **named)
            sound = True
            return answer
        finally:
            with self._lock:
                if self._using is not None:
                    self._waited_s += sampler_process.waited_s - self._used_before_s
                self._using = None
            self._pool.give_back(sampler_process, sound=sound)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._turn.set()
            if self._using is not None:
                self._using.close()  # who waits for its answer gets none; it goes back to the pool unsound


def queued_s(sampler_process: SamplerProcess) -> float:
    """For how long a run's question has waited for its turn; 0 where it has a process of its own."""
    return sampler_process.queued_s if isinstance(sampler_process, PooledSampler) else 0.0
