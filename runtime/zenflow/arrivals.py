"""Updated weights on their way to the device: as many at a time as there is staging memory for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from zenflow.host.engine import Job


class Arrivals:
    """Asks for the results of host jobs, in the order in which they are wanted, while their sum fits.

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
