"""The timeline against what the rig's rates and the step's statistics say about the same steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.zenflow.small import Stack, seeded, tokens_of
from zenflow import ConfigError, CpuDevice, Device, StepStats, Timeline, TimelineRecorder, ZenFlowAdamW, ZenFlowConfig
from zenflow.history import Span
from zftune.emulation import EmulatedAccelerator, Rig
from zftune.emulation.clock import SimulatedClock

FORWARD_MS, BACKWARD_MS = 8.0, 16.0
D2H_GBPS, H2D_GBPS, HOST_GBPS = 1.2e-3, 1.5e-3, 8e-3
WARM_UP = 8
CLOSE = 0.01
"""Milliseconds within which sums of spans agree with sums of differences of the same marks."""
OVERLAPPED = ZenFlowConfig(topk_ratio=0.25, update_interval=4, select_interval=4)
SYNCHRONOUS = ZenFlowConfig.zero_offload()


class Run:
    """Trains a small model and gives the recorder the marks that only the caller has."""

    def __init__(self, config: ZenFlowConfig, device: Device, model: nn.Module) -> None:
        self.device = device
        self.model = model
        self.optimizer = ZenFlowAdamW(model.parameters(), config=config, module=model, device=device)
        self.recorder: TimelineRecorder | None = None
        self._taken = 0

    def step(self, *, wait_for_data_s: float = 0.0) -> None:
        clock = self.device.clock
        began_s = clock.now()
        clock.sleep(wait_for_data_s)
        tokens = tokens_of(self._taken)
        got_s = clock.now()
        marks = [self.device.mark()]
        loss = self.model(tokens)
        marks.append(self.device.mark())
        loss.backward()
        self.device.begin_step()
        marks.append(self.device.mark())
        self.optimizer.step()
        self.optimizer.zero_grad()
        marks.append(self.device.mark())
        self._taken += 1
        if self.recorder is not None:
            self.recorder.wall("data", "batch", began_s, got_s)
            for label, (begin, end) in zip(("forward", "backward", "optimizer"), pairwise(marks), strict=True):
                self.recorder.compute(label, begin, end)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def timeline(self) -> Timeline:
        found = self.optimizer.timeline()
        assert found is not None
        return found

    def stats(self, timeline: Timeline) -> list[StepStats]:
        """Of the timeline's steps."""
        last = timeline.first_step + timeline.steps
        return [one for one in self.optimizer.history(wait=True) if timeline.first_step <= one.step < last]


@contextmanager
def emulated(config: ZenFlowConfig, **rates: float) -> Iterator[Run]:
    model = seeded(Stack, depth=3)
    values = {"link_d2h_gbps": D2H_GBPS, "link_h2d_gbps": H2D_GBPS, "host_gbps": HOST_GBPS, **rates}
    rig = Rig("line", "", forward_ms=FORWARD_MS, backward_ms=BACKWARD_MS, device_gbps=None, scale=1.0, **values)
    device = EmulatedAccelerator(rig)
    device.attach(model)
    run = Run(config, device, model)
    yield run
    run.optimizer.abandon()
    device.close()


def recorded(run: Run, steps: int | None = None) -> Timeline:
    """One window of a run that is warmed up."""
    run.steps(WARM_UP - 1)
    run.recorder = run.optimizer.record_timeline(steps)
    run.steps(1 + (steps or run.optimizer.config.longest_window) + 1)
    return run.timeline()


def overlaps(spans: Sequence[Span]) -> list[tuple[Span, Span]]:
    """Neighbours of which the first ends after the second begins, but for rounding."""
    return [(one, other) for one, other in pairwise(spans) if one.end_ms > other.begin_ms + 1e-6]


@pytest.mark.parametrize("config", [OVERLAPPED, SYNCHRONOUS], ids=["overlapped", "synchronous"])
def test_the_lanes_of_one_window(config: ZenFlowConfig) -> None:
    with emulated(config) as run:
        timeline = recorded(run)
        stats = run.stats(timeline)
    assert timeline.first_step == WARM_UP + 1
    assert timeline.steps == len(stats) == config.longest_window
    assert timeline.length_ms == pytest.approx(sum(one.step_ms or 0.0 for one in stats), abs=CLOSE)
    assert list(timeline.lanes) == ["compute", "d2h", "h2d", "host", "data", "stall"]
    for lane, spans in timeline.lanes.items():
        assert all(0 <= span.begin_ms <= span.end_ms for span in spans), lane
        assert all(span.begin_ms < timeline.length_ms for span in spans), lane
        assert overlaps(spans) == [], lane
    assert all(span.end_ms <= timeline.length_ms for lane in ("compute", "stall") for span in timeline.lanes[lane])
    assert all(timeline.lanes[lane] for lane in ("compute", "d2h", "h2d", "host"))


@pytest.mark.parametrize("config", [OVERLAPPED, SYNCHRONOUS], ids=["overlapped", "synchronous"])
def test_stalls_are_those_of_the_statistics_and_lie_where_nothing_is_computed(config: ZenFlowConfig) -> None:
    with emulated(config) as run:
        timeline = recorded(run)
        stats = run.stats(timeline)
    stalls = timeline.lanes["stall"]
    by_cause: dict[str, float] = {}
    for one in stats:
        assert one.stall_ms is not None
        for name, milliseconds in one.stall_ms.items():
            by_cause[name] = by_cause.get(name, 0.0) + milliseconds
    assert sum(by_cause.values()) > 1.0  # the rig is slow enough for stalls
    for cause, milliseconds in by_cause.items():
        found = sum(span.end_ms - span.begin_ms for span in stalls if span.label == cause)
        assert found == pytest.approx(milliseconds, abs=CLOSE), cause
    assert overlaps(sorted([*stalls, *timeline.lanes["compute"]], key=lambda span: span.begin_ms)) == []
    # What is neither computed nor waited for is the work between two steps' marks, which the rig does not charge for.
    idle_ms = timeline.length_ms - sum(s.end_ms - s.begin_ms for s in [*stalls, *timeline.lanes["compute"]])
    assert -CLOSE < idle_ms < 0.05 * timeline.length_ms


@pytest.mark.parametrize("config", [OVERLAPPED, SYNCHRONOUS], ids=["overlapped", "synchronous"])
def test_copies_take_as_long_as_the_rates_say(config: ZenFlowConfig) -> None:
    with emulated(config) as run:
        timeline = recorded(run)
        stats = run.stats(timeline)
    for lane, gbps in (("d2h", D2H_GBPS), ("h2d", H2D_GBPS)):
        spans = [span for span in {str(key): value for key, value in timeline.lanes.items()}[lane] if span.begin_ms > 0]
        assert spans, lane
        for span in spans:
            assert span.nbytes is not None
            assert span.end_ms - span.begin_ms == pytest.approx(span.nbytes / gbps / 1e6, rel=1e-6, abs=1e-6)
    # Every deferred gradient of these steps is there, but for those that follow the last step's end.
    gradients = sum(span.nbytes or 0 for span in timeline.lanes["d2h"])
    counted = sum(one.d2h_bytes + one.index_bytes + one.migrated_bytes for one in stats)
    assert gradients >= 0.9 * sum(one.d2h_bytes for one in stats)
    assert gradients <= 1.1 * counted + stats[0].d2h_bytes


def test_gradients_come_down_before_the_host_works_and_weights_go_up_after_it() -> None:
    with emulated(replace(SYNCHRONOUS, bucket_bytes=600)) as run:
        timeline = recorded(run)
        buckets = run.optimizer._training.model.windows.buckets
    down, work, up = (timeline.lanes[lane] for lane in ("d2h", "host", "h2d"))
    assert len(down) == len(work) == len(up) == buckets > 3  # in the order of backward
    for gradient, update, weight in zip(down, work, up, strict=True):
        assert gradient.end_ms <= update.begin_ms + 1e-6
        assert update.end_ms <= weight.begin_ms + 1e-6
    # DeepSpeed's order: the host begins when all is there, the first weight goes up when all is done.
    assert work[0].begin_ms == pytest.approx(down[-1].end_ms, abs=1e-6)
    assert up[0].begin_ms == pytest.approx(work[-1].end_ms, abs=1e-6)


def test_steps_that_were_asked_for_and_the_document() -> None:
    with emulated(OVERLAPPED) as run:
        timeline = recorded(run, steps=2)
        assert observed(run)  # host work of these steps may go on until the next close
        run.step()
        assert not observed(run)
    assert timeline.steps == 2
    document: dict[str, Any] = timeline.document()
    assert set(document) == {"first_step", "steps", "length_ms", "lanes"}
    for lane, spans in timeline.lanes.items():
        rows = document["lanes"][lane]
        assert [label for _, _, label in rows] == [span.label for span in spans]
        for (begin_ms, end_ms, _), span in zip(rows, spans, strict=True):
            assert (begin_ms, end_ms) == (pytest.approx(span.begin_ms, abs=1e-6), pytest.approx(span.end_ms, abs=1e-6))


def observed(run: Run) -> bool:
    return run.device.observer is not None


def test_nothing_is_recorded_unless_asked_for_and_nothing_afterwards() -> None:
    with emulated(OVERLAPPED) as run:
        run.steps(2)
        assert run.optimizer.timeline() is None
        assert not observed(run)
        run.recorder = run.optimizer.record_timeline()
        assert observed(run)
        run.steps(5)
        assert run.optimizer.timeline() is None  # the window has begun and is not over
        run.steps(8)
        assert not observed(run)
        first = run.timeline()
        run.steps(4)
        assert run.timeline() == first


def test_the_weights_are_the_same_with_and_without() -> None:
    weights = []
    for recording in (False, True):
        with emulated(OVERLAPPED) as run:
            run.steps(3)
            if recording:
                run.optimizer.record_timeline()
            run.steps(8)
            run.optimizer.flush()
            weights.append([parameter.detach().clone() for parameter in run.model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


class OwnClock(CpuDevice):
    """Marks on a clock of its own, as a GPU's: it began at another time than the host's."""

    def __init__(self, clock: SimulatedClock) -> None:
        super().__init__()
        self.clock = clock
        self.late_s = 0.003
        """By which it is known that a mark was passed."""

    def mark(self) -> float:
        return self.clock.now() - 1000.0

    def wait_for(self, mark: Any) -> None:
        self.clock.sleep(self.late_s)

    def host_time_s(self, mark: Any) -> float | None:
        return None


def test_a_device_with_a_clock_of_its_own_is_related_to_the_hosts() -> None:
    clock, model = SimulatedClock(), seeded(Stack)
    model.register_forward_hook(lambda *_: clock.sleep(0.008))
    device = OwnClock(clock)
    run = Run(OVERLAPPED, device, model)
    run.steps(WARM_UP - 1)
    run.recorder = run.optimizer.record_timeline(None)
    waits_s = [0.01 * (number + 1) for number in range(run.optimizer.config.longest_window + 2)]
    for wait_s in waits_s:
        run.step(wait_for_data_s=wait_s)
    device.late_s = 0.0  # once is enough
    timeline = run.timeline()
    run.optimizer.close()
    clock.close()
    rows = timeline.lanes["data"], [span for span in timeline.lanes["compute"] if span.label == "forward"]
    for wait_s, batch, forward in zip(waits_s[1:-1], *rows, strict=True):
        assert batch.end_ms - batch.begin_ms == pytest.approx(1e3 * wait_s)
        assert batch.end_ms == pytest.approx(forward.begin_ms, abs=CLOSE)


def test_a_recording_of_no_steps_is_refused() -> None:
    with emulated(OVERLAPPED) as run, pytest.raises(ConfigError, match=r"steps is 0; it must be an integer >= 1"):
        run.optimizer.record_timeline(0)
