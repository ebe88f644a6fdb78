"""What the simulated pipeline waits for: servers that take one piece of work after the other, and bounded rooms.

Every server is first come, first served, and the compute stream alone decides when work comes. So the end of a piece
of work is known as soon as it comes, and no queue of events has to be kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from zenflow.host.places import ALIGN_BYTES, Piece, Places, tight


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


class Collectives:
    """FSDP2's, on a network that takes one after the other, as the emulated accelerator has them.

    Args:
        gather_ms: of each unit's all-gather; the last unit is what no layer has.
        reduce_ms: of its reduce-scatter.
        replicate_ms: of then adding up over replicas, on a network of its own.
        beside: whether they may lie beside compute; else whoever asks waits.
    """

    def __init__(
        self,
        gather_ms: Sequence[float],
        reduce_ms: Sequence[float],
        replicate_ms: Sequence[float],
        *,
        beside: bool = True,
    ) -> None:
        self._gather_ms, self._reduce_ms, self._replicate_ms = gather_ms, reduce_ms, replicate_ms
        self.beside = beside
        self._network, self._between = Server(), Server()
        self._there = [0.0] * len(gather_ms)
        self._shown = [0.0, 0.0]
        self.scattered = 0.0
        """When the last reduce-scatter ends."""
        self.reduced = 0.0
        """When the last gradients that were reduced are whole."""

    def begin_forward(self, now: float) -> None:
        """Nothing of a step is gathered before."""
        self._shown = [now, now]

    def gather(self, unit: int, now: float, *, ahead: int) -> None:
        """Ask for a unit's weights, which come when so many units before it have theirs, the last or the one before."""
        self._there[unit] = self._network.serve(self._shown[-ahead] if self.beside else now, self._gather_ms[unit])[1]

    def there(self, unit: int) -> float:
        """When a unit has its weights."""
        return self._there[unit]

    def show(self, now: float) -> None:
        """A unit's compute begins."""
        self._shown = [self._shown[1], now]

    def reduce(self, unit: int, now: float) -> None:
        """Reduce the gradients of a unit, after the last ones."""
        self.scattered = self._network.serve(now, self._reduce_ms[unit])[1]
        self.reduced = self._between.serve(self.scattered, self._replicate_ms[unit])[1]

    def add_up(self, now: float, duration: float) -> float:
        """Add up what the ranks tell each other; when it is there."""
        return self._network.serve(now, duration)[1]


@dataclass(slots=True)
class StagingBytes:
    """Bytes that are taken now and given back at times that are known, in ascending order."""

    capacity: float
    taken: float = 0.0
    peak: float = 0.0
    _returns: deque[tuple[float, float]] = field(default_factory=deque)

    def when(self, now: float, nbytes: float, *, alone: bool = False) -> float:
        """When so many bytes are free, at `now` or later; what is back by then is counted.

        `alone`: a single piece of more than the capacity gets an empty room.
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


class Log:
    """The gradient log. Entries wait for room, and where it is tight for places as the runtime would choose them.

    Places cost time to follow, so entries are only counted until it is tight for the first time.
    """

    def __init__(self, capacity_bytes: int) -> None:
        """Begin empty."""
        self._capacity = capacity_bytes
        self._taken = 0
        self._promised = 0
        self._sizes: list[int] = []
        self._returns: deque[tuple[float, list[int]]] = deque()
        self._past: list[int] = []
        """What happened so far: entries that were taken, and after the bitwise complement of each that it came back."""
        self._places: Places | None = None
        self._pieces: dict[int, list[Piece]] = {}

    def take(self, now: float, nbytes: int) -> tuple[float, int]:
        """Take an entry of `nbytes`, padded; when, at `now` of the training thread or later, and its number."""
        entry = len(self._sizes)
        self._sizes.append(nbytes)
        while self._returns and self._returns[0][0] <= now:
            self._return()
        free = self._capacity - self._taken
        if self._places is None and self._promised and (free < nbytes or tight(self._capacity, free)):
            self._follow()
        if self._places is None:
            self._past.append(entry)
        else:
            while not self._place(entry) and self._returns:
                now = max(now, self._return())
        self._taken += nbytes
        return now, entry

    def give_back(self, at: float, entries: list[int]) -> None:
        """Say when entries come back; in ascending order."""
        self._promised += len(entries)
        self._returns.append((at, entries))
        if self._places is not None:
            self._places.promised = self._promised

    def _return(self) -> float:
        at, entries = self._returns.popleft()
        self._promised -= len(entries)
        for entry in entries:
            self._taken -= self._sizes[entry]
            if self._places is None:
                self._past.append(~entry)
            else:
                self._places.give(self._pieces.pop(entry, ()))
        if self._places is not None:
            self._places.promised = self._promised
        return at

    def _follow(self) -> None:
        """Find out where everything lies."""
        self._places = Places(self._capacity)
        whole = self._capacity // ALIGN_BYTES * ALIGN_BYTES  # one segment, which the first step allocates
        self._places.count_segment(whole)
        self._places.give([(self._places.add_segment(whole), whole)])
        for entry in self._past:
            if entry >= 0:
                self._place(entry)
            else:
                self._places.give(self._pieces.pop(~entry, ()))
        self._places.promised = self._promised

    def _place(self, entry: int) -> bool:
        """Find a place; there is none only until more comes back, or where padding makes a log a little too small."""
        assert self._places is not None
        choice = self._places.choose(self._sizes[entry])
        if choice is None:
            return False
        self._pieces[entry], _ = choice
        self._places.take(*choice)
        return True
