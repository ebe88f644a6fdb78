"""What is proposed: the fastest, then the least stale, then the smallest; never what does not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.tiers import everything
from tests.support.zftune.planner.fixtures import toy_machine
from zenflow import ZenFlowConfig
from zftune.errors import BadInputError
from zftune.planner.choosing import bound_of, choose, fits, late_grid, published_budget, ranked
from zftune.planner.closed_form import predict
from zftune.planner.model import Job, Machine, Memory, ModelFacts, Prediction
from zftune.planner.plan import verdict
from zftune.quality import assumed_coverage

MODEL = ModelFacts.from_text("1B,4,4096")  # few layers: seconds less
DEEP = ModelFacts.from_text("1B,12,2048")
JOB = Job(seq=1024, checkpointing=True)


def prediction(step_ms: float, *, staleness: float = 0.0, device: int = 0, host: int = 0) -> Prediction:
    return Prediction(
        step_ms=step_ms,
        compute_ms=step_ms,
        stall_ms_by_cause={"host": 0.0},
        host_utilisation=0.0,
        memory=Memory(device_bytes=device, host_bytes=host, pinned_bytes=0, migration_bytes=0),
        s_min=1,
        bound_by="compute",
        staleness_steps=staleness,
    )


def order(*choices: tuple[dict[str, Any], Prediction]) -> list[int]:
    """Numbers of the choices, best first."""
    made = [(ZenFlowConfig(bucket_bytes=number + 1, **knobs), one) for number, (knobs, one) in enumerate(choices)]
    return [config.bucket_bytes - 1 for config, _ in ranked(made)]


def test_within_two_percent_the_least_stale_comes_first() -> None:
    fast, stale = prediction(100.0, staleness=4.0), prediction(101.9, staleness=3.0)
    assert order(({}, fast), ({}, stale)) == [1, 0]
    assert order(({}, fast), ({}, prediction(102.1, staleness=3.0))) == [0, 1]


def test_then_the_least_device_memory_and_then_the_least_host_memory() -> None:
    small, large = prediction(101.0, device=5, host=9), prediction(100.0, device=6, host=1)
    assert order(({}, large), ({}, small)) == [1, 0]
    assert order(({}, prediction(100.0, host=9)), ({}, prediction(101.0, host=8))) == [1, 0]


def test_a_ratio_below_one_has_to_win() -> None:
    whole, part = prediction(100.0, staleness=4.0), prediction(99.0, staleness=1.0)
    assert order(({}, whole), ({"offload_ratio": 0.5}, part)) == [0, 1]
    assert order(({}, whole), ({"offload_ratio": 0.5}, replace(part, step_ms=97.0))) == [1, 0]
    # Nothing offloaded at all is no compromise: it needs no excuse.
    assert order(({}, whole), ({"offload_ratio": 0.0}, replace(part, staleness_steps=0.0))) == [1, 0]
    # Nor does it where it is more than 2% slower than the fastest, which is not proposed either.
    fast, early, none = (prediction(time, staleness=late) for time, late in ((100.0, 4.0), (101.5, 1.0), (102.5, 0.0)))
    assert order(({}, fast), ({}, early), ({"offload_ratio": 0.0}, none)) == [2, 1, 0]
    assert order(({}, fast), ({}, early), ({"offload_ratio": 0.0}, replace(none, step_ms=104.0))) == [1, 0, 2]


def test_nothing_to_choose_from() -> None:
    assert ranked([]) == []


def test_what_is_proposed_fits_and_keeps_to_the_budget() -> None:
    machine = toy_machine(device_memory_bytes=10 << 30)
    budget = published_budget(assumed_coverage)
    found = choose(DEEP, machine, JOB, budget=budget)
    assert len(found) > 3
    for config, one in found:
        assert fits(one, machine)
        assert (1 - assumed_coverage(config.topk_ratio)) * one.staleness_steps <= budget * 1.01
    best = found[0][1]
    assert best.step_ms <= 1.02 * min(one.step_ms for _, one in found)
    near = [one for config, one in found if one.step_ms <= 1.02 * best.step_ms and config.offload_ratio == 1]
    assert best.staleness_steps <= min(one.staleness_steps for one in near) + 0.06


def test_a_guess_keeps_a_lag_of_one_step_and_may_be_later() -> None:
    base = ZenFlowConfig(look_ahead="guess", window_phase="staggered")
    assert base.guesses
    assert not replace(base, apply_lag=2).guesses
    assert {one.lag for one in late_grid(base) if one.overlap_step} == {1}
    assert bound_of("published", None, guesses=True)[0] == bound_of("published", 1.0, guesses=True)[0] == 4.5
    assert bound_of("published", 1.0)[0] < 1


def test_exact_means_no_staleness() -> None:
    found = choose(MODEL, toy_machine(device_memory_bytes=10 << 30), JOB, budget=0.0)
    assert found
    assert {(config.overlap_step, config.update_interval) for config, _ in found} == {(False, 1)}
    assert {one.staleness_steps for _, one in found} == {0.0}
    # Synchronously every element on the device counts: more residents or selected columns win.
    assert found[0][1].step_ms < predict(MODEL, toy_machine(), JOB, ZenFlowConfig.zero_offload()).step_ms


def test_where_all_fits_and_the_host_is_slow_nothing_is_offloaded() -> None:
    machine = toy_machine(device_memory_bytes=80 << 30, host_gbps=5.0)
    config, best = choose(MODEL, machine, JOB, budget=published_budget(assumed_coverage))[0]
    assert config.offload_ratio == 0
    assert best.stall_ms == 0
    without = predict(MODEL, machine, JOB, config)
    sentences = verdict([(config, best)], {"no_offload": without, "zero_offload": without}, machine)
    assert sentences[0].startswith("Do not offload")


def test_where_nothing_fits_nothing_is_proposed() -> None:
    assert choose(MODEL, toy_machine(device_memory_bytes=4 << 30), JOB, budget=1.0) == []
    assert choose(MODEL, toy_machine(host_memory_bytes=1 << 30, device_memory_bytes=8 << 30), JOB, budget=1.0) == []


def test_staging_grows_where_weights_would_come_too_late() -> None:
    # All of it is shown in one step: 2 GB of weights, more than the default GiB on the device at a time.
    machine = toy_machine(host_gbps=1000.0, device_memory_bytes=16 << 30)
    found = choose(MODEL, machine, JOB, budget=published_budget(assumed_coverage))
    grown = [(config, one) for config, one in found if config.staging_bytes > 1 << 30]
    assert grown
    for config, one in grown:
        assert one.step_ms < predict(MODEL, machine, JOB, replace(config, staging_bytes=1 << 30)).step_ms
        # Whoever trains with its section has that room.
        assert ZenFlowConfig.from_ds_config(config.to_ds_config()) == replace(config, select_interval="auto")


def test_more_gpus_than_there_are() -> None:
    with pytest.raises(BadInputError, match="--gpus is 8; it must be an integer from 1 to 4"):
        choose(MODEL, toy_machine(), Job(gpus=8), budget=1.0)


def test_the_assumed_coverage_goes_through_the_published_point() -> None:
    assert assumed_coverage(0.01) == pytest.approx(0.889)
    assert assumed_coverage(0.0) == 0.0
    assert assumed_coverage(1.0) == 1.0
    # k = 0.1 and S = 4 have a mean staleness of 1.5 + 2.5 steps.
    assert published_budget(lambda topk: 0.75) == pytest.approx(1.0)


@pytest.mark.skipif(not everything(), reason="before a release: many seconds of a processor")
@pytest.mark.parametrize("micro_batch", [2, 4])
def test_not_offloading_is_looked_at_wherever_it_could_win(micro_batch: int) -> None:
    """The fastest of all is 2.2% faster and late: what would be proposed of the others is not."""
    model, machine = ModelFacts.from_name("Qwen2.5-1.5B"), Machine.load("h100-sxm")
    job = Job(gpus=8, seq=4096, micro_batch=micro_batch, checkpointing=True)
    found = choose(model, machine, job, budget=published_budget(assumed_coverage))
    without = predict(model, machine, job, ZenFlowConfig.zero_offload(offload_ratio=0.0, pipeline="bucket"))
    assert found[0][0].offload_ratio == 0
    assert found[0][1].step_ms == without.step_ms
