"""What is left of a pure-Python loop on one core while native code works on another."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from studykit import spread

Work = Callable[[], None]
"""One piece of work; blocks until it is done, without the interpreter's lock while it computes."""

_SETTLE_S = 0.2


def count_up(n: int) -> float:
    """Iterations a second of a loop that does nothing else."""
    begin = time.perf_counter()
    i = 0
    while i < n:
        i += 1
    return n / (time.perf_counter() - begin)


class Busy:
    """A thread, kept to one core, that does a piece of work over and over."""

    def __init__(self, work: Work, core: int) -> None:
        self._work = work
        self._core = core
        self._ends_s: list[float] = []
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Busy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def pieces_per_s(self, begin_s: float, end_s: float) -> float:
        """Rate of the pieces that ended in a span of `time.perf_counter()`, from the first of them to the last.

        0.0 if fewer than two did.
        """
        ends = [at for at in self._ends_s if begin_s <= at <= end_s]
        return (len(ends) - 1) / (ends[-1] - ends[0]) if len(ends) > 1 else 0.0

    def _run(self) -> None:
        try:
            os.sched_setaffinity(0, {self._core})  # of this thread alone
            while not self._stop.is_set():
                self._work()
                self._ends_s.append(time.perf_counter())
        except BaseException as error:  # noqa: BLE001 - raised again where the thread is joined
            self._error = error


def loop_beside(work: Work, cores: tuple[int, int], *, rounds: int, loop_s: float) -> dict[str, Any]:
    """Rate of the loop beside busy native code over its rate with that core idle, before and after in each round.

    Args:
        work: what the other core does.
        cores: of the loop, and of the work.
        rounds: how often.
        loop_s: how long a loop takes while the other core is idle.

    Returns:
        "kept": the loop's share of its rate (a spread over rounds); "work_kept": the same for the work, against its
        rate while the main thread sleeps, None if too few pieces were done; "iterations_per_s": the undisturbed loop's.
    """
    kept: list[float] = []
    work_kept: list[float] = []
    rates: list[float] = []
    with _on_core(cores[0]):
        n = max(1, int(loop_s * count_up(1_000_000)))
        work()
        for _ in range(rounds):
            before = count_up(n)
            with Busy(work, cores[1]) as busy:
                time.sleep(_SETTLE_S)
                work_alone = _rate(busy, lambda: time.sleep(loop_s))
                begin = time.perf_counter()
                beside = count_up(n)
                work_beside = busy.pieces_per_s(begin, time.perf_counter())
            alone = (before + count_up(n)) / 2  # around it, so that a drift of the machine cancels
            rates.append(alone)
            kept.append(beside / alone)
            if work_alone and work_beside:
                work_kept.append(work_beside / work_alone)
    known = spread(work_kept) if work_kept else None
    return {"kept": spread(kept), "work_kept": known, "iterations_per_s": spread(rates)}


def _rate(busy: Busy, during: Callable[[], None]) -> float:
    begin = time.perf_counter()
    during()
    return busy.pieces_per_s(begin, time.perf_counter())


@contextmanager
def _on_core(core: int) -> Iterator[None]:
    """Keep the calling thread, and no other, to one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
