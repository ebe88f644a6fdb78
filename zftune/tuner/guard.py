"""The loss guard: whether training goes wrong while its knobs change."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import mul

import torch

from zenflow import Device
from zenflow.device import Transfer
from zftune.errors import BadInputError

_TREND = 32
_RECENT = 4
_FACTOR = 1.5
_WIDTHS = 6.0
_MIDDLE = (_TREND - 1) / 2
_AHEAD = tuple(
    1 / _TREND + (step - _MIDDLE) * (_TREND - _MIDDLE) / sum((other - _MIDDLE) ** 2 for other in range(_TREND))
    for step in range(_TREND)
)
"""Weights of the losses before in what a line through them says of the next."""


@dataclass(slots=True)
class LossGuard:
    """Looks at the loss of each step, in order."""

    _losses: deque[float] = field(default_factory=lambda: deque(maxlen=_TREND + _RECENT))

    def forget(self) -> None:
        """What comes is of another course."""
        self._losses.clear()

    def add(self, loss: float) -> str | None:
        """Take a step's loss; a reason where training goes wrong, else None.

        A spike is one where the last steps all lie far above the trend before them: one odd batch is none.
        """
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        self._losses.append(loss)
        if len(self._losses) < _TREND + _RECENT:
            return None
        losses = list(self._losses)
        before, recent = losses[:_TREND], min(losses[_TREND:])
        expected = sum(map(mul, _AHEAD, before))
        if expected <= 0 or recent <= _FACTOR * expected:
            return None
        middle = statistics.median(before)
        width = 1.4826 * statistics.median(abs(one - middle) for one in before)
        if recent <= middle + _WIDTHS * width:
            return None
        return f"the loss of the last {_RECENT} steps is at least {recent:.3g}, the trend before was {expected:.3g}"


class Losses:
    """Takes losses as training has them, and lets a guard look at them once they have arrived.

    Args:
        device: that they are on.
        guard: looks at them.
        heard: told of each one that has arrived, with its step.
    """

    def __init__(self, device: Device, guard: LossGuard, heard: Callable[[int, float], None] | None = None) -> None:
        self._device, self._guard, self._heard = device, guard, heard
        self._waiting: deque[tuple[int, torch.Tensor | float, Transfer | None]] = deque()

    def add(self, step: int, loss: torch.Tensor | float) -> None:
        """Take a loss; does not wait for the device.

        Args:
            step: the last that was taken.
            loss: a scalar on any device, or a number.

        Raises:
            BadInputError: it is more than one number.
        """
        if not isinstance(loss, torch.Tensor):
            self._waiting.append((step, float(loss), None))
            return
        if loss.numel() != 1:
            raise BadInputError(f"loss has the shape {tuple(loss.shape)}, allowed is a scalar")
        if loss.device.type == "cpu":
            self._waiting.append((step, float(loss.item()), None))  # it is there already
            return
        value = loss.detach().reshape(1).to(torch.float32)
        if value.device != self._device.torch_device:
            self._waiting.append((step, value.clone(), None))
            return
        target = self._device.host_empty((1,), torch.float32)
        self._waiting.append((step, target, self._device.d2h(value, target)))

    def forget(self) -> None:
        """What was given so far is of another course than what comes."""
        self._waiting.clear()
        self._guard.forget()

    def judge(self) -> str | None:
        """Look at the losses that are there; a sentence where training goes wrong, else None."""
        while self._waiting and (self._waiting[0][2] is None or self._waiting[0][2].done()):
            step, arrived, _ = self._waiting.popleft()
            loss = float(arrived)
            if self._heard is not None:
                self._heard(step, loss)
            reason = self._guard.add(loss)
            if reason is not None:
                return (
                    f"Stopped at step {step}: {reason}; the starting point's knobs are back, and the last good "
                    f"checkpoint is the newest from before step {max(1, step - _RECENT + 1)}."
                )
        return None
