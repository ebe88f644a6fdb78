"""The timeline of a CUDA device, whose clock is not the host's."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.test_runtime_gpu import no_synchronisation
from tests.zenflow.device_cases import HYPER, WINDOWS, loss_of, model_on
from zenflow import Timeline, ZenFlowAdamW, ZenFlowConfig
from zenflow.device import device_for

pytestmark = pytest.mark.gpu

WARM_UP = 6


@pytest.fixture
def optimizer_and_timeline() -> tuple[ZenFlowAdamW, Timeline]:
    torch_device = torch.device("cuda", torch.cuda.current_device())
    device = device_for(torch_device)
    model = model_on(torch_device, torch.bfloat16)
    optimizer = ZenFlowAdamW(model.parameters(), config=ZenFlowConfig(**WINDOWS), module=model, device=device, **HYPER)
    recorder = None
    for step in range(WARM_UP + 6):
        if step == WARM_UP - 1:
            recorder = optimizer.record_timeline()
        marks = [device.mark()]
        loss = loss_of(model, step)
        marks.append(device.mark())
        loss.backward()
        marks.append(device.mark())
        if step < WARM_UP:
            optimizer.step()
        else:
            with no_synchronisation():  # recording does not wait either
                optimizer.step()
        marks.append(device.mark())
        optimizer.zero_grad()
        if recorder is not None:
            for label, begin, end in zip(("forward", "backward", "optimizer"), marks, marks[1:], strict=False):
                recorder.compute(label, begin, end)
    timeline = optimizer.timeline()
    assert timeline is not None
    optimizer.close()
    return optimizer, timeline


def test_the_lanes_of_one_window(optimizer_and_timeline: tuple[ZenFlowAdamW, Timeline]) -> None:
    optimizer, timeline = optimizer_and_timeline
    last = timeline.first_step + timeline.steps
    stats = [one for one in optimizer.history(wait=True) if timeline.first_step <= one.step < last]
    assert (timeline.first_step, timeline.steps) == (WARM_UP + 1, WINDOWS["update_interval"])
    assert timeline.length_ms == pytest.approx(sum(one.step_ms or 0.0 for one in stats), rel=0.01, abs=0.1)
    assert list(timeline.lanes) == ["compute", "d2h", "h2d", "host", "stall"]
    assert all(timeline.lanes[lane] for lane in ("compute", "d2h", "h2d", "host"))
    stall_ms = sum(span.end_ms - span.begin_ms for span in timeline.lanes["stall"])
    assert stall_ms == pytest.approx(sum(sum((one.stall_ms or {}).values()) for one in stats), abs=0.05)


def test_host_work_and_copies_follow_each_other_on_one_axis(
    optimizer_and_timeline: tuple[ZenFlowAdamW, Timeline],
) -> None:
    """The window's first update of the host follows a gradient that came down, and precedes a weight that goes up."""
    _, timeline = optimizer_and_timeline
    updates = [span for span in timeline.lanes["host"] if span.begin_ms > 0]
    closely_ms = 1.0  # the clocks are related by what the training thread saw
    assert updates
    assert max(span.end_ms for span in timeline.lanes["h2d"]) >= min(span.end_ms for span in updates) - closely_ms
    assert all(-closely_ms < span.begin_ms for span in updates)
