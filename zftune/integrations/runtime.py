"""This package's own runtime, the zenflow optimizers: their device, knobs and statistics."""

from __future__ import annotations

import dataclasses
import sys
import weakref
from typing import TYPE_CHECKING, Any

from zftune.integrations.deepspeed import watching

if TYPE_CHECKING:
    from zenflow.device import Device
    from zenflow.optimizer import ZenFlowOptimizer
    from zenflow.stats import StepStats
    from zftune.agent.recorder import StepRow

_OWN_CAUSES = ("comm", "data")  # the runtime does not see these waits


def optimizer_of(of: Any) -> ZenFlowOptimizer | None:
    """The zenflow optimizer that makes the steps, if it is one."""
    module = sys.modules.get("zenflow.optimizer")
    optimizer = watching.optimizer_of(of)
    return optimizer if module is not None and isinstance(optimizer, module.ZenFlowOptimizer) else None


def device_of(of: Any) -> Device | None:
    """The accelerator that a zenflow optimizer works with."""
    optimizer = optimizer_of(of)
    return None if optimizer is None else optimizer.device


def knobs(of: Any) -> dict[str, Any] | None:
    """The knobs in force."""
    optimizer = optimizer_of(of)
    return None if optimizer is None else dataclasses.asdict(optimizer.config)


def describe(of: Any) -> list[str]:
    """The runtime and its rig."""
    optimizer = optimizer_of(of)
    if optimizer is None:
        return []
    rig = getattr(optimizer.device, "rig", None)
    return ["zenflow runtime", *([] if rig is None else [f"emulated accelerator '{rig.name}'"])]


class Rows:
    """Adds a zenflow optimizer's statistics to the rows of its steps.

    Args:
        optimizer: which has just ended a step.
        index: of the row that comes next.
    """

    def __init__(self, optimizer: ZenFlowOptimizer, index: int) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._offset = optimizer.steps + 1 - index
        self._recording = False

    def __call__(self, row: StepRow, *, last: bool) -> None:
        """Fill `runtime`, and what the statistics say better: the stall by cause.

        Args:
            row: resolved, so that its statistics are there too.
            last: whether it is the last one that is measured.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            return
        number = row.index + self._offset
        stats = next(iter(optimizer.history(after=number - 1)), None)
        if stats is None or stats.step != number:
            return
        row.runtime = _fields(stats)
        if row.measured and not self._recording:
            self._recording = True
            optimizer.record_timeline()
        if last:
            row.runtime |= {"host_memory": optimizer.host_bytes(), "host_engine": list(optimizer.host_engine)}
            row.runtime |= {"timeline": self._timeline(optimizer), "rig": _rig(optimizer.device)}
        if stats.stall_ms is not None and row.stall_ms is not None:
            own = {cause: milliseconds for cause, milliseconds in row.stall_ms.items() if cause in _OWN_CAUSES}
            most = max(own.get("comm", 0.0), stats.stall_ms.get("comm", 0.0))  # the agent sees the runtime's, too
            row.stall_ms = own | dict(stats.stall_ms.items())
            if most:
                row.stall_ms["comm"] = most
            row.hidden_ms = (row.hidden_ms or 0.0) + (stats.hidden_ms or 0.0)

    def _timeline(self, optimizer: ZenFlowOptimizer) -> dict[str, Any] | None:
        """What links and host did in one window, with our rows' numbers; waits for them, once."""
        from zenflow import HostEngineError

        try:
            timeline = optimizer.timeline()
        except HostEngineError:  # the training itself is told at its next step
            return None
        if timeline is None:
            return None
        return {**timeline.document(), "first_step": timeline.first_step - self._offset}


def _rig(device: Device) -> dict[str, Any] | None:
    """The emulated accelerator, as the profile document has it; None for a real device."""
    from zenflow import EmulatedAccelerator
    from zftune.profile import derive

    if not isinstance(device, EmulatedAccelerator) or not device.slack.segments:
        return None
    return derive.rig(device.rig, [device.slack], attempts=1)


def rows_of(of: Any, index: int) -> Rows | None:
    """What adds to the rows of whoever makes the steps."""
    optimizer = optimizer_of(of)
    return None if optimizer is None else Rows(optimizer, index)


def _fields(stats: StepStats) -> dict[str, Any]:
    values = {field.name: getattr(stats, field.name) for field in dataclasses.fields(stats)}
    del values["coverage_curve"]  # a table of its own
    del values["comm_ms"]  # the agent sees these calls itself
    return values | {"stall_ms": None if stats.stall_ms is None else dict(stats.stall_ms)}
