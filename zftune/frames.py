"""The lines of Python that hold a training thread, from samples of its frames. Importing this loads no torch."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from zenflow.device import Device

PERIOD_S = 0.02
"""Mean time between two samples: one costs the training about 70 us, mostly by the GIL's way to and fro."""
MAX_LINES = 20
_JOIN_S = 1.0  # a driver may hang
_AUTOGRAD = "torch.autograd"
_LIBRARIES = sys.stdlib_module_names | {"torch"}
_OURS = ("zftune.agent.", "zftune.frames")
_WAITS = frozenset({"wait", "wait_for", "synchronize", "sleep_until"})
_COUNTED = ("zenflow.", "zftune.emulation.")
"""Modules that wait in such functions: events count that time as stall."""


class _Place(NamedTuple):
    module: str
    file: str
    function: str
    line: int

    @classmethod
    def of(cls, frame: FrameType) -> _Place:
        code = frame.f_code
        return cls(str(frame.f_globals.get("__name__")), code.co_filename, code.co_qualname, frame.f_lineno)

    @property
    def is_own(self) -> bool:
        """Whether it is neither torch's, nor the standard library's, nor the profiler's."""
        return self.module.partition(".")[0] not in _LIBRARIES and not self.module.startswith(_OURS)

    def document(self) -> dict[str, Any]:
        """With the file's path from its outermost package on, which tells nothing of the machine."""
        parts = Path(self.file).parts
        package = self.module.count(".") + (parts[-1] == "__init__.py")
        return {"file": "/".join(parts[-1 - package :]), "line": self.line, "function": self.function}


class FrameSampler:
    """Samples the frames of the training thread, or of autograd's threads while it waits for their hooks.

    A sample counts for the time since the one before.

    Args:
        is_idle: whether the device has nothing to do; only samples of such moments count. None: all of them do.
        is_waiting: whether the thread is in a wait that is counted elsewhere; then the device is not asked.
        thread: identifier of the training thread; None: the calling thread.
        frames: of all threads, by their identifiers.
    """

    def __init__(
        self,
        is_idle: Callable[[], bool] | None,
        is_waiting: Callable[[], bool] = bool,
        *,
        thread: int | None = None,
        frames: Callable[[], Mapping[int, FrameType]] = sys._current_frames,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.thread = threading.get_ident() if thread is None else thread
        self._is_idle = is_idle
        self._is_waiting = is_waiting
        self._frames = frames
        self._clock_ns = clock_ns
        self._last_ns = clock_ns()
        self._total_ns = self._samples = self._cost_ns = 0
        self._failed = False
        self._held_ns: dict[tuple[_Place, _Place], int] = {}
        """By the innermost line that is the script's or a framework's own, and the innermost one at all."""
        self._stopping = threading.Event()
        self._sampler: threading.Thread | None = None

    def start(self) -> None:
        """Begin to sample, in a thread of its own; once."""
        self._last_ns = self._clock_ns()
        self._sampler = threading.Thread(target=self._run, name="zftune-frames", daemon=True)
        self._sampler.start()

    def stop(self) -> None:
        """End sampling; what was sampled stays."""
        self._stopping.set()
        if self._sampler is not None:
            self._sampler.join(_JOIN_S)

    def _run(self) -> None:
        periods = random.Random(0)  # a steady rate could meet the same moment of every step
        try:
            while not self._stopping.wait(periods.uniform(0.5, 1.5) * PERIOD_S):
                self.sample()
                self._cost_ns = time.thread_time_ns()
        except Exception:  # noqa: BLE001 - as without samples: the training is not to hear of it
            self._failed = True

    def sample(self) -> None:
        """Take one sample."""
        now_ns = self._clock_ns()
        took_ns, self._last_ns = now_ns - self._last_ns, now_ns
        self._total_ns += took_ns
        if self._is_idle is not None and (self._is_waiting() or not self._is_idle()):
            return
        held = self._held()
        if held is not None:
            self._samples += 1
            self._held_ns[held] = self._held_ns.get(held, 0) + took_ns

    def _held(self) -> tuple[_Place, _Place] | None:
        frames = self._frames()
        frame: FrameType | None = frames.get(self.thread)
        if frame is None:
            return None
        innermost = _Place.of(frame)
        if innermost.module.startswith(_AUTOGRAD):
            started = {thread.ident for thread in threading.enumerate() if type(thread) is not threading._DummyThread}
            frame = next((frames[ident] for ident in frames if ident not in started | {self.thread}), frame)
            innermost = _Place.of(frame)
        own = innermost
        while not own.is_own and (frame := frame.f_back) is not None:
            own = _Place.of(frame)
        own = own if own.is_own else innermost
        waits = innermost.function.rpartition(".")[2] in _WAITS and own.module.startswith(_COUNTED)
        return None if waits and self._is_idle is not None else (own, innermost)

    def document(self) -> dict[str, Any] | None:
        """What was sampled, the lines that held most first; None: nothing.

        Returns:
            "of": "idle" or "step"; "samples" that count; "fraction": their time, of all; "cost": processor time of
            sampling, of all; "lines", each with its "share" of the time that counts, and the line "within" it that
            was met most often.
        """
        if not self._total_ns or self._failed:
            return None
        lines: dict[_Place, dict[_Place, int]] = {}
        for (own, innermost), took_ns in self._held_ns.items():
            lines.setdefault(own, {})[innermost] = took_ns
        held_ns = sum(self._held_ns.values())
        most = sorted(lines.items(), key=lambda line: -sum(line[1].values()))[:MAX_LINES]
        return {
            "of": "step" if self._is_idle is None else "idle",
            "samples": self._samples,
            "fraction": held_ns / self._total_ns,
            "cost": self._cost_ns / self._total_ns,
            "lines": [
                {
                    **own.document(),
                    "share": sum(within.values()) / held_ns,
                    "within": max(within, key=lambda place: within[place]).document(),
                }
                for own, within in most
                if held_ns
            ],
        }


def idle_question(device: Device) -> Callable[[], bool]:
    """What tells, to any thread, whether the stream that is current now has nothing to do."""
    if device.torch_device.type != "cuda":
        return lambda: device.passed(device.mark())
    import torch

    stream = torch.cuda.current_stream(device.torch_device)
    return lambda: bool(stream.query())
