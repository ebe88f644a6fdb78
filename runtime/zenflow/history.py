"""The steps' records, from the open step to those that were resolved."""

from __future__ import annotations

from collections import deque
from itertools import takewhile

from zenflow.device import Device, Mark
from zenflow.stats import StepRecord, StepStats, Traffic
from zenflow.timeline import TimelineRecorder

# Steps between a step and its statistics: resolving earlier could wait for the device.
_RESOLVE_LAG = 2
HISTORY_STEPS = 4096


class History:
    """Owns the record of the open step and turns closed ones into statistics, in order and without waiting."""

    def __init__(self, device: Device) -> None:
        self.open = StepRecord(step=0)
        """What happened since the end of the last step."""
        self._device = device
        self._last_end: Mark | None = None
        self._closed: deque[StepRecord] = deque()
        self._resolved: deque[StepStats] = deque(maxlen=HISTORY_STEPS)
        self.recorder: TimelineRecorder | None = None
        """The newest recording."""
        self._recording = False

    @property
    def last_end(self) -> Mark | None:
        """Where the last step ended; None before the first."""
        return self._last_end

    def record(self, steps: int | None) -> TimelineRecorder:
        """Record a timeline; one that is being recorded ends without a result.

        Args:
            steps: how many steps from the next close on; None: one whole update window.
        """
        self.recorder = self._device.observer = TimelineRecorder(self._device, steps)
        self._recording = True
        return self.recorder

    def stop_recording(self) -> None:
        """Note nothing more; what was recorded stays."""
        if self._recording:
            self._recording, self._device.observer = False, None

    def begin_step(self) -> None:
        """Resolve what can be, and bound the training thread's run-ahead to one step."""
        self._resolve(_RESOLVE_LAG)  # here, where the device has backward to work on
        if self._last_end is not None:
            self._device.wait_for(self._last_end)
            if self._recording and self.recorder is not None:
                self.recorder.passed(self._last_end)

    def end_step(self, step: int, traffic: Traffic) -> None:
        """Close the open record.

        Args:
            step: number of the step that ends here.
            traffic: bytes on the link since the end of the last one.
        """
        record, self.open = self.open, StepRecord(step=step + 1)
        record.step, record.begin, record.end, record.traffic = step, self._last_end, self._device.mark(), traffic
        record.comm_s = self._device.comm_s()
        self._closed.append(record)
        self._last_end = record.end
        if self._recording and self.recorder is not None and self.recorder.end_step(record):
            self.stop_recording()

    def steps(self, *, wait: bool, after: int = 0) -> list[StepStats]:
        """The last steps that are resolved, oldest first.

        Args:
            wait: wait for the device, so that the newest step is among them.
            after: only the steps with a higher number than this; it costs what they are, not what is kept.
        """
        for record in self._closed if wait else ():
            record.wait(self._device)
        self._resolve(0 if wait else _RESOLVE_LAG)
        found = list(takewhile(lambda stats: stats.step > after, reversed(self._resolved)))
        found.reverse()
        return found

    def of(self, step: int) -> StepStats | None:
        """The statistics of one step; None if they are not kept. Waits for the device to have passed its end."""
        while self._closed and self._closed[0].step <= step:
            record = self._closed.popleft()
            record.wait(self._device)
            self._resolved.append(record.resolve(self._device))
        newest = next((stats for stats in reversed(self._resolved) if stats.step <= step), None)
        return newest if newest is not None and newest.step == step else None

    def _resolve(self, lag: int) -> None:
        while len(self._closed) > lag and self._closed[0].ready(self._device):
            self._resolved.append(self._closed.popleft().resolve(self._device))
