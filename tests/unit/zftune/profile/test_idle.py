"""What the device idles for: from a profiler's events, made up ones and those of a real run without a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._C._autograd import DeviceType

from tests.unit.zftune.profile.test_screen import shown
from zenflow import StepStats
from zftune.errors import ProfileError
from zftune.profile.companions import Idle, IdleProfiler, Kernel, calibration_steps, idle_of, kernels_in
from zftune.profile.schema import validate

MS = 1_000_000


@dataclass(frozen=True)
class Event:
    kind: DeviceType
    what: str
    begin: int
    end: int
    correlation: int
    annotates: bool = False

    def device_type(self) -> DeviceType:
        return self.kind

    def name(self) -> str:
        return self.what

    def start_ns(self) -> int:
        return self.begin

    def end_ns(self) -> int:
        return self.end

    def correlation_id(self) -> int:
        return self.correlation

    def is_user_annotation(self) -> bool:
        return self.annotates


def stats(*, stall_ms: float, hidden_ms: float, cpu_wait_ms: float) -> StepStats:
    values: dict[str, Any] = dict.fromkeys(StepStats.__dataclass_fields__)
    values |= {"step": 1, "stall_ms": {"host": stall_ms}, "hidden_ms": hidden_ms, "cpu_wait_ms": cpu_wait_ms}
    return StepStats(**values)


def test_kernels_and_their_launches_are_found() -> None:
    cpu, gpu = DeviceType.CPU, DeviceType.CUDA
    events = [
        Event(cpu, "cudaLaunchKernel", 1, 2, 7),
        Event(cpu, "cuLaunchKernelEx", 3, 5, 8),
        Event(cpu, "cudaMemcpyAsync", 5, 6, 9),
        Event(cpu, "aten::add", 0, 6, 7),
        Event(gpu, "vectorized_elementwise_kernel", 4, 9, 7),
        Event(gpu, "update_columns", 9, 12, 8),
        Event(gpu, "Memcpy DtoH (Device -> Pinned)", 9, 30, 9),
        Event(gpu, "Memset (Device)", 9, 30, 9),
        Event(gpu, "ProfilerStep#3", 0, 40, 0, annotates=True),
        Event(gpu, "kernel of a graph", 13, 14, 99),
    ]
    assert kernels_in(events) == [Kernel(4, 9, 2), Kernel(9, 12, 5), Kernel(13, 14, None)]


def test_gaps_are_between_the_kernels_of_all_streams() -> None:
    kernels = [
        Kernel(50 * MS, 60 * MS, 45 * MS),  # a gap of 20 ms, of which 15 were over before the launch
        Kernel(0, 10 * MS, -MS),
        Kernel(5 * MS, 30 * MS, 0),  # beside the first, on another stream
        Kernel(8 * MS, 12 * MS, 0),
        Kernel(70 * MS, 80 * MS, 10 * MS),  # launched long before: 10 ms for another reason
        Kernel(90 * MS, 91 * MS, None),
    ]
    assert idle_of(kernels, steps=2) == Idle(2, total_ms=20 + 10 + 10, unlaunched_ms=15)
    assert idle_of([], steps=2) is None


@pytest.mark.parametrize(
    ("stall_ms", "hidden_ms", "cpu_wait_ms", "causes"),
    [
        (0.0, 0.0, 0.0, (0.0, 15.0, 25.0)),
        (12.0, 0.0, 0.0, (12.0, 15.0, 13.0)),  # the stream waited: kernels were launched
        (12.0, 3.0, 15.0, (12.0, 3.0, 25.0)),  # the thread was blocked, 12 of the 15 ms with nothing to run
        (35.0, 0.0, 0.0, (35.0, 5.0, 0.0)),
        (90.0, 0.0, 0.0, (40.0, 0.0, 0.0)),  # more than there is: kernels of others run meanwhile
    ],
)
def test_causes_add_up(stall_ms: float, hidden_ms: float, cpu_wait_ms: float, causes: tuple[float, ...]) -> None:
    one = stats(stall_ms=stall_ms / 2, hidden_ms=hidden_ms / 2, cpu_wait_ms=cpu_wait_ms / 2)
    found = Idle(2, total_ms=40.0, unlaunched_ms=15.0).document([one, one])
    assert (found["steps"], found["ms_per_step"]) == (2, 20.0)
    assert found["by_cause"] == pytest.approx(
        dict(zip(("stall", "launch", "other"), (c / 2 for c in causes), strict=True))
    )


@pytest.mark.parametrize(("window", "steps"), [(1, 3), (2, 4), (3, 3), (4, 4), (5, 5), (8, 5)])
def test_whole_windows_are_profiled_where_they_are_short(window: int, steps: int) -> None:
    assert calibration_steps(window) == steps


def test_a_run_without_a_gpu_has_events_and_no_kernels() -> None:
    profiler = IdleProfiler()
    with profiler.recording(torch.device("cpu")):
        torch.ones(8).add_(1)
    assert any(event.name() == "aten::add_" for event in profiler.events)
    assert profiler.idle(1) is None


def test_a_profile_shows_it_and_refuses_causes_that_do_not_add_up(document: dict[str, Any]) -> None:
    one = stats(stall_ms=6.0, hidden_ms=0.0, cpu_wait_ms=0.0)
    document["idle"] = Idle(2, total_ms=40.0, unlaunched_ms=15.0).document([one, one])
    document["sources"]["idle"] = "torch.profiler"
    validate(document)
    assert "20 ms a step without a kernel: stall 6, launch 7.5, other 6.5" in " ".join(shown(document).split())
    document["idle"]["by_cause"]["launch"] = 9.0
    with pytest.raises(ProfileError, match=r"idle\.by_cause: does not add up"):
        validate(document)
