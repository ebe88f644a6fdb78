"""Which of several independent jobs is next: the foremost whose inputs are there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zenflow.device import Transfer
    from zenflow.host.engine import Job


class Foremost:
    """An iterator over jobs that do not depend on each other, listed in the order in which their results are needed.

    It looks at the inputs only when the device has produced all of them, and when the job before the last one is
    finished: the engine then has one job to go on with, and inputs have had all the time that there is to arrive.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        *,
        last_arrives_first: bool,
        patience: Callable[[Sequence[Job]], bool] | None,
        produced: Callable[[], None],
        engine_works: Callable[[], bool],
    ) -> None:
        """Begin with the first two.

        Args:
            jobs: all of them.
            last_arrives_first: whether the inputs of the last job arrive first; else those of the first.
            patience: asked once, in the beginning, whether the foremost is waited for in any case; None: it is not.
            produced: blocks until the device has produced all inputs, which may still be on their way then.
            engine_works: whether jobs still get finished.
        """
        self._left = list(jobs)
        self._otherwise = -1 if last_arrives_first else 0
        self._patience = patience
        self._patient = False
        self._produced: Callable[[], None] | None = produced
        self._engine_works = engine_works
        self._last: Job | None = None
        self._before_last: Job | None = None

    def __iter__(self) -> Iterator[Job]:
        return self

    def __next__(self) -> Job:
        if not self._left:
            raise StopIteration
        produced, self._produced = self._produced, None
        if produced is not None:
            self._begin(produced)
        if self._patient:
            return self._left.pop(0)
        if self._before_last is not None:
            self._before_last.join(self._engine_works)
        there = (place for place, job in enumerate(self._left) if inputs_are_there(job))
        job = self._left.pop(next(there, self._otherwise))
        self._before_last, self._last = self._last, job
        return job

    def _begin(self, produced: Callable[[], None]) -> None:
        try:
            produced()  # the training thread is ahead of the device by up to a step
            for transfer in _shared_by(self._left):  # such as the step's clipping factor, behind all gradients
                transfer.wait()
            self._patient = self._patience is not None and self._patience(self._left)
        except Exception:  # noqa: BLE001 - whoever starts the first job waits for its inputs, and is told then
            self._patient = True


def _shared_by(jobs: Sequence[Job]) -> list[Transfer]:
    """The inputs without which none of several jobs can begin."""
    first, *others = jobs
    return [one for one in first.inputs if all(one in job.inputs for job in others)]


def inputs_are_there(job: Job) -> bool:
    """Whether a job could begin."""
    try:
        return all(transfer.done() for transfer in job.inputs)
    except Exception:  # noqa: BLE001 - whoever starts the job waits for them, and is told then
        return True
