"""The loss of each step of a training that nobody changed: what backward begins from, or what the script logs itself.

On a device the value is copied to pinned memory behind the work that makes it, and read once the step's marks have been
passed: nothing is launched, and nobody waits.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

import torch

Source = Literal["backward", "log_loss"]
Listener = Callable[[torch.Tensor | float], None]

listeners: list[Listener] = []
"""Called by `zftune.log_loss` with what it was given."""
_MOST_PASSES = 64
_BLOCK = 64
"""Values in a block of pinned memory."""


@dataclass(slots=True)
class _Step:
    passes: int = 0
    divisors: set[float] = field(default_factory=set)
    seen: dict[Source, list[float | torch.Tensor]] = field(default_factory=lambda: {"backward": [], "log_loss": []})


class StepLosses:
    """Takes losses as the training has them, and gives the mean of a step's once its work is done.

    Args:
        on_stream: whether what is queued now is queued on the compute stream, whose marks say when it is done.
    """

    def __init__(self, on_stream: Callable[[], bool]) -> None:
        self.source: Source | None = None
        """Of the last loss that was given; None: there was none."""
        self._on_stream = on_stream
        self._open = _Step()
        self._closed: dict[int, _Step] = {}
        self._free: defaultdict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        self._scaled: tuple[weakref.ref[torch.Tensor], torch.Tensor, float] | None = None

    def scaled(self, result: object, loss: object) -> None:
        """Remember what a GradScaler has multiplied: its product is no loss."""
        if isinstance(result, torch.Tensor) and isinstance(loss, torch.Tensor):
            self._scaled = weakref.ref(result), loss.detach(), _divisor(loss)

    def add(self, loss: object, source: Source) -> None:
        """Take a loss of the step that is under way; what is no scalar is left out."""
        if isinstance(loss, list | tuple) and len(loss) == 1:
            loss = loss[0]
        divisor = _divisor(loss)
        if self._scaled is not None and self._scaled[0]() is loss:
            (_, loss, divisor), self._scaled = self._scaled, None
        if source == "backward":
            self._open.passes += 1
            self._open.divisors.add(divisor)
        values = self._open.seen[source]
        if len(values) >= _MOST_PASSES:
            return
        if isinstance(loss, torch.Tensor):
            # A DTensor may be one rank's part of the loss.
            if loss.numel() == 1 and not hasattr(loss, "to_local") and not loss.is_complex():
                self._add_tensor(loss.detach(), values)
        elif isinstance(loss, int | float):
            values.append(float(loss))

    def end_step(self, index: int) -> None:
        if any(self._open.seen.values()):
            self._closed[index] = self._open
        self._open = _Step()

    def take(self, index: int, *, summed: bool = False) -> float | None:
        """The mean of a step's losses, those that were logged before those of backward; once its marks were passed.

        Where each was divided by their number, as for gradient accumulation, it is the mean of what was divided.

        Args:
            summed: whether what backward began from is a part of the loss in any case.
        """
        step = self._closed.pop(index, None)
        if step is None:
            return None
        self.source = "log_loss" if step.seen["log_loss"] else "backward"
        found = fmean([self._read(value) for value in step.seen[self.source]])
        for value in step.seen["backward" if self.source == "log_loss" else "log_loss"]:
            self._read(value)
        if self.source == "backward" and (summed or step.divisors == {step.passes}):
            found *= step.passes
        return found if math.isfinite(found) else math.nan

    def forget(self) -> None:
        self._open = _Step()

    def _add_tensor(self, loss: torch.Tensor, values: list[float | torch.Tensor]) -> None:
        if loss.device.type == "cpu":
            values.append(float(loss))
        elif self._on_stream():  # another stream's work may not be done when the marks are passed
            slots = self._free[loss.dtype]
            if not slots:
                slots += torch.empty((_BLOCK,), dtype=loss.dtype, pin_memory=True).unbind()
            slot = slots.pop()
            slot.copy_(loss.reshape(()), non_blocking=True)
            values.append(slot)

    def _read(self, value: float | torch.Tensor) -> float:
        if not isinstance(value, torch.Tensor):
            return value
        self._free[value.dtype].append(value)
        return float(value)


def _divisor(loss: object) -> float:
    """The number that a loss was divided by last, as its graph has it; 1: none. Reads nothing of a device."""
    made_by = loss.grad_fn if isinstance(loss, torch.Tensor) else None
    kind = type(made_by).__name__
    number = getattr(made_by, "_saved_other", None) if kind in ("DivBackward0", "MulBackward0") else None
    if not isinstance(number, torch.Tensor) or number.dim() or number.device.type != "cpu" or not number:
        return 1.0
    return float(number) if kind == "DivBackward0" else round(1 / float(number), 6)
