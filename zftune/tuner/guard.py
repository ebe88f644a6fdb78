"""What makes a measurement void or a search give up: a disturbed GPU, and a loss that goes wrong."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from operator import mul
from typing import Any

import torch

from zenflow import Device
from zenflow.device import Transfer
from zftune.emulation import EmulatedAccelerator
from zftune.emulation.machines import MAX_LATE_SHARE
from zftune.errors import BadInputError
from zftune.telemetry import NvmlSampler

_SLOWDOWNS = {
    "hw_slowdown": "the GPU was slowed down by its hardware",
    "sw_thermal_slowdown": "the GPU was slowed down because it was hot",
    "hw_thermal_slowdown": "the GPU was slowed down because it was hot",
    "hw_power_brake_slowdown": "the GPU was slowed down by its power supply",
}
_MOST_LATE = 0.005  # of the time: by so much an emulated accelerator's times may be off


class NoDisturbance:
    """Watches over measurements, and the watch that sees nothing."""

    def __call__(self) -> str | None:
        """Why what was since it was asked last does not count, or None."""
        return None

    def close(self) -> None:
        """End the watch."""


def disturbance_of(device: Device, *, sampled: bool = True) -> NoDisturbance:
    """The watch over measurements on a device; `sampled=False` where the daemon samples its GPU."""
    if isinstance(device, EmulatedAccelerator):
        return LateDisturbance(device)
    if not sampled:
        return NoDisturbance()
    uuid = gpu_uuid(device.torch_device)
    if uuid is None:
        return NoDisturbance()
    sampler = NvmlSampler()
    sampler.start()
    return GpuDisturbance(sampler, uuid)


class GpuDisturbance(NoDisturbance):
    """What NVML saw of one GPU.

    Args:
        sampler: started; ends with this.
        uuid: of the GPU; None: of all that are sampled.
    """

    def __init__(
        self, sampler: NvmlSampler, uuid: str | None, *, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._sampler, self._clock_ns, self._begin_ns = sampler, clock_ns, clock_ns()
        self._uuids = None if uuid is None else [uuid]
        self._others: int | None = None
        self._links: dict[str, int] = {}

    def __call__(self) -> str | None:
        begin_ns, self._begin_ns = self._begin_ns, self._clock_ns()
        figures, _ = self._sampler.summary(begin_ns, self._begin_ns, self._uuids)
        if figures is None:
            return None
        slowed = next((_SLOWDOWNS[name] for name in figures["throttle_reasons"] or () if name in _SLOWDOWNS), None)
        shared, shifted = self._shared(figures["other_processes"]), self._shifted(figures)
        return slowed or shared or shifted

    def close(self) -> None:
        self._sampler.stop()

    def _shared(self, others: int | None) -> str | None:
        if others is None:
            return None
        self._others = others if self._others is None else min(self._others, others)
        more = others - self._others
        return None if more == 0 else f"the GPU was shared with {more} more process{'' if more == 1 else 'es'}"

    def _shifted(self, figures: Mapping[str, Any]) -> str | None:
        for name, word in (("pcie_gen", "generation"), ("pcie_width", "width")):
            now = figures[name]
            if now is None:
                continue
            best = self._links[name] = max(now, self._links.get(name, now))
            if now < best:
                return f"the PCIe link was shifted down to {word} {now} from {best}"
        return None


class LateDisturbance(NoDisturbance):
    """Whether this machine was too slow for the emulated accelerator."""

    def __init__(self, device: EmulatedAccelerator) -> None:
        self._device = device
        self._begin = device.mark()
        self._before = self._now()

    def __call__(self) -> str | None:
        device, before = self._device, self._before
        now, mark = self._now(), device.mark()
        passed_s = device.elapsed_s(self._begin, mark)
        late_s = -sum(min(0.0, margin) for margin in device.slack.margins_s[before[0] :])
        host_s, late_host_s = now[1] - before[1], now[2] - before[2]
        self._begin, self._before = mark, now
        if late_s > _MOST_LATE * passed_s:
            return f"this machine was late on the emulated accelerator by {late_s / passed_s:.1%} of the time"
        if host_s and late_host_s > MAX_LATE_SHARE * host_s:
            return f"this host was {late_host_s / host_s:.1%} slower than the emulated one"
        return None

    def _now(self) -> tuple[int, float, float]:
        slack = self._device.slack
        return len(slack.margins_s), slack.host_s, slack.late_host_s


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
_MIDDLE = (_TREND - 1) / 2
_AHEAD = tuple(
    1 / _TREND + (step - _MIDDLE) * (_TREND - _MIDDLE) / sum((other - _MIDDLE) ** 2 for other in range(_TREND))
    for step in range(_TREND)
)
"""Weights of the losses before in what a line through them predicts of the next."""
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
        expected = sum(map(mul, _AHEAD, before))
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
        if not isinstance(loss, torch.Tensor):
            self._waiting.append((step, float(loss), None))
            return
        if loss.numel() != 1:
            raise BadInputError(f"loss has the shape {tuple(loss.shape)}; it must be a scalar")
        if loss.device.type == "cpu":
            self._waiting.append((step, float(loss.item()), None))  # it is there already
            return
        value = loss.detach().reshape(1)
        if value.device != self._device.torch_device:
            self._waiting.append((step, value.clone(), None))
            return
        target = self._device.host_empty((1,), value.dtype)
        self._waiting.append((step, target, self._device.d2h(value, target)))

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
