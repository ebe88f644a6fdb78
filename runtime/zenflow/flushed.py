"""The weights as a flush would leave them, for files that are used without their optimizer."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from zenflow.deferred import Bucket, DeferredTier
from zenflow.weight import WeightState

if TYPE_CHECKING:
    from zenflow.training import Training


@contextmanager
def flushed(training: Training) -> Iterator[int]:
    """Let the weights hold what a flush would make of them; afterwards they are what they were, as is all else.

    Args:
        training: the run.

    Yields:
        How many steps of deferred gradients were pending.

    Raises:
        HostEngineError: host work failed.
    """
    training.settle()
    if not training.begun or not training.open or training.shows_flushed:
        yield 0
        return
    training.model.stop_watch()
    training.shows_flushed = True
    changed: list[tuple[WeightState, Bucket]] = []
    try:
        for weight in training.model.weights:
            if not weight.restored:  # else it was loaded, perhaps like that, and not used yet
                weight.shown = {}
                for place, bucket in _pending(weight, weight.in_flight):
                    changed.append((weight, bucket))
                    if bucket.index in weight.in_flight:
                        weight.shown[place] = _tier(weight).on_host(weight.matrix(), bucket.columns)
                    _show(weight, bucket, _preview(training, weight, bucket))
        yield training.pending_steps
    finally:
        for weight, bucket in changed:
            assert weight.shown is not None
            place = bucket.index - weight.plan.first_bucket
            _show(weight, bucket, weight.shown.get(place, _tier(weight).rounded(bucket)))
        for weight in training.model.weights:
            if not weight.restored:
                weight.shown = None
        training.shows_flushed = False
        training.leave_weights()


class Unflush:
    """Gives a restored weight that holds what a file of flushed weights held the values of training.

    The model may be loaded before or after its optimizer, so each use of the weight until the next step asks again;
    that costs something only where somebody has written to it.

    Args:
        training: that was restored.
        weight: one of its weights.
    """

    def __init__(self, training: Training, weight: WeightState) -> None:
        self._training = training
        self._weight = weight
        self._seen: tuple[int, int] | None = None

    def __call__(self) -> bool:
        """Look at the weight; false, since it may be loaded again."""
        with torch.inference_mode(False), torch.no_grad():
            if self._state() != self._seen:
                self._compare()
                self._seen = self._state()
        return False

    def _state(self) -> tuple[int, int]:
        parameter = self._weight.parameter
        return parameter._version, parameter.untyped_storage()._cdata

    def _compare(self) -> None:
        weight, found, alike, elements = self._weight, [], 0, 0
        for place, bucket in _pending(weight, weight.in_flight):
            tier = _tier(weight)
            held = tier.on_host(weight.matrix(), bucket.columns)
            seen = (weight.shown or {}).get(place, tier.rounded(bucket))
            from_file = held == _preview(self._training, weight, bucket)
            found.append((bucket, torch.where(from_file, seen, held)))
            alike += int(from_file.sum())
            elements += held.numel()
        if 2 * alike > elements:  # in 16 bits, what a model holds before it is loaded is alike by chance here and there
            for bucket, rows in found:
                _show(weight, bucket, rows)


def _pending(weight: WeightState, in_flight: Container[int]) -> list[tuple[int, Bucket]]:
    """Buckets that have something pending, with their numbers in the weight."""
    buckets = [] if weight.deferred is None else weight.deferred.buckets
    return [(place, one) for place, one in enumerate(buckets) if one.log or one.index in in_flight]


def _tier(weight: WeightState) -> DeferredTier:
    assert weight.deferred is not None
    return weight.deferred


def _preview(training: Training, weight: WeightState, bucket: Bucket) -> torch.Tensor:
    return _tier(weight).preview(bucket, training.hypers[weight.group])


def _show(weight: WeightState, bucket: Bucket, rows: torch.Tensor) -> None:
    weight.scatter(bucket.columns, rows.to(weight.parameter.device))
