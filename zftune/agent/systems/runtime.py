"""This package's own runtime, the zenflow optimizers: their device, knobs and statistics."""

from __future__ import annotations

import dataclasses
import sys
import weakref
from typing import TYPE_CHECKING, Any

from zftune.agent.systems import deepspeed

if TYPE_CHECKING:
    from zenflow.device import Device
    from zenflow.history import History
    from zenflow.optimizer import ZenFlowOptimizer
    from zenflow.stats import StepStats
    from zftune.agent.recorder import StepRow

_OWN_CAUSES = ("comm", "data")  # the runtime does not see these waits


def optimizer_of(of: Any) -> ZenFlowOptimizer | None:
    """The zenflow optimizer that makes the steps, if it is one."""
    module = sys.modules.get("zenflow.optimizer")
    optimizer = deepspeed.optimizer_of(of)
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
    """Adds a zenflow optimizer's statistics to the rows of its steps, which may be resolved when it is no more."""

    def __init__(self, optimizer: ZenFlowOptimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._device = optimizer.device
        self._ended: dict[int, tuple[History, int]] = {}  # by a row's index: who has its step's record, and its number
        self._host: dict[str, Any] = {}
        self._recording = False

    def end_step(self, index: int) -> None:
        """Note what is to be had of a step now that it has ended: the optimizer may be gone before its row is made."""
        optimizer = self._optimizer()
        if optimizer is not None and optimizer.trains:
            self._ended[index] = optimizer.records, optimizer.steps
            self._host = {"host_memory": optimizer.host_bytes(), "host_engine": list(optimizer.host_engine)}

    def __call__(self, row: StepRow, *, last: bool) -> None:
        """Fill `runtime`, and what the statistics say better: the stall by cause."""
        records, number = self._ended.pop(row.index, (None, 0))
        stats = None if records is None else records.of(number)
        if records is None or stats is None:
            return
        row.runtime = _fields(stats)
        first = row.measured and not self._recording
        if first:
            self._recording = True
            if (optimizer := self._optimizer()) is not None and optimizer.trains:
                optimizer.record_timeline()
        if row.measured:
            row.runtime |= self._host
        if first or last:  # the first one tells it should the process be killed
            row.runtime["rig"] = _rig(self._device)
        if last:
            row.runtime["timeline"] = self._timeline(records, number - row.index)
        if stats.stall_ms is not None and row.stall_ms is not None:
            own = {cause: milliseconds for cause, milliseconds in row.stall_ms.items() if cause in _OWN_CAUSES}
            most = max(own.get("comm", 0.0), stats.stall_ms.get("comm", 0.0))  # the agent sees the runtime's, too
            row.stall_ms = own | dict(stats.stall_ms.items())
            if most:
                row.stall_ms["comm"] = most
            row.hidden_ms = (row.hidden_ms or 0.0) + (stats.hidden_ms or 0.0)

    def _timeline(self, records: History, offset: int) -> dict[str, Any] | None:
        """What links and host did in one window, with our rows' numbers; waits for them, once."""
        from zenflow import HostEngineError

        optimizer, recorder = self._optimizer(), records.recorder
        if recorder is None:
            return None
        try:  # where it still trains, work that runs over the window's end is waited for
            timeline = optimizer.timeline() if optimizer is not None and optimizer.trains else recorder.timeline()
        except HostEngineError:  # the training itself is told at its next step
            return None
        return None if timeline is None else {**timeline.document(), "first_step": timeline.first_step - offset}


def _rig(device: Device) -> dict[str, Any] | None:
    """The emulated accelerator, as the profile document has it; None for a real device."""
    from zftune.emulation import EmulatedAccelerator
    from zftune.emulation.machines import rig_document

    if not isinstance(device, EmulatedAccelerator) or not device.slack.segments:
        return None
    return rig_document(device.rig, [device.slack], attempts=1)


def rows_of(of: Any) -> Rows | None:
    """What adds to the rows of whoever makes the steps."""
    optimizer = optimizer_of(of)
    return None if optimizer is None else Rows(optimizer)


def _fields(stats: StepStats) -> dict[str, Any]:
    values = {field.name: getattr(stats, field.name) for field in dataclasses.fields(stats)}
    del values["coverage_curve"]  # a table of its own
    del values["comm_ms"]  # the agent sees these calls itself
    del values["pin_ms"]
    return values | {"stall_ms": None if stats.stall_ms is None else dict(stats.stall_ms)}
