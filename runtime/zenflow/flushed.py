"""The weights as a flush would leave them, for files that are used without their optimizer."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from zenflow.deferred import Bucket, DeferredTier
from zenflow.weight import OutsideWrite, WeightState

if TYPE_CHECKING:
    from zenflow.training import Training

Shown = Mapping[int, torch.Tensor]
"""By the number (counted in its weight) of each bucket in flight: its weights as training sees them."""


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
    training.model.end_watch()
    training.shows_flushed = True
    changed: list[tuple[WeightState, Bucket]] = []
    weights = [weight for weight in training.model.weights if weight.shown is None]  # others were loaded like that
    try:
        for weight in weights:
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
        for weight in weights:
            weight.shown = None
        training.shows_flushed = False
        training.leave_weights()


def adopt(training: Training, weight: WeightState) -> None:
    """Compare a restored weight with its state, before it is used, and notice writes from now on.

    The model may have been loaded before or after its optimizer. Elements that are what a file of flushed weights held
    become what training saw; others that are not what they should be were written by somebody.

    Args:
        training: that was restored.
        weight: one of its weights.
    """
    with torch.inference_mode(False), torch.no_grad():
        before = None
        if weight.shown is not None:
            before = weight.parameter.detach().clone()
            _unflush(training, weight, weight.shown, before)
            weight.shown = None
        weight.take_outside_write()
        if before is not None and weight.in_flight:
            training.model.windows.take_outside_write(weight, OutsideWrite(before))
        weight.watch()


def _unflush(training: Training, weight: WeightState, shown: Shown, before: torch.Tensor) -> None:
    """Give a weight that holds flushed values those of training; `before` gets them whatever the weight holds."""
    for place, bucket in _pending(weight, {place + weight.plan.first_bucket for place in shown}):
        tier = _tier(weight)
        held = tier.on_host(weight.matrix(), bucket.columns)
        seen = shown.get(place, tier.rounded(bucket))
        _show(weight, bucket, torch.where(held == _preview(training, weight, bucket), seen, held))
        training.runtime.kernels.scatter(weight.plan.view(before), bucket.columns, seen.to(before.device))


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
