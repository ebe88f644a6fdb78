"""The simulated training thread: what the runtime counts takes its time, and the planner's simulator agrees."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.zenflow.small import Stack, seeded, train
from zenflow import ZenFlowConfig
from zftune.emulation import EmulatedAccelerator, Rig
from zftune.emulation.machines import load_rig, rig_document
from zftune.planner.model import ModelFacts
from zftune.planner.rates import Rates
from zftune.planner.simulate import simulate
from zftune.planner.split import split_of
from zftune.profile.measure import Measurement, Task, measure
from zftune.profile.verdict import thread_ms
from zftune.workload import load_text

FAST = dict.fromkeys(("link_d2h_gbps", "link_h2d_gbps", "host_gbps"), 1e6)
COSTS = {"weight_us": 1000.0, "bucket_us": 8000.0, "job_us": 5000.0}


class Counted(EmulatedAccelerator):
    def __init__(self, rig: Rig) -> None:
        super().__init__(rig)
        self.seen: Counter[str] = Counter()

    def charge_thread(self, weights: int = 0, buckets: int = 0, jobs: int = 0, launches: int = 0) -> None:
        self.seen.update(weights=weights, buckets=buckets, jobs=jobs, launches=launches)
        super().charge_thread(weights, buckets, jobs, launches)


@pytest.fixture
def device() -> Iterator[Counted]:
    costs: dict[str, Any] = {f"thread_{name}": us for name, us in COSTS.items()}
    device = Counted(Rig("thread", "", 3.0, 6.0, **FAST, device_gbps=None, scale=1.0, **costs))
    yield device
    device.close()


def test_calls_take_the_threads_time_and_hold_up_what_is_launched_next(device: Counted) -> None:
    device.charge_thread(weights=2, buckets=1, jobs=1)  # 2 + 8 + 5 ms
    assert device.clock.now() == pytest.approx(15e-3)
    assert device.mark() == pytest.approx(15e-3)
    device._segment(10e-3)
    device.charge_thread(buckets=1)  # beside 10 ms of work
    assert (device.clock.now(), device.mark()) == pytest.approx((23e-3, 25e-3))
    device.charge_thread(buckets=1)
    assert device.mark() == device.clock.now() == pytest.approx(31e-3)
    assert (device.slack.thread_s, device.slack.thread_idle_s) == pytest.approx((31e-3, 15e-3 + 6e-3))


def test_the_runtime_counts_weights_buckets_and_jobs(device: Counted) -> None:
    """Twelve steps of a stack of two layers, in windows of three."""
    model = seeded(Stack, torch.float32)
    config = ZenFlowConfig(topk_ratio=0.0, update_interval=3, bucket_bytes=700)
    device.attach(model)
    train(model, config, steps=12, device=device)
    weights = len(list(model.parameters()))
    split = split_of(ModelFacts.from_module("stack", seeded(Stack, torch.float32)), config)
    assert device.seen["weights"] == 12 * weights == 12 * split.weights
    assert device.seen["buckets"] == 12 * split.buckets
    matrices = sum(parameter.dim() > 1 for parameter in model.parameters())
    assert device.seen["jobs"] == matrices + 4 * split.buckets  # the masters of each are read once
    assert device.slack.steps == 12
    counted_us = sum(device.seen[f"{name.removesuffix('_us')}s"] * us for name, us in COSTS.items())
    assert device.slack.thread_s == pytest.approx(counted_us / 1e6)


def test_in_real_time_the_real_thread_counts() -> None:
    from zenflow.clock import RealClock

    rig = Rig("thread", "", 3.0, 6.0, **FAST, device_gbps=None, scale=1.0, thread_weight_us=1e12)
    device = EmulatedAccelerator(rig, clock=RealClock())
    try:
        device.charge_thread(weights=1)  # else it would take twelve days
        assert device.slack.thread_s == 0
    finally:
        device.close()


MODEL = "tiny"


def profiled(config: ZenFlowConfig, **costs_us: float) -> tuple[Measurement, Rig]:
    spec = replace(load_rig("host-bound"), thread={f"thread_{name}": us for name, us in costs_us.items()})
    task = Task(
        model=MODEL,
        corpus=load_text(None),
        dtype=torch.bfloat16,
        micro_batch=1,
        sequence=16,
        seed=0,
        torch_device=torch.device("cpu"),
        rig=spec,
    )
    elements = sum(math.prod(shape) for shape in ModelFacts.from_name(MODEL).weights if len(shape) > 1)
    return measure(task, config, max(4, 4 * config.longest_window), lambda _done, _all: None), spec.for_elements(
        elements
    )


SETTINGS = {
    "in turn": ZenFlowConfig.zero_offload(),
    "by bucket": ZenFlowConfig.zero_offload(pipeline="bucket"),
    "overlapped": ZenFlowConfig(topk_ratio=0.05, update_interval=8, select_strategy="step", select_interval=1 << 20),
}


@pytest.mark.parametrize(
    "costs", [COSTS, {"bucket_us": 20000.0}, {"weight_us": 9000.0}], ids=["all", "bucket", "weight"]
)
@pytest.mark.parametrize("setting", SETTINGS)
def test_steps_are_those_of_the_planner(setting: str, costs: dict[str, float]) -> None:
    config = SETTINGS[setting]
    run, rig = profiled(config, **costs)
    found = simulate(Rates.of_rig(rig), split_of(ModelFacts.from_name(MODEL), config), config)
    last = run.step_ms[-config.longest_window :]
    assert sum(last) == pytest.approx(sum(found.steps_ms), rel=1e-3)
    assert run.slack is not None
    document = rig_document(rig, [run.slack], attempts=1)
    assert document["thread_idle_ms"] == pytest.approx(found.stall_ms["thread"], rel=0.1, abs=1.0)


def test_a_profile_on_a_rig_names_the_thread_where_it_binds() -> None:
    for bucket_us, binds in ((20.0, False), (600_000.0, True)):
        run, rig = profiled(SETTINGS["overlapped"], bucket_us=bucket_us)
        stalls = {
            cause: sum((step.stall_ms or {}).get(cause, 0.0) for step in run.stats) for cause in ("host", "h2d", "d2h")
        }
        steps = len(run.stats)
        assert run.slack is not None
        document = {
            "rig": rig_document(rig, [run.slack], attempts=1),
            "step_ms": {"mean": sum(run.step_ms) / steps},
            "stall": {
                "ms_per_step": sum(stalls.values()) / steps,
                "by_cause": {cause: ms / steps for cause, ms in stalls.items()},
            },
        }
        assert (thread_ms(document) is not None) == binds
