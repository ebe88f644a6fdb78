"""What makes a measurement void or a search give up: a disturbed GPU, and a loss that goes wrong."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable

import torch

from zenflow import Device
from zenflow.device import Transfer
from zftune.emulation import EmulatedAccelerator
from zftune.emulation.lateness import LateDisturbance
from zftune.errors import BadInputError
from zftune.telemetry import NvmlSampler
from zftune.telemetry.disturbance import GpuDisturbance

Watch = GpuDisturbance | LateDisturbance


def disturbance_of(device: Device, *, sampled: bool = True) -> Watch | None:
    """The watch over measurements on a device; `sampled=False` where the daemon samples its GPU."""
    if isinstance(device, EmulatedAccelerator):
        return LateDisturbance(device)
    uuid = gpu_uuid(device.torch_device) if sampled else None
    if uuid is None:
        return None
    sampler = NvmlSampler()
    sampler.start()
    return GpuDisturbance(sampler, uuid)


def gpu_uuid(device: torch.device) -> str | None:
    """Of a GPU; None for other devices, and where torch does not tell it."""
    if device.type == "cpu":
        return None
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return None if uuid is None else str(uuid)


_TREND = 32
_RECENT = 4
_FACTOR = 1.5
_WIDTHS = 6.0
_FLOOR = 0.02
"""Absolute: a loss that has converged to nearly nothing may rise by so much."""
_MOST_EARLY = 512


class LossGuard:
    """Looks at the loss of each step, in order."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_TREND + _RECENT)

    def forget(self) -> None:
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
        slope, intercept = statistics.linear_regression(range(_TREND), before)
        expected = intercept + slope * _TREND
        middle = statistics.median(before)
        width = 1.4826 * statistics.median(abs(one - middle) for one in before)
        least = max(_FACTOR * expected, expected + _FLOOR, middle + _WIDTHS * width)
        if expected <= 0 or recent <= least:
            return None
        return f"the loss of the last {_RECENT} steps is at least {recent:.3g}, the trend before was {expected:.3g}"


def went_wrong(step: int, reason: str) -> str:
    """What the guard reports: training goes on, with the settings at the start."""
    return (
        f"Training goes on with the settings at the start, and is tuned no more: at step {step} {reason}. The last "
        f"good checkpoint is the newest from before step {max(1, step - _RECENT + 1)}."
    )


class Losses:
    """Takes losses and gives them to a guard once they have arrived."""

    def __init__(self, device: Device, guard: LossGuard) -> None:
        self._device, self._guard = device, guard
        self._waiting: deque[tuple[int, torch.Tensor | float, Transfer | None]] = deque()
        self._early: list[tuple[int, float]] = []
        self._hear: Callable[[int, float], None] | None = None

    def listen(self, hear: Callable[[int, float], None]) -> None:
        """Call `hear` with each step and its loss, those that have arrived before, too."""
        self._hear = hear
        for step, loss in self._early:
            hear(step, loss)
        self._early = []

    def add(self, step: int, loss: torch.Tensor | float) -> None:
        """Take a loss, a scalar on any device or a number; does not wait for the device. Raises BadInputError: it is
        more than one number.
        """
        arrived: torch.Tensor | float
        transfer = None
        if not isinstance(loss, torch.Tensor):
            arrived = float(loss)
        elif loss.numel() != 1:
            raise BadInputError(f"loss has the shape {tuple(loss.shape)}; it must be a scalar")
        elif loss.device.type == "cpu":
            arrived = float(loss.item())  # it is there already
        elif loss.device != self._device.torch_device:
            arrived = loss.detach().reshape(1).clone()
        else:
            arrived = self._device.host_empty((1,), loss.dtype)
            transfer = self._device.d2h(loss.detach().reshape(1), arrived)
        self._waiting.append((step, arrived, transfer))

    def forget(self) -> None:
        self._waiting.clear()
        self._guard.forget()

    def judge(self) -> str | None:
        """Look at the losses that have arrived; a sentence where training goes wrong, else None."""
        while self._waiting and (self._waiting[0][2] is None or self._waiting[0][2].done()):
            step, arrived, _ = self._waiting.popleft()
            loss = float(arrived)
            if self._hear is not None:
                self._hear(step, loss)
            elif len(self._early) < _MOST_EARLY:
                self._early.append((step, loss))
            reason = self._guard.add(loss)
            if reason is not None:
                return went_wrong(step, reason)
        return None
