"""What a tuned run leaves in the store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.zftune.conftest import MINI_TIMELINE
from tests.zftune.tuner.surfaces import START, make
from zenflow import ZenFlowConfig
from zftune.planner import Rates
from zftune.profile.measure import Task
from zftune.rig_files import load_rig
from zftune.store import Query, Ratios, RunState, open_store
from zftune.tuner.builtin import Training
from zftune.tuner.ratios import measured_ratios
from zftune.tuner.recording import Recording
from zftune.tuner.run import facts_of, with_sampler
from zftune.tuner.search import SearchOptions
from zftune.workload import load_text


def test_a_gain_becomes_a_preset_with_its_evidence(mini_model: Path, mini_rig: Path) -> None:
    task = Task(
        model=str(mini_model), corpus=load_text(None), dtype=torch.bfloat16, micro_batch=1, sequence=16, seed=0,
        torch_device=torch.device("cpu"), rig=load_rig(str(mini_rig)),
    )  # fmt: skip
    config = START.config(ZenFlowConfig())
    with open_store("sqlite://", environment={"HOME": "/nowhere"}) as store, Training(task, config) as training:
        recording = Recording(store, facts_of(training), "published")
        assert recording.crashed() == ()
        search, driver = make(1, 0.03)
        recorder = recording.begin(search)
        assert recorder is not None
        while (request := search.next()) is not None:
            assert recorder.before(search, request) is None
            driver.run(search, most=1)
            recorder.after(search, request, driver.outcomes[-1])
        recording.finish(search)
        assert [notice for notice in recording.notices if "preset" in notice] == []
        preset = store.find_preset(_query(recording))
        assert preset is not None
        assert preset.preset.knobs == search.book.incumbent.setting.knobs()
        gain = search.book.gain
        assert gain is not None
        assert preset.preset.evidence.gain == pytest.approx(gain.share)
        assert preset.preset.evidence.gain_error == pytest.approx(2 * gain.error)
        assert [run.state for run in store.runs()] == [RunState.FINISHED]


def test_ratios_are_those_of_the_machine(mini_model: Path, mini_rig: Path) -> None:
    task = Task(
        model=str(mini_model), corpus=load_text(None), dtype=torch.bfloat16, micro_batch=1, sequence=16, seed=0,
        torch_device=torch.device("cpu"), rig=load_rig(str(mini_rig)),
    )  # fmt: skip
    with Training(task, START.config(ZenFlowConfig())) as training:
        for _ in range(12):
            training.step()
        steps = training.optimizer.history(wait=True)
        assert training.rig is not None
        rates, module = Rates.of_rig(training.rig), training.workload.module
    found, planned = measured_ratios(steps, module, rates), measured_ratios([], module, rates)
    compute = MINI_TIMELINE["forward_ms"] + MINI_TIMELINE["backward_ms"]
    assert planned == pytest.approx(Ratios(MINI_TIMELINE["host_ms"] / compute, MINI_TIMELINE["d2h_ms"] / compute))
    assert planned is not None
    assert found is not None
    assert found.host_over_compute == pytest.approx(planned.host_over_compute, rel=0.25)
    assert found.link_over_compute == pytest.approx(planned.link_over_compute, rel=0.25)
    slow = [replace(one, host_ms=3 * one.host_ms, stall_ms={}, step_ms=2 * compute) for one in steps]
    slower = measured_ratios(slow, module, rates)
    assert slower is not None
    assert slower.host_over_compute == pytest.approx(1.5 * planned.host_over_compute, rel=0.05)
    assert slower.link_over_compute == pytest.approx(planned.link_over_compute / 2)


def _query(recording: Recording) -> Query:
    return Query(key=recording.key, rig="mini")


def test_where_scipy_is_missing_tpe_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    options, notes = with_sampler(SearchOptions(seed=3))
    assert (options.sampler, options.seed) == ("tpe", 3)
    assert notes == ["scipy is not installed, which the sampler gp needs: tpe takes its place."]
    assert with_sampler(SearchOptions(sampler="random")) == (SearchOptions(sampler="random"), [])
