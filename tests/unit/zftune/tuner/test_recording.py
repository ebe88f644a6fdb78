"""What a tuned run leaves in the store."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.zftune.fixtures import MINI_TIMELINE
from tests.support.zftune.tuner.scene import Scene
from tests.support.zftune.tuner.surfaces import START, Recorded, make, recording_of
from zenflow import ZenFlowConfig
from zftune.cli.presets import facts as shown
from zftune.emulation.machines import load_rig
from zftune.planner.model import ModelFacts
from zftune.planner.rates import Rates
from zftune.profile.measure import Task, Training
from zftune.store import open_store
from zftune.store.account import Count
from zftune.store.store import Store
from zftune.store.types import Query, Ratios, RunState
from zftune.tuner import drivers, record
from zftune.tuner.evidence import Gain
from zftune.tuner.pace import Pace, ratios_of
from zftune.tuner.record import MachineInfo, Recording, trained_model
from zftune.tuner.setup import TuneRequest
from zftune.tuner.states import Adoption
from zftune.workload import load_text


def test_a_gain_becomes_a_preset_with_its_evidence(mini_model: Path, mini_rig: Path) -> None:
    task = Task(
        model=str(mini_model), corpus=load_text(None), dtype=torch.bfloat16, micro_batch=1, sequence=16, seed=0,
        torch_device=torch.device("cpu"), rig=load_rig(str(mini_rig)),
    )  # fmt: skip
    config = START.config(ZenFlowConfig())
    with open_store("sqlite://", environment={"HOME": "/nowhere"}) as store, Training(task, config) as training:
        workload = training.workload
        model = trained_model(workload.module, workload.dtype)
        recording = recording_of(store, MachineInfo.now("mini"), model_id=model.model_id, sequence=16)
        assert recording.barred() == ()
        search, driver = make(1, 0.03)
        recorder = recording.begin(search)
        assert recorder is not None
        for step in range(20, 10_000, 20):
            request = search.next()
            if request is None:
                break
            assert recorder.before(search, request) is None
            driver.run(search, most=1)
            recorder.curve.step(step, 100.0, None)
            recorder.after(search, request, driver.outcomes[-1])
        (run,) = store.runs()
        steps = [one.step for one in store.decisions(run.run_id)]
        assert len(steps) > 2
        assert all(one is not None and one % 20 == 0 for one in steps)
        assert steps == sorted(one or 0 for one in steps)
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
        assert (preset.preset.evidence.baseline, len(store.presets())) == ("start", 1)
        book = search.book
        room = search.add(replace(START, offload_ratio=0.9), "reference")
        room.keep([4.0])
        book.move_to(room)  # nobody has compared it
        book.gain = None
        recording.keep_preset(search)
        assert len(store.presets()) == 1
        better = search.add(replace(START, topk_ratio=0.4), "search")
        better.keep([3.9])
        book.adopt(better, Adoption(better.number, room.number, 0.1, 0.01))
        book.gain = Gain(0.1, 0.01)
        recording.keep_preset(search)
        (kept,) = (one for one in store.presets() if one.knobs == better.setting.knobs())
        assert (kept.evidence.baseline, round(kept.evidence.gain, 6)) == ("planner", 0.1)
        assert shown(kept)["against"].endswith(" ms, the setting that the quality or GPU memory asked for")
        unproven = search.add(replace(START, topk_ratio=0.3), "search")
        unproven.keep([3.8])
        book.adopt(unproven, Adoption(unproven.number, better.number, 0.8, 0.5))
        book.gain = Gain(0.8, 0.5)
        recording.keep_preset(search)
        assert len(store.presets()) == 2


def test_ratios_are_those_of_the_machine(mini_model: Path, mini_rig: Path) -> None:
    task = Task(
        model=str(mini_model), corpus=load_text(None), dtype=torch.bfloat16, micro_batch=1, sequence=16, seed=0,
        torch_device=torch.device("cpu"), rig=load_rig(str(mini_rig)),
    )  # fmt: skip
    with Training(task, START.config(ZenFlowConfig())) as training:
        for _ in range(12):
            training.step()
        steps = training.optimizer.history(wait=True)
        rig, model = task.rig_for(training.workload), ModelFacts.from_module("mini", training.workload.module)
    assert rig is not None
    rates = Rates.of_rig(rig)
    found, planned = ratios_of(model, Pace.of(steps), rates), ratios_of(model, None, rates)
    compute = MINI_TIMELINE["forward_ms"] + MINI_TIMELINE["backward_ms"]
    assert planned == pytest.approx(Ratios(MINI_TIMELINE["host_ms"] / compute, MINI_TIMELINE["d2h_ms"] / compute))
    assert planned is not None
    assert found is not None
    assert found.host_over_compute == pytest.approx(planned.host_over_compute, rel=0.25)
    assert found.link_over_compute == pytest.approx(planned.link_over_compute, rel=0.25)
    slow = [replace(one, host_ms=3 * one.host_ms, stall_ms={}, step_ms=2 * compute) for one in steps]
    slower = ratios_of(model, Pace.of(slow), rates)
    assert slower is not None
    assert slower.host_over_compute == pytest.approx(1.5 * planned.host_over_compute, rel=0.05)
    assert slower.link_over_compute == pytest.approx(planned.link_over_compute / 2)


def _query(recording: Recording) -> Query:
    return Query(key=recording.key, rig="mini")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(str(tmp_path / "zftune.db")) as opened:
        yield opened


def test_a_training_begins_and_ends_while_its_store_is_still_being_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    opens, opened = threading.Event(), threading.Event()

    def slow() -> Store:
        opens.wait(600)
        opened.set()
        return open_store("sqlite://")

    monkeypatch.setenv("ZFTUNE_DB", "postgresql://me@host/db")
    monkeypatch.setattr("zftune.store.open_store", slow)
    optimizer = Scene().optimizer
    driver = drivers.LocalDriver(optimizer, TuneRequest(quality="published"), None)
    ended = drivers.Ended(
        steps=3, begins=8, over=False, given_up=False, remarks=(), count=Count(), incumbent=None, gain=None
    )
    for said in driver.end(ended):
        assert "ended before a first measurement" in said[1]
    driver.close()
    assert not opened.is_set()
    opens.set()
    assert opened.wait(60)
    optimizer.close()


def test_a_training_does_not_wait_for_a_server_that_takes_its_last_words(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, tuner = threading.Event(), Recorded(store, 1)
    tuner.choose()
    monkeypatch.setattr(record, "_FINISH_S", 0.05)
    monkeypatch.setattr(Store, "is_server", True)
    monkeypatch.setattr(tuner.recorder, "finish", lambda search, *, unfinished: goes_on.wait(60))
    assert not tuner.recording.finish_soon(tuner.search, unfinished=True)
    goes_on.set()
    monkeypatch.setattr(record, "_FINISH_S", 60.0)
    assert tuner.recording.finish_soon(tuner.search, unfinished=True)
