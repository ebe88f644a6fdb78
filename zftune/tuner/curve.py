"""How a training goes, kept small: step time, loss and coverage from its first step on in a few hundred points."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from zftune.store.types import Curve, CurvePoint, KnobChange

MOST_POINTS = 256
_MOST_CHANGES = 256


class _Bucket:
    """Consecutive steps: the last, how many were seen, and each figure's sum with the number of steps that it is of."""

    def __init__(self) -> None:
        self.last = self.steps = 0
        self.sums, self.known = Counter[str](), Counter[str]()

    def add(self, count: int = 1, **figures: float | None) -> None:
        for name, value in figures.items():
            if value is not None:
                self.sums[name] += value * count  # type: ignore[assignment]
                self.known[name] += count

    def join(self, other: _Bucket) -> None:
        self.last, self.steps = max(self.last, other.last), self.steps + other.steps
        self.sums.update(other.sums)
        self.known.update(other.known)


class CurveBuilder:
    """Takes steps and losses as they come. Any thread may call its methods.

    Each point covers equally many steps: one at first, twice as many whenever there would be too many points.
    """

    def __init__(self) -> None:
        self.version = 0
        """Changes with whatever is taken."""
        self._lock = threading.Lock()
        self._stride = 1
        self._buckets: dict[int, _Bucket] = {}
        self._changes: deque[KnobChange] = deque(maxlen=_MOST_CHANGES)
        self._first: int | None = None
        self._last = 0

    @property
    def last_step(self) -> int | None:
        """The newest that was heard of here, by the optimizer's own number; None: none was."""
        return None if self._first is None else self._last

    def step(self, step: int, step_ms: float | None, coverage: float | None) -> None:
        """Take a step. Where it is not later than the last one, an earlier state was loaded, and what came after that
        is forgotten.
        """
        with self._lock:
            if step <= self._last:
                self._forget(step)
            self._first = step if self._first is None else min(self._first, step)
            self._last = step
            bucket = self._bucket(step)
            bucket.steps += 1
            bucket.add(step_ms=step_ms, coverage=coverage)

    def loss(self, step: int, loss: float) -> None:
        with self._lock:
            if self._first is None and step <= self._last:  # a run that is gone on with; its step is heard of later
                self._forget(step)
                self._last = step - 1
            self._bucket(step).add(loss=loss)

    def change(self, step: int, knobs: Mapping[str, Any]) -> None:
        """Take knobs that hold from a step on. What was known of it and of later steps is forgotten: it comes again."""
        with self._lock:
            self.version += 1
            self._change(KnobChange(step, dict(knobs)))

    def join(self, curve: Curve) -> None:
        """Take in what was kept of earlier steps, but for what a state that was loaded since has taken back."""
        with self._lock:
            first = self._first
            for point in curve.points:
                if first is not None and point.step >= first:
                    break
                self._last = max(self._last, point.step)
                bucket = self._bucket(point.step)
                bucket.steps += point.steps
                bucket.add(max(1, point.steps), step_ms=point.step_ms, loss=point.loss, coverage=point.coverage)
            since, self._changes = tuple(self._changes), deque(maxlen=_MOST_CHANGES)
            for change in (*(one for one in curve.changes if first is None or one.step < first), *since):
                self._change(change)

    def curve(self) -> Curve:
        with self._lock:
            points = (
                CurvePoint(one.last, one.steps, **{name: total / one.known[name] for name, total in one.sums.items()})
                for _, one in sorted(self._buckets.items())
            )
            return Curve(tuple(points), tuple(self._changes))

    def _bucket(self, step: int) -> _Bucket:
        self.version += 1
        while step // self._stride not in self._buckets and len(self._buckets) >= MOST_POINTS:
            self._stride *= 2
            thinned: dict[int, _Bucket] = {}
            for at, bucket in self._buckets.items():
                thinned.setdefault(at // 2, _Bucket()).join(bucket)
            self._buckets = thinned
        found = self._buckets.setdefault(step // self._stride, _Bucket())
        found.last = max(found.last, step)
        return found

    def _change(self, change: KnobChange) -> None:
        while self._changes and self._changes[-1].step >= change.step:
            self._changes.pop()
        if not self._changes or self._changes[-1].knobs != change.knobs:
            self._changes.append(change)

    def _forget(self, step: int) -> None:
        self._buckets = {at: bucket for at, bucket in self._buckets.items() if bucket.last < step}
        self._changes = deque((one for one in self._changes if one.step < step), maxlen=_MOST_CHANGES)
