"""The room for updated weights on the device: order, bound, and that nobody waits for it in vain."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from tests.zenflow.cases import assert_same, case_of, run
from zenflow import EmulatedAccelerator, Rig, ZenFlowAdamW, ZenFlowConfig
from zenflow.arrivals import Arrivals
from zenflow.device import CpuDevice
from zenflow.host.engine import Job


def job_of(nbytes: int) -> Job:
    result = torch.zeros(nbytes, dtype=torch.uint8)
    return Job("a job", CpuDevice(), None, nbytes=0, inputs=[], result=result)


def asked(jobs: list[Job]) -> list[bool]:
    return [job._asked is not None for job in jobs]


def test_results_are_asked_for_in_turn_as_there_is_room() -> None:
    arrivals = Arrivals(100)
    jobs = [job_of(nbytes) for nbytes in (60, 30, 50, 10)]
    arrivals.want(jobs)
    assert asked(jobs) == [True, True, False, False]  # nobody overtakes
    assert arrivals.nbytes == 90
    arrivals.done(jobs[0])
    assert asked(jobs) == [True, True, True, True]
    for job in jobs[1:]:
        arrivals.done(job)
    assert arrivals.nbytes == 0


def test_one_that_is_larger_than_the_room_goes_alone() -> None:
    arrivals = Arrivals(10)
    jobs = [job_of(nbytes) for nbytes in (50, 1)]
    arrivals.want(jobs)
    assert asked(jobs) == [True, False]
    arrivals.done(jobs[0])
    assert asked(jobs) == [True, True]


def test_who_is_wanted_twice_or_done_out_of_turn_is_counted_once() -> None:
    arrivals = Arrivals(10)
    jobs = [job_of(8) for _ in range(3)]
    arrivals.want(jobs)
    arrivals.want(reversed(jobs))
    arrivals.done(jobs[2])  # somebody needed it and asked himself
    assert asked(jobs) == [True, False, False]
    arrivals.done(jobs[0])
    assert asked(jobs) == [True, True, False]
    arrivals.done(jobs[1])
    arrivals.done(job_of(5))  # never wanted
    assert arrivals.nbytes == 0


def test_any_order_keeps_the_bound() -> None:
    rng = random.Random(7)
    for _ in range(200):
        arrivals = Arrivals(rng.randint(1, 60))
        jobs = [job_of(rng.randint(1, 40)) for _ in range(12)]
        arrivals.want(jobs)
        waiting = list(jobs)
        while waiting:
            on_their_way = [job for job in waiting if job._asked is not None]
            assert on_their_way
            assert len(on_their_way) == 1 or arrivals.nbytes <= arrivals.most_bytes
            assert arrivals.nbytes == sum(job.result.nbytes for job in on_their_way if job.result is not None)
            job = rng.choice(on_their_way)
            waiting.remove(job)
            arrivals.done(job)


@pytest.fixture
def device() -> Iterator[EmulatedAccelerator]:
    rates = {"link_d2h_gbps": 1.0, "link_h2d_gbps": 1.0, "host_gbps": 1.0}
    accelerator = EmulatedAccelerator(
        Rig("arrivals", "", forward_ms=1.0, backward_ms=1.0, device_gbps=None, scale=1.0, **rates)
    )
    yield accelerator
    accelerator.close()


@pytest.mark.parametrize("seed", range(12))
def test_weights_do_not_depend_on_the_room(seed: int, device: EmulatedAccelerator) -> None:
    case = case_of(seed, bucket_bytes=40, topk_ratio=0.1, offload_ratio=1.0)
    config = ZenFlowConfig(**{**vars(case.config), "staging_bytes": 1})
    ample = run(case, ZenFlowAdamW)
    narrow = run(case, lambda groups, **more: ZenFlowAdamW(groups, device=device, **more), config=config)
    assert_same(case, narrow, ample)
