"""Several searches of a study: none tries what another has taken, and each looks first at what another has adopted."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from tests.zftune.store.examples import measurement
from tests.zftune.tuner.scene import Scene
from tests.zftune.tuner.surfaces import START, make
from zftune.store import open_store
from zftune.store.account import Count
from zftune.store.store import Store
from zftune.store.types import Decision, Hardware, Model, PeerTrial, TrialState
from zftune.tuner import drivers, recording
from zftune.tuner.recorder import StoreRecorder
from zftune.tuner.recording import MachineInfo, Recording, RunFacts
from zftune.tuner.space import Setting
from zftune.tuner.states import Outcome, Request
from zftune.tuner.training_info import TuneRequest

FACTS = RunFacts(model=Model(model_id="a" * 16, dtype="bfloat16"), micro_batch=1, sequence=64)
HERE = MachineInfo(hardware=Hardware(hw_id="b" * 16), usable_cores=8.0, versions={})


class Tuner:
    """A search of a study, and its training on a surface; one measurement at a time."""

    def __init__(self, store: Store, number: int, *, study: str = "night", seed: int = 3) -> None:
        self.search, driver = make(seed, 0.01, sampler="random")
        self.driver = replace(driver, random=np.random.default_rng(number))
        self.recording = Recording(store, FACTS, "published", HERE, study)
        found = self.recording.begin(self.search)
        assert found is not None
        self.recorder: StoreRecorder = found
        self.over = False

    def choose(self) -> Request | None:
        request = self.recorder.choose(self.search)
        if request is None:
            self.over = True
            self.recording.finish(self.search)
            return None
        assert self.recorder.before(self.search, request) is None
        return request

    def tell(self, request: Request, outcome: Outcome | None = None) -> None:
        outcome = outcome or self.driver.measure(request)
        self.search.tell(outcome)
        self.recorder.after(self.search, request, outcome)
        assert self.recorder.notices == []

    def explored(self) -> list[str]:
        return [
            str(one.setting) for one in self.search.book.trials if one.samples and one.source not in ("start", "peer")
        ]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(str(tmp_path / "zftune.db")) as opened:
        yield opened


def run(tuners: Sequence[Tuner]) -> None:
    """All of them choose, and then all of them measure."""
    while not all(one.over for one in tuners):
        requests = [(one, one.choose()) for one in tuners if not one.over]
        for one, request in requests:
            if request is not None:
                one.tell(request)


def test_three_tuners_try_each_setting_once_and_share_what_they_adopt(store: Store) -> None:
    tuners = [Tuner(store, number) for number in range(3)]
    run(tuners)
    tried = Counter(setting for one in tuners for setting in one.explored())
    assert len(tried) > 9
    assert max(tried.values()) == 1
    heard = [trial for one in tuners for trial in one.search.book.trials if trial.source == "peer"]
    assert heard
    adopted = {
        str(one.search.book.trials[adoption.trial].setting) for one in tuners for adoption in one.search.book.adoptions
    }
    assert {str(trial.setting) for trial in heard} <= adopted
    surface = tuners[0].driver.surface
    times = [surface.ms(one.search.book.incumbent.setting) for one in tuners]
    assert max(times) <= 1.03 * min(times)  # the last to hear of the best may find it no faster than its own


def test_what_holds_once_a_search_began_again_is_kept_as_a_preset(store: Store) -> None:
    tuner = Tuner(store, 1)
    while not tuner.search.book.adoptions:
        request = tuner.choose()
        assert request is not None
        tuner.tell(request)
    tuner.search._changed_times("Step times have changed: the search begins again.")
    while not tuner.search.book.incumbent.samples:
        request = tuner.choose()
        assert request is not None
        tuner.tell(request)
    assert tuner.search.book.trials[0].samples == []
    tuner.recording.keep_preset(tuner.search)
    assert [one.knobs for one in store.presets()] == [tuner.search.book.incumbent.setting.knobs()]


def test_without_a_study_each_is_alone(every_fault: None, store: Store) -> None:
    tuners = [Tuner(store, number, study="") for number in range(2)]
    run(tuners)
    assert max(Counter(setting for one in tuners for setting in one.explored()).values()) == 2
    assert not [trial for one in tuners for trial in one.search.book.trials if trial.source == "peer"]


def test_what_another_has_adopted_takes_four_measurements(store: Store) -> None:
    first, second = Tuner(store, 1), Tuner(store, 2)
    request = second.choose()
    assert request is not None
    assert request.role == "start"
    second.tell(request)
    while not first.search.book.adoptions:
        request = first.choose()
        assert request is not None
        first.tell(request)
    best, seen = first.search.book.incumbent.setting, []
    while not second.search.book.adoptions:
        request = second.choose()
        assert request is not None
        seen.append((request.role, request.setting == best))
        second.tell(request)
    assert seen == [("explore", True), ("a2", False), ("b", True), ("a2", False)]  # one alone tells no noise between
    assert second.search.book.incumbent.source == "peer"


def adopted_elsewhere(store: Store, like: Tuner, relative: float) -> Setting:
    """Another run of a tuner's study that has adopted what takes so much of the starting point's time."""
    judged = [like.search.book.judge(setting) for setting in like.search.book.space.settings()]
    best = next(one.told.setting for one in judged if not one.rejected and not one.taken)
    run = store.begin_run(
        like.recording.key, FACTS.model, HERE.hardware, knobs=START.knobs(), settings={"study": "night"}
    )
    for setting, step_ms in ((START, 100.0), (best, 100.0 * relative)):
        trial = store.add_trial(run, setting.knobs(), source="start")
        store.add_measurement(run, trial.trial_id, measurement(step_ms), state=TrialState.MEASURED)
    store.add_decision(run, Decision("adopt", "it is faster", 1))
    return best


@pytest.mark.parametrize("relative", [0.1, 0.97], ids=["faster", "not faster"])
def test_a_comparison_is_let_go_where_another_has_adopted_what_is_faster(store: Store, relative: float) -> None:
    tuner, request = Tuner(store, 1), None
    while request is None or request.role != "a1":
        request = tuner.choose()
        assert request is not None
        step_ms = 40.0 if request.role in ("explore", "b") else 80.0
        tuner.tell(request, replace(tuner.driver.measure(request), steps_ms=(step_ms,) * request.steps))
    compared = tuner.search.book.trials[tuner.search.state.trial]  # type: ignore[union-attr]
    best = adopted_elsewhere(store, tuner, relative)
    request = tuner.choose()
    assert request is not None
    if relative > 0.5:  # than what looks as if it took half of the time
        assert (request.role, request.setting) == ("b", compared.setting)
        return
    assert (request.role, request.setting) == ("explore", best)
    tuner.tell(request)
    *_, kept = [one for one in store.decisions(tuner.recorder.run_id) if one.trial == compared.number]
    assert kept.kind == "keep"
    assert kept.reason.endswith(f"another tuner of the study has adopted {best}.")
    tuner.recording.finish(tuner.search, unfinished=True)
    again, _ = make(3, 0.01, sampler="random")
    later = Recording(store, FACTS, "published", HERE, "night")
    (record,) = [one for one in store.runs() if one.run_id == tuner.recorder.run_id]
    assert later.resume(record, again) is not None
    assert later.notices == []
    assert [note.reason for note in again.notes[:-1]] == [note.reason for note in tuner.search.notes]


def test_a_crash_elsewhere_is_none_here(store: Store) -> None:
    first, second = Tuner(store, 1), Tuner(store, 2)
    for one in (first, second):
        request = one.choose()
        assert request is not None
        one.tell(request)
    request = first.choose()
    assert request is not None
    assert request.role == "explore"
    first.tell(request, Outcome("crashed", reason="out of memory"))
    second.choose()
    assert second.search.book.judge(request.setting).reason == "it crashed before"


def test_a_run_of_a_study_is_gone_on_with(store: Store) -> None:
    tuners = [Tuner(store, number) for number in range(2)]
    for _ in range(8):
        for one in tuners:
            request = one.choose()
            assert request is not None
            one.tell(request)
    before = tuners[0]
    before.recording.finish(before.search, unfinished=True)
    again, _ = make(3, 0.01, sampler="random")
    later = Recording(store, FACTS, "published", HERE, "night")
    (record,) = [one for one in store.runs() if one.run_id == before.recorder.run_id]
    recorder = later.resume(record, again)
    assert later.notices == []
    assert recorder is not None
    assert [str(one.setting) for one in again.book.trials] == [str(one.setting) for one in before.search.book.trials]
    assert again.book.incumbent.setting == before.search.book.incumbent.setting
    request = recorder.choose(again)
    assert request is not None
    assert request.role == "start"  # the incumbent is measured again
    assert again.book.peers.keys() >= {one.setting for one in tuners[1].search.book.trials if one.samples} - {START}


def test_times_are_relative_to_a_common_start(store: Store) -> None:
    search, _ = make(3, 0.0)
    other = replace(START, update_interval=2, apply_lag=2)
    beginnings = {"same": START, "another": other}
    peers = []
    for run_id, beginning in beginnings.items():
        knobs = ((beginning, 100.0), (replace(START, topk_ratio=0.2), 80.0), (replace(START, topk_ratio=0.3), 70.0))
        for number, (setting, token_us) in enumerate(knobs):
            peers.append(
                PeerTrial(
                    run_id=run_id, number=number, knobs=setting.knobs(), state=TrialState.MEASURED, token_us=token_us,
                    is_incumbent=number == 2 and run_id == "another",
                )
            )  # fmt: skip
    assert search.book.hear(peers) == []  # nobody knows how fast it is against this start
    assert search.book.peers[replace(START, topk_ratio=0.2)] == pytest.approx(0.8)
    assert search.book.peers[other] is None
    peers = [replace(one, is_incumbent=one.number == 2 and one.run_id == "same") for one in peers]
    assert search.book.hear(peers) == [replace(START, topk_ratio=0.3)]


# --- a server that is away: no training waits -------------------------------------------------------------------------


def test_a_training_begins_and_ends_while_its_store_is_still_being_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    opens, opened = threading.Event(), threading.Event()

    def slow() -> Store:
        opens.wait(600)
        opened.set()
        return open_store("sqlite://")

    monkeypatch.setenv("ZFTUNE_DB", "postgresql://me@host/db")
    monkeypatch.setattr(drivers, "_user_store", slow)
    monkeypatch.setattr(drivers, "_thinker_beside", lambda _: Mock(waited_s=0.0))  # which nobody asks
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
    goes_on, tuner = threading.Event(), Tuner(store, 1)
    tuner.choose()
    monkeypatch.setattr(recording, "_FINISH_S", 0.05)
    monkeypatch.setattr(Store, "is_server", True)
    monkeypatch.setattr(tuner.recorder, "finish", lambda search, *, unfinished: goes_on.wait(60))
    assert not tuner.recording.finish_soon(tuner.search, unfinished=True)
    goes_on.set()
    monkeypatch.setattr(recording, "_FINISH_S", 60.0)
    assert tuner.recording.finish_soon(tuner.search, unfinished=True)
