"""What hearing of the loss costs on a GPU: one copy a step, nothing that is launched, nobody who waits."""

from __future__ import annotations

import pytest
import torch

from tests.support.zenflow.simulated_cuda import SimulatedCuda
from zenflow.device import CudaDevice
from zftune.agent.recorder import DeviceEvents, Recorder, StepRow
from zftune.losses import StepLosses
from zftune.quality import LossGuard
from zftune.tuner.executor import Losses

STEPS = 6


@pytest.mark.simulated_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_agent_copies_a_loss_and_reads_it_when_its_step_is_over(gpu: SimulatedCuda, dtype: torch.dtype) -> None:
    backend = DeviceEvents(CudaDevice(gpu.device))
    losses, found = StepLosses(backend.on_compute_stream), list[float | None]()

    def emit(row: StepRow) -> None:
        found.append(losses.take(row.index))

    recorder = Recorder(backend, emit)
    recorder.end_step()
    work = torch.ones(4).to(gpu.device)
    for step in range(STEPS):
        loss = torch.tensor(float(step)).to(gpu.device, dtype)
        with gpu.part("loss"):
            losses.add(loss, "backward")
        del loss
        work.add_(1)
        losses.end_step(recorder.index)
        recorder.end_step()
    recorder.drain()
    assert found == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], found
    counts = gpu.counted["loss"]
    assert counts.launches.total() == 0, counts
    assert counts.copies.total() == STEPS, counts
    assert counts.waits.total() == 0, counts


@pytest.mark.smoke
@pytest.mark.simulated_cuda
def test_a_loss_on_another_stream_is_left_out(gpu: SimulatedCuda) -> None:
    losses = StepLosses(DeviceEvents(CudaDevice(gpu.device)).on_compute_stream)
    with torch.cuda.stream(torch.cuda.Stream()):
        losses.add(torch.tensor(1.0).to(gpu.device), "backward")
    losses.end_step(1)
    assert losses.take(1) is None


@pytest.mark.simulated_cuda
def test_the_tuner_launches_nothing_for_a_loss(gpu: SimulatedCuda) -> None:
    losses, heard = Losses(CudaDevice(gpu.device), LossGuard()), list[float]()
    losses.listen(lambda _, loss: heard.append(loss))
    loss = torch.tensor(2.5).to(gpu.device, torch.bfloat16)
    with gpu.part("loss"):
        losses.add(1, loss)
        losses.judge()
    torch.cuda.synchronize()
    losses.judge()
    assert heard == [2.5]
    counts = gpu.counted["loss"]
    assert (counts.launches.total(), counts.waits.total()) == (0, 0), counts
