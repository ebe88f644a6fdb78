"""The cases of tests/system/gpu on the simulated CUDA device, streams of the user's own, and what is counted."""

from __future__ import annotations

import pytest
import torch

from tests.support.tiers import fast
from tests.support.zenflow import device_cases
from tests.support.zenflow.device_cases import HYPER, KNOBS, WINDOWS, RuntimeCases, loss_of, model_on
from tests.support.zenflow.gpu_cases import GpuCases
from tests.support.zenflow.simulated_cuda import SimulatedCuda
from zenflow import ZenFlowAdamW, ZenFlowConfig
from zenflow.device import CudaDevice

pytestmark = pytest.mark.simulated_cuda


class TestOnTheSimulatedGpu(GpuCases):
    """By day, of each case as many as differ in what they ask of a device."""

    @pytest.fixture
    def device(self) -> torch.device:
        return torch.device("privateuseone", 0)

    @pytest.mark.smoke
    @pytest.mark.parametrize(("topk", "ratio"), fast([(0.2, 0.5)], all_of=[(0.0, 1.0), (0.2, 0.5), (1.0, 0.0)]))
    def test_i1_synchronous_is_adamw(self, device: torch.device, topk: float, ratio: float) -> None:
        super().test_i1_synchronous_is_adamw(device, topk, ratio)

    @pytest.mark.parametrize("name", fast(["auto"], all_of=list(KNOBS)))
    def test_i2_repeats_bitwise_with_other_threads(self, device: torch.device, name: str) -> None:
        super().test_i2_repeats_bitwise_with_other_threads(device, name)

    @pytest.mark.smoke
    @pytest.mark.parametrize("name", fast(["part"], all_of=[name for name in KNOBS if name != "auto"]))
    def test_i2_is_the_reference(self, device: torch.device, name: str) -> None:
        super().test_i2_is_the_reference(device, name)

    @pytest.mark.smoke
    @pytest.mark.parametrize("saved_after", fast([4], all_of=[1, 4, 5]))
    @pytest.mark.parametrize("name", fast(["windows"], all_of=list(KNOBS)))
    def test_i3_goes_on_from_a_checkpoint(self, device: torch.device, name: str, saved_after: int) -> None:
        super().test_i3_goes_on_from_a_checkpoint(device, name, saved_after)

    @pytest.mark.parametrize("stream", fast([True], all_of=[True, False]))
    def test_i5_accumulation_is_the_sum(self, device: torch.device, stream: bool) -> None:
        super().test_i5_accumulation_is_the_sum(device, stream)

    @pytest.mark.smoke
    @pytest.mark.parametrize("name", fast(["zero-offload"], all_of=list(KNOBS)))
    def test_step_does_not_synchronise_the_device(self, device: torch.device, name: str) -> None:
        super().test_step_does_not_synchronise_the_device(device, name)


@pytest.mark.smoke
@pytest.mark.parametrize("name", fast(["mean"], all_of=list(KNOBS)))
@pytest.mark.simulated_cuda(arrival=0.0)
def test_copies_as_late_as_they_can_be_change_no_bit(gpu: SimulatedCuda, name: str) -> None:
    cases = RuntimeCases()
    ours, theirs = (cases.trained(device, KNOBS[name]) for device in (gpu.device, torch.device("cpu")))
    cases.assert_bitwise([[weight.cpu() for weight in weights] for weights in ours], theirs)


# A stream of the user's own.


def trained_on_streams(gpu: SimulatedCuda, *, step_elsewhere: bool, waits: bool = True) -> list[torch.Tensor]:
    """Final weights of a training whose passes are on a stream of their own, and its steps there or not."""
    model = model_on(gpu.device, torch.bfloat16)
    optimizer = ZenFlowAdamW(model.parameters(), config=ZenFlowConfig(**WINDOWS), module=model, **HYPER)
    first, own = torch.cuda.current_stream(), torch.cuda.Stream()
    stepping = first if step_elsewhere else own
    own.wait_stream(first)
    for step in range(device_cases.STEPS):
        with torch.cuda.stream(own):
            loss_of(model, step).backward()
        if waits:
            stepping.wait_stream(own)
        with torch.cuda.stream(stepping):
            optimizer.step()
            optimizer.zero_grad()
        if waits:
            own.wait_stream(stepping)
    first.wait_stream(own)
    optimizer.flush()
    weights = [weight.detach().cpu() for weight in model.parameters()]
    optimizer.close()
    return weights


@pytest.mark.parametrize("step_elsewhere", [False, True])
@pytest.mark.simulated_cuda(arrival=0.0)
def test_a_stream_of_the_users_own_changes_no_bit(gpu: SimulatedCuda, step_elsewhere: bool) -> None:
    ours = trained_on_streams(gpu, step_elsewhere=step_elsewhere)
    theirs = RuntimeCases().trained(torch.device("cpu"), WINDOWS)[-1]
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.smoke
@pytest.mark.simulated_cuda(arrival=0.0)
def test_a_user_who_does_not_wait_for_it_is_found(gpu: SimulatedCuda) -> None:
    trained_on_streams(gpu, step_elsewhere=True, waits=False)
    found = gpu.taken_problems()
    assert found["race"], found


# What is counted.


@pytest.mark.smoke
def test_launches_copies_and_events_are_counted_by_part(gpu: SimulatedCuda) -> None:
    one = torch.ones(6, 4).to(gpu.device)
    with gpu.part("kernels") as kernels:
        one.t()[1:].add_(1)  # views launch nothing
        torch._foreach_mul_([one] * 120, 2.0)  # torch's kernel takes 110
        torch.cat([one, one])
    with gpu.part("copies") as copies:
        torch.cuda.Event().record()
        one.sum().item()
        one.to("cpu")
    assert kernels.launches == {"add_": 1, "_foreach_mul_": 2, "cat": 1}, kernels
    assert not kernels.waits, kernels
    assert (copies.events_made, copies.events_recorded) == (1, 1), copies
    assert copies.waits.total() == 2, copies


@pytest.mark.simulated_cuda(kernels="triton")
def test_a_launch_of_triton_is_one(gpu: SimulatedCuda) -> None:
    from zenflow.kernels.tables import BucketTables, TablePart
    from zenflow.kernels.triton_launch import TritonKernels

    matrix = torch.arange(24.0).view(4, 6).to(gpu.device)
    part = TablePart(4, 6, torch.tensor([-1, 0, -2, -3, 1, -4], dtype=torch.int32), 0, 0)
    sent, kept, energies, rest = (torch.zeros(n, device=gpu.device) for n in (8, 16, 6, 8))
    tables = BucketTables([part], matrix.dtype, lambda tensor: tensor.to(gpu.device))
    for part_of_test, into in (("tables", rest), ("kernels", sent)):  # the first time its tables are sent
        with gpu.part(part_of_test) as counts:
            TritonKernels().pack_bucket(tables, [matrix], into, kept, energies)
    assert torch.equal(sent.cpu().view(2, 4), torch.arange(24.0).view(4, 6)[:, [1, 4]].t())
    assert counts.launches == {"pack_bucket": 1, "sum_partials": 1}, counts


@pytest.mark.parametrize("name", ["windows", "zero-offload"])
def test_events_are_used_again(gpu: SimulatedCuda, name: str) -> None:
    model = model_on(gpu.device, torch.bfloat16)
    optimizer = ZenFlowAdamW(model.parameters(), config=ZenFlowConfig(**KNOBS[name]), module=model, **HYPER)
    for step in range(9):
        with gpu.part("first" if step < 6 else "later"):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    optimizer.close()
    later = gpu.counted["later"]
    assert 10 * later.events_made < later.events_recorded, later


def test_an_event_that_orders_a_copy_is_not_recorded_anew_by_the_host_engine(
    gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = CudaDevice(gpu.device)
    device.mark()  # that goes back: the next one is the same event
    source, target = torch.ones(6, 4).to(gpu.device).add_(1), device.host_empty(torch.Size([6, 4]), torch.float32)
    engines, waited = torch.cuda.Stream(), type(torch.cuda.Stream()).wait_event

    def while_the_engine_marks(stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        with torch.cuda.stream(engines):
            device.mark()
        waited(stream, event)

    monkeypatch.setattr(type(engines), "wait_event", while_the_engine_marks)
    device.d2h(source, target).wait()
    assert torch.equal(target, torch.full((6, 4), 2.0))
