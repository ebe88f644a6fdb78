"""Processes that think, shared by all runs: each holds torch and Optuna in memory, and few think at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from zftune.daemon.brain.turns import Turns
from zftune.tuner.thinker import ANSWER_S, Thinker, ThinkerError

_MOST = 2


class Thinkers:
    """A pool of them, started when somebody asks.

    Args:
        most: processes at a time.
        share: of a core that each may use.
        answer_s: seconds that an answer may take.
    """

    def __init__(self, most: int = _MOST, share: float = 1.0, answer_s: float = ANSWER_S) -> None:
        self.turns = Turns()
        """Of those who think without a process."""
        self._share, self._answer_s = share, answer_s
        self._free = most
        self._idle: list[Thinker] = []
        self._waiting: deque[threading.Event] = deque()
        """Of each that waits for room, in turn; set when it has it, or when somebody who waits gives up."""
        self._closed = False
        self._lock = threading.Lock()

    def lend(self) -> Thinker:
        """One for a run, which asks for a process only while it needs an answer."""
        return Borrowed(self)

    def take(self, turn: threading.Event, unwanted: Callable[[], bool]) -> Thinker:
        """A process; waits until one is free, in turn.

        Args:
            turn: of who asks; where it is set from outside, it looks whether it is still wanted.
            unwanted: whether nobody waits for it any more.

        Raises:
            ThinkerError: nobody does, or the pool was closed.
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
                raise ThinkerError("the process that thinks was ended")
            if self._closed or unwanted():
                self._leave_room()
                raise ThinkerError("the processes that think were ended")
            if self._idle:
                return self._idle.pop()
        return Thinker(self._answer_s, self._share)

    def give_back(self, thinker: Thinker, *, sound: bool) -> None:
        """Take a process back.

        Args:
            thinker: from `take`.
            sound: whether it can be asked again.
        """
        with self._lock:
            keep = sound and not self._closed and not thinker.closed
            if keep:
                self._idle.append(thinker)
        if not keep:
            thinker.close()
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


class Borrowed(Thinker):
    """What a run takes for its own process."""

    def __init__(self, pool: Thinkers) -> None:
        super().__init__()
        self.turns = pool.turns
        self._pool = pool
        self._using: Thinker | None = None
        self._turn = threading.Event()

    def start(self) -> None:
        if self._closed:
            raise ThinkerError("the process that thinks was ended")

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
        thinker = self._pool.take(self._turn, lambda: self._closed)
        sound = False
        try:
            with self._lock:
                self._using = None if self._closed else thinker
            self.start()
            thinker.ready()
            answer = thinker.ask(function, *args, **named)
            sound = True
            return answer
        finally:
            with self._lock:
                self._using = None
            self._pool.give_back(thinker, sound=sound)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._turn.set()
            if self._using is not None:
                self._using.close()  # who waits for its answer gets none; it goes back to the pool unsound
