"""What is on its way over the link: as much at a time, in each direction, as there is device memory for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from zenflow.device import Device, Transfer
from zenflow.history import History
from zenflow.host.engine import Job


class H2DQueue:
    """Updated weights. Asks for the results of host jobs, in the order in which they are wanted, while their sum fits.

    Whoever needs a result that was not asked for yet asks for it himself, so nothing waits for room in vain; the bound
    then is exceeded by that one.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        """Of all that is on its way or has arrived and is not written into the weights yet; one always may."""
        self._wanted: deque[Job] = deque()
        self._asked: dict[Job, int] = {}
        self._known: set[Job] = set()

    @property
    def nbytes(self) -> int:
        """Bytes that were asked for and are not done with."""
        return sum(self._asked.values())

    def want(self, jobs: Iterable[Job]) -> None:
        """Have results sent when they are finished and there is room; those that are wanted already keep their turn."""
        for job in jobs:
            if job not in self._known:
                self._known.add(job)
                self._wanted.append(job)
        self._ask()

    def done(self, job: Job) -> None:
        """Say that a result was written into its weight, so that its memory is free."""
        if job in self._known:
            self._known.remove(job)
            if self._asked.pop(job, None) is None:
                self._wanted.remove(job)
        self._ask()

    def _ask(self) -> None:
        while self._wanted:
            result = self._wanted[0].result
            nbytes = 0 if result is None else result.nbytes
            if self._asked and self.nbytes + nbytes > self.most_bytes:
                return
            job = self._wanted.popleft()
            self._asked[job] = nbytes
            job.ask_result()


class StagingRoom:
    """Bounds the device memory in which packed columns wait for the link to the host: the oldest are waited for."""

    def __init__(self, device: Device, history: History, nbytes: int) -> None:
        """`nbytes`: most that wait at a time; what is more than that waits alone."""
        self.nbytes = nbytes
        self.peak_bytes = 0  # most bytes that ever waited at a time
        self._device = device
        self._history = history
        self._waiting: deque[tuple[Transfer, int]] = deque()
        self._waiting_bytes = 0

    def make(self, nbytes: int) -> None:
        """Wait until so many bytes more are within bounds."""
        while self._waiting and self._waiting[0][0].done():
            self._leave()
        if self._over(nbytes):
            with self._history.open.timed(self._device, "d2h"):
                while self._over(nbytes):
                    self._device.block_on(self._waiting[0][0])
                    self._leave()

    def add(self, transfer: Transfer, nbytes: int) -> None:
        """Count columns whose copy was queued; copies end in the order in which they are added."""
        self._waiting.append((transfer, nbytes))
        self._waiting_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self._waiting_bytes)

    def _over(self, nbytes: int) -> bool:
        return bool(self._waiting) and self._waiting_bytes + nbytes > self.nbytes

    def _leave(self) -> None:
        self._waiting_bytes -= self._waiting.popleft()[1]
