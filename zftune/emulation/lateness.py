"""Whether this machine was too slow for an emulated accelerator, so that what was measured on it is void."""

from __future__ import annotations

from zftune.emulation.emulator import EmulatedAccelerator
from zftune.emulation.machines import MAX_LATE_SHARE

_MOST_LATE = 0.005  # of the time: by so much an emulated accelerator's times may be off


class LateDisturbance:
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

    def close(self) -> None:
        """Nothing is held."""

    def _now(self) -> tuple[int, float, float]:
        slack = self._device.slack
        return len(slack.margins_s), slack.host_s, slack.late_host_s
