"""The emulated accelerator: the same weights as the plain CPU, pads that add up, errors that surface."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.tiers import combinations
from tests.support.zenflow.small import Flat, Stack, assert_same_run, seeded, tokens_of, train
from zenflow import HostEngineError, ZenFlowConfig
from zenflow.clock import Clock, RealClock
from zenflow.device import HostSpan, Transfer
from zftune.emulation import EmulatedAccelerator, EmulatedMemory, Rig

FAST_GBPS = 1e6
PAD = {"forward_ms": 3.0, "backward_ms": 6.0}


def rig(**changes: Any) -> Rig:
    """A rig on which nothing but the passes takes time."""
    rates = dict.fromkeys(("link_d2h_gbps", "link_h2d_gbps", "host_gbps"), FAST_GBPS)
    return Rig(**{"name": "test", "source": "", "device_gbps": None, "scale": 1.0, **PAD, **rates, **changes})


@contextmanager
def accelerator(
    model: nn.Module | None = None, clock: Clock | None = None, **changes: Any
) -> Iterator[EmulatedAccelerator]:
    device = EmulatedAccelerator(rig(**changes), clock=clock)
    try:
        if model is not None:
            device.attach(model)
        yield device
    finally:
        device.close()


def worked(device: EmulatedAccelerator, nbytes: int, inputs: list[Transfer], submitted: float) -> HostSpan:
    """A piece of host work that takes no time here."""
    return device.host_work(lambda: HostSpan(0.0, device.clock.now()), nbytes, inputs, submitted)


CONFIGS: dict[str, dict[str, Any]] = {
    "zero-offload": {"topk_ratio": 0.0, "update_interval": 1, "overlap_step": False, "pipeline": "none"},
    "pipelined": {"topk_ratio": 0.25, "update_interval": 2, "overlap_step": False, "select_interval": 1},
    "overlapped": {"topk_ratio": 0.25, "update_interval": 3, "select_interval": 2, "max_grad_norm": 0.5},
    "twin-flow": {"topk_ratio": 0.1, "update_interval": 4, "offload_ratio": 0.6, "apply_lag": 2},
    "mean": {"topk_ratio": 0.25, "update_interval": 3, "deferred_update": "mean", "full_warm_up_rounds": 2},
}


@pytest.mark.parametrize(
    ("name", "with_module", "dtype"),
    combinations(name=CONFIGS, with_module=[True, False], dtype=[torch.float32, torch.bfloat16]),
)
def test_the_weights_are_those_of_the_cpu(name: str, with_module: bool, dtype: torch.dtype) -> None:
    config = ZenFlowConfig(bucket_bytes=200, **CONFIGS[name])
    expected = train(seeded(Stack, dtype), config, steps=9, with_module=with_module)
    model = seeded(Stack, dtype)
    slow = {"link_d2h_gbps": 0.005, "link_h2d_gbps": 0.002, "host_gbps": 0.005, "device_gbps": 1.0}
    with accelerator(model, None, forward_ms=0.5, backward_ms=1.0, **slow) as device:
        assert_same_run(train(model, config, steps=9, device=device, with_module=with_module), expected)


def pads(device: EmulatedAccelerator, work: Callable[[], Any]) -> float:
    """Milliseconds of pad in `work`."""
    begin = device.mark()
    work()
    return round(1e3 * device.elapsed_s(begin, device.mark()), 6)


def passes(model: nn.Module, device: EmulatedAccelerator, count: int = 1) -> None:
    """Forward and backward, then what an optimizer says in `step()`."""
    for step in range(count):
        model(tokens_of(step)).backward()
    device.begin_step()


FORWARD, BOTH = PAD["forward_ms"], PAD["forward_ms"] + PAD["backward_ms"]


@pytest.mark.parametrize("kind", [None, True, False, "no list of layers"])
def test_pads_with_and_without_gradient_checkpointing_and_layers(kind: Any) -> None:
    model = seeded(Flat) if isinstance(kind, str) else seeded(Stack, reentrant=kind, depth=3)
    with accelerator(model) as device:
        for count in (1, 1, 3):
            assert pads(device, lambda count=count: passes(model, device, count)) == pytest.approx(count * BOTH)  # type: ignore[misc]


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_pads_are_spread_over_the_layers(reentrant: bool | None) -> None:
    model = seeded(Stack, reentrant=reentrant, depth=4)
    with accelerator(model) as device:
        passes(model, device)
        assert device.slack.segments == 8
        loss = model(tokens_of(0))
        assert pads(device, loss.backward) == pytest.approx(PAD["backward_ms"])  # all of it before step()
        assert pads(device, device.begin_step) == 0


def test_another_rig_holds_from_the_next_step_on() -> None:
    model = seeded(Stack, depth=3)
    with accelerator(model, link_d2h_gbps=1e-3, link_h2d_gbps=1e-3) as device:
        passes(model, device)
        source, target = torch.ones(2500), torch.empty(2500)  # 10 ms
        before = device.d2h(source, target)
        device.set_rig(rig(forward_ms=6.0, backward_ms=10.0, link_d2h_gbps=5e-4, link_h2d_gbps=2e-3))
        assert pads(device, lambda: passes(model, device)) == pytest.approx(16.0)
        after, back = device.d2h(source, target), device.h2d(source, HostSpan(), device.mark())[0]
        for transfer, ms in ((before, 10.0), (after, 20.0), (back, 5.0)):
            transfer.wait()
            assert 1e3 * (transfer.end - transfer.begin) == pytest.approx(ms, rel=1e-3)
        assert device.rig.host_gbps == FAST_GBPS


def test_memory_is_counted_at_the_end_of_forward() -> None:
    model, held = seeded(Stack), [300]
    memory = EmulatedMemory(1000, 600, lambda: held[0])
    device = EmulatedAccelerator(rig(), memory)
    try:
        device.attach(model)
        assert (device.total_bytes(), device.peak_bytes()) == (1000, 0)
        passes(model, device)
        assert device.peak_bytes() == 900
        held[0] = 100
        passes(model, device)
        assert device.peak_bytes() == 900  # it was needed once
        device.reset_peak_bytes()
        passes(model, device)
        assert device.peak_bytes() == 700
        memory.activation_bytes = 901
        with pytest.raises(torch.OutOfMemoryError, match="1000 bytes of memory, a step needs 1001"):
            passes(model, device)
    finally:
        device.close()


def test_kernels_of_the_runtime_are_charged() -> None:
    with accelerator(device_gbps=2.0) as device:
        assert pads(device, lambda: device.charge(3_000_000)) == pytest.approx(1.5)
    with accelerator(device_gbps=None) as device:
        assert pads(device, lambda: device.charge(3_000_000)) == 0


class Hurried(RealClock):
    """The machine's clock, which is put forward where it would be waited for."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def now(self) -> float:
        return super().now() + self.ahead_s

    def sleep_until(self, moment_s: float) -> None:
        self.ahead_s += max(0.0, moment_s - self.now())


class Slow(nn.Module):
    """Takes longer than any pad."""

    def __init__(self, clock: Hurried) -> None:
        super().__init__()
        self._clock = clock

    def forward(self, x: Tensor) -> Tensor:
        self._clock.sleep(0.1)
        return x


def test_work_beyond_its_pad_is_counted_and_takes_its_time() -> None:
    model, clock = seeded(Stack), Hurried()
    model.add_module("slow", Slow(clock))
    assert isinstance(model.layers, nn.ModuleList)
    model.layers[0] = nn.Sequential(model.layers[0], Slow(clock))
    with accelerator(model, clock) as device:
        begin = device.mark()
        passes(model, device)
        assert device.slack.late >= 1
        assert min(device.slack.margins_s) < -0.05
        assert device.elapsed_s(begin, device.mark()) > 0.09
        device.reset_peaks()
        assert (device.slack.segments, device.slack.late, device.slack.margins_s) == (0, 0, [])


def test_a_host_below_its_rate_is_counted() -> None:
    clock = Hurried()
    with accelerator(clock=clock, host_gbps=1e3) as device:
        begin_s = clock.now()

        def slow() -> HostSpan:
            clock.sleep(0.05)
            return HostSpan(begin_s, clock.now())

        span = device.host_work(slow, 1000, [], begin_s)
        assert device.slack.late_host_s > 0.04
        assert span.seconds == pytest.approx(device.slack.host_s + device.slack.late_host_s)


def test_in_simulated_time_real_work_is_never_late_and_is_told() -> None:
    model = seeded(Stack)
    assert isinstance(model.layers, nn.ModuleList)
    model.layers[0] = nn.Sequential(model.layers[0], Busy())
    with accelerator(model) as device:
        assert pads(device, lambda: passes(model, device)) == pytest.approx(BOTH)
        assert (device.slack.late, device.slack.margins_s) == (0, [])
        assert max(device.slack.used) > 1  # more than the pad has
        begin = device.mark()
        assert worked(device, 10**9, [], begin).seconds == pytest.approx(1e-6)
        assert device.slack.late_host_s == 0


class Busy(nn.Module):
    """Computes for longer than any pad."""

    def forward(self, x: Tensor) -> Tensor:
        until = time.thread_time() + 0.03
        while time.thread_time() < until:
            pass
        return x


def test_copies_of_one_direction_are_one_after_the_other() -> None:
    with accelerator(link_d2h_gbps=0.001, link_h2d_gbps=0.002) as device:
        begin = device.mark()
        sources = [torch.arange(1000.0), torch.arange(500.0)]
        targets = [torch.zeros(1000), torch.zeros(500)]
        first, second = (device.d2h(a, b) for a, b in zip(sources, targets, strict=True))
        second.wait()  # as the host engine does before it begins
        span = worked(device, 0, [second], begin)
        back, arrived = device.h2d(targets[1], span, begin)
        for transfer in (first, second, back):
            transfer.wait()
            assert transfer.done()
        assert device.elapsed_s(begin, first.end) == pytest.approx(4e-3, abs=1e-6)  # 4000 bytes at 10^6 a second
        assert device.elapsed_s(begin, second.end) == pytest.approx(6e-3, abs=1e-6)
        assert span.begin_s >= second.end
        assert device.elapsed_s(span.end_s, back.end) == pytest.approx(1e-3, abs=1e-6)
        assert torch.equal(targets[0], sources[0])
        assert torch.equal(arrived, sources[1])
        device.join(back, arrived)
        assert device.elapsed_s(back.end, device.mark()) == 0
        assert device.passed(begin)


def test_a_slow_core_slows_the_host_and_a_busy_link_does_while_it_is_busy() -> None:
    with accelerator(host_gbps=0.001, slow_core=0.5) as device:
        assert worked(device, 5000, [], device.mark()).seconds == pytest.approx(10e-3)
    with accelerator(host_gbps=0.001, link_d2h_gbps=0.001, link_contention=0.75) as device:
        begin = device.mark()
        device.d2h(torch.zeros(1000), torch.zeros(1000))  # 4 ms of the first 10
        span = worked(device, 10_000, [], begin)
        assert span.seconds == pytest.approx(10e-3 + 0.75 * 4e-3)
        assert device.slack.host_s == pytest.approx(span.seconds)  # it is the rig that is slow, not this machine
        assert worked(device, 10_000, [], device.clock.now()).seconds == pytest.approx(10e-3)


def test_a_noisy_link_takes_another_time_for_every_copy_and_the_same_in_every_run() -> None:
    runs = []
    for _ in range(2):
        with accelerator(link_d2h_gbps=0.01, link_noise=0.5) as device:
            copies = [device.d2h(torch.zeros(250), torch.zeros(250)) for _ in range(200)]
            runs.append([device.elapsed_s(copy.begin, copy.end) / 1e-4 for copy in copies])
            copies[-1].wait()
    assert runs[0] == pytest.approx(runs[1], rel=1e-6)
    logs = torch.tensor(runs[0]).log()
    assert float(logs.mean()) == pytest.approx(0.0, abs=0.15)
    assert float(logs.std()) == pytest.approx(0.5, rel=0.2)


def test_a_copy_is_not_there_before_its_time() -> None:
    with accelerator(link_d2h_gbps=1e-6) as device:  # 200 bytes take 0.2 s
        begin, target = device.mark(), torch.ones(50)
        transfer = device.d2h(torch.zeros(50), target)
        device.clock.sleep_until(begin + 0.199)
        assert not transfer.done()
        assert target.tolist() == [1.0] * 50
        transfer.wait()
        assert device.clock.now() == pytest.approx(begin + 0.2)
        assert target.tolist() == [0.0] * 50


class BrokenLink(EmulatedAccelerator):
    """Loses one copy to the host, as a buffer of the wrong size would."""

    def __init__(self, broken: int) -> None:
        super().__init__(rig())
        self._left = broken

    def d2h(self, source: Tensor, target: Tensor) -> Transfer:
        self._left -= 1
        return super().d2h(source, target if self._left else torch.zeros(2, 3, 5))


@pytest.mark.parametrize(
    ("broken", "named"),
    [(3, r"masters of layers\.0\.outer\.weight"), (7, r"embedding\.weight and 5 more")],
    ids=["masters", "gradient"],
)
def test_a_failed_copy_ends_training_with_its_cause(broken: int, named: str) -> None:
    """Of each of six weights the masters are read, then the gradients are sent together."""
    device = BrokenLink(broken)
    config = ZenFlowConfig(topk_ratio=0.0, update_interval=1, overlap_step=False)
    try:
        with pytest.raises(HostEngineError, match=f"{named} failed: .*size of tensor"):
            train(seeded(Stack), config, steps=3, device=device)
    finally:
        device.close()
