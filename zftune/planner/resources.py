"""What the simulated pipeline waits for: servers that take one piece of work after the other, and bounded rooms.

Every server is first come, first served, and the compute stream alone decides when work comes. So the end of a piece
of work is known as soon as it comes, and no queue of events has to be kept.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class Server:
    """A link's direction, the host, the collectives. Times in ms."""

    free_at: float = 0.0
    busy: float = 0.0

    def serve(self, ready: float, duration: float) -> tuple[float, float]:
        """Do a piece of work after all that came before; when it begins and ends."""
        begin = max(self.free_at, ready)
        self.free_at = begin + duration
        self.busy += duration
        return begin, self.free_at


@dataclass(slots=True)
class Room:
    """Bytes that are taken now and given back at times that are known, in ascending order."""

    capacity: float
    taken: float = 0.0
    peak: float = 0.0
    _returns: deque[tuple[float, float]] = field(default_factory=deque)

    def when(self, now: float, nbytes: float, *, alone: bool = False) -> float:
        """When so many bytes are free, at `now` or later; what is back by then is counted.

        Args:
            now: the compute stream's time.
            nbytes: to be taken.
            alone: whether a single piece of more than the capacity gets an empty room.
        """
        while self._returns and self._returns[0][0] <= now:
            self.taken -= self._returns.popleft()[1]
        while self._returns and self.taken + nbytes > self.capacity and not (alone and self.taken == 0):
            back, size = self._returns.popleft()
            self.taken -= size
            now = max(now, back)
        return now

    def take(self, nbytes: float) -> None:
        """Take bytes; after `when`."""
        self.taken += nbytes
        self.peak = max(self.peak, self.taken)

    def give_back(self, at: float, nbytes: float) -> None:
        """Say when bytes that were taken come back."""
        self._returns.append((at, nbytes))
