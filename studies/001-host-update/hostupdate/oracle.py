"""What must come out: zenflow's eager AdamW on a sample of the elements, and random inputs to start from."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hostupdate.contenders import HYPERPARAMETERS, Contender, Inputs
from hostupdate.machine import tensor
from zenflow.rules import RULES

EPS32 = 2.0**-23
ALLOWED_ULP = 4.0
"""An update, of the larger of the weight and 8 lr, which bounds an update's size after the first few."""

_UPDATES_BEFORE = 10
_GRADIENT, _WEIGHT = 1e-3, 0.02  # root mean squares
_PIECE = 1 << 14
_RULE = RULES["adamw"]


@dataclass(frozen=True, slots=True)
class Agreement:
    """How near a contender is to the oracle."""

    first_ulp: float
    """Largest difference of a master after the first update, in fp32 ulp of the larger of weight and 8 lr."""
    last_ulp: float
    """The same after all updates of the check."""
    updates: int
    results_off: int
    """Results that are not the contender's own master rounded to nearest even."""
    sampled: int

    @property
    def agrees(self) -> bool:
        """Whether all is within what rounding explains."""
        allowed = self.first_ulp <= ALLOWED_ULP and self.last_ulp <= ALLOWED_ULP * self.updates
        return allowed and self.results_off == 0


def random_inputs(elements: int, most: int, seed: int) -> Inputs:
    """State as after some training, and a log of `most` gradients, each [elements]."""
    random = torch.Generator().manual_seed(seed)

    def normal(scale: float, dtype: torch.dtype) -> torch.Tensor:
        stream = tensor(elements, dtype)
        for piece in stream.split(1 << 20):
            piece.copy_(torch.randn(piece.numel(), generator=random).mul_(scale))
        return stream

    exp_avg_sq = normal(_GRADIENT, torch.float32).square_().add_(_GRADIENT**2)
    moments = (normal(_GRADIENT / 3, torch.float32), exp_avg_sq)
    log = [normal(_GRADIENT, torch.bfloat16) for _ in range(most)]
    return Inputs(normal(_WEIGHT, torch.float32), moments, _UPDATES_BEFORE, log)


def check(contender: Contender, inputs: Inputs, intervals: Sequence[int]) -> Agreement:
    """Let a contender that was just prepared apply every kind of window in turn; compare after each.

    Args:
        contender: prepared with `inputs`, nothing applied yet.
        inputs: what it started from.
        intervals: each is applied with the mean, then replayed.
    """
    n = inputs.master.numel()
    pieces = sorted({0, (n - _PIECE) // 2, n - _PIECE} if n > 3 * _PIECE else {0})
    sample = torch.cat([torch.arange(first, min(first + _PIECE, n)) for first in pieces])
    oracle = _Oracle(inputs, sample)
    first = last = 0.0
    off = 0
    for interval in intervals:
        for replay in (False, True):
            contender.apply(interval, replay=replay)
            oracle.apply(interval, replay=replay)
            outcome = contender.outcome()
            master = outcome.master[sample]
            last = max(last, oracle.difference_ulp(master))
            first = first or last
            off += int((outcome.result[sample] != master.bfloat16()).sum())
    return Agreement(first, last, oracle.updates, off, sample.numel())


class _Oracle:
    """Eager AdamW on some elements, as one column."""

    def __init__(self, inputs: Inputs, sample: torch.Tensor) -> None:
        self.updates = 0
        self._master = inputs.master[sample].unsqueeze(0)
        self._moments = tuple(moment[sample].unsqueeze(0) for moment in inputs.moments)
        self._count = torch.full((1,), inputs.updates, dtype=torch.int32)
        self._log = [logged[sample].float().unsqueeze(0) for logged in inputs.log]
        self._largest = self._master.abs()

    def apply(self, interval: int, *, replay: bool) -> None:
        hyper, log = _RULE.hyper(HYPERPARAMETERS), self._log[:interval]
        gradients = log if replay else [functools.reduce(torch.add, log).div(interval)]
        for gradient in gradients:
            _RULE.update(self._master, self._moments, self._count, gradient, hyper, hyper.decay)
            self._largest = torch.maximum(self._largest, self._master.abs())
            self.updates += 1

    def difference_ulp(self, master: torch.Tensor) -> float:
        """Largest difference; infinite if there is a NaN."""
        unit = EPS32 * torch.clamp(self._largest, min=8 * HYPERPARAMETERS["lr"]).squeeze(0).double()
        worst = float(((master.double() - self._master.squeeze(0).double()).abs() / unit).max())
        return float("inf") if math.isnan(worst) else worst
