"""What the runs of one study know of each other, in a file and on a server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from tests.zftune.store.conftest import Clock
from tests.zftune.store.examples import HARDWARE, KEY, KNOBS, MODEL, measurement
from zftune.store.runs import TAKEN
from zftune.store.store import Store
from zftune.store.types import LEASE_S, Decision, Run, TrialState


@pytest.fixture
def store(either: Store) -> Store:
    return either


def begun(store: Store, study: str = "night", **key: Any) -> Run:
    return store.begin_run(replace(KEY, **key), MODEL, HARDWARE, knobs=KNOBS, settings={"study": study, "seed": 1})


def setting(window: int) -> dict[str, Any]:
    return {**KNOBS, "update_interval": window}


def known(store: Store, run: Run) -> dict[int, tuple[TrialState, float | None, bool]]:
    """What a run hears of the others, by the window of their settings."""
    peers = store.peers(run.run_id)
    return {one.knobs["update_interval"]: (one.state, one.token_us, one.is_incumbent) for one in peers}


def test_a_run_hears_what_the_others_have_taken_tried_and_adopted(store: Store) -> None:
    one, other = begun(store), begun(store)
    trials = {window: store.add_trial(one, setting(window), source="search", claim=True) for window in (1, 2, 3, 4, 6)}
    store.add_trial(one, setting(8), source="search", rejected="too slow")
    for window in (1, 2, 3):
        store.add_measurement(one, trials[window].trial_id, measurement(700.0), state=TrialState.MEASURED)
    store.add_measurement(one, trials[2].trial_id, measurement(600.0))
    store.add_measurement(one, trials[2].trial_id, measurement(900.0, void_reason="throttled"))
    store.mark_in_flight(one, trials[4].trial_id)
    store.end_trial(one, trials[6].trial_id, TrialState.VOID)
    for window in (1, 2):
        store.add_decision(one, Decision("adopt", "it is faster", trials[window].number))
    measured, token_us = TrialState.MEASURED, 600.0 * 1000 / 4096
    assert known(store, other) == {
        1: (measured, 700.0 * 1000 / 4096, False),
        2: (measured, token_us, True),
        3: (measured, 700.0 * 1000 / 4096, False),
        4: (TrialState.IN_FLIGHT, None, False),
    }
    assert store.peers(one.run_id) == []
    store.add_decision(one, Decision("rollback", "by hand", trials[2].number))
    assert [window for window, (_, _, incumbent) in known(store, other).items() if incumbent] == [1]
    store.add_decision(one, Decision("guard", "the loss is nan", trials[1].number))
    assert [window for window, (_, _, incumbent) in known(store, other).items() if incumbent] == []


@pytest.mark.parametrize("key", ["model_id", "hw_id", "quality", "micro_batch", "world_size", "sequence", "dtype"])
def test_what_differs_in_its_key_or_its_name_is_of_another_study(store: Store, key: str) -> None:
    other: Any = {"model_id": "f" * 16, "hw_id": "e" * 16, "quality": "loose", "dtype": "float32"}.get(key, 7)
    one = begun(store)
    store.add_trial(one, setting(2), source="search")
    elsewhere = replace(KEY, **{key: other})
    far = store.begin_run(
        elsewhere, replace(MODEL, model_id=elsewhere.model_id), replace(HARDWARE, hw_id=elsewhere.hw_id), knobs=KNOBS,
        settings={"study": "night"},
    )  # fmt: skip
    assert store.peers(far.run_id) == store.peers(begun(store, "day").run_id) == []
    assert store.peers(store.begin_run(KEY, MODEL, HARDWARE, knobs=KNOBS).run_id) == []
    assert [one.knobs for one in store.peers(begun(store).run_id)] == [setting(2)]


def test_of_many_that_want_a_setting_one_gets_it(store: Store) -> None:
    runs = [begun(store) for _ in range(6)]
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lambda run: store.add_trial(run, KNOBS, source="search", claim=True), runs))
    assert sorted(one.state for one in found) == [TrialState.PLANNED, *[TrialState.REJECTED] * 5]
    assert {one.reason for one in found} == {None, TAKEN}
    assert store.add_trial(runs[0], KNOBS, source="peer").state is TrialState.PLANNED
    assert store.add_trial(begun(store, "day"), KNOBS, source="search", claim=True).state is TrialState.PLANNED


def test_what_a_dead_run_had_taken_is_free_again(store: Store, clock: Clock) -> None:
    dead = begun(store)
    trial = store.add_trial(dead, setting(2), source="search", claim=True)
    store.mark_in_flight(dead, trial.trial_id)
    measured = store.add_trial(dead, setting(3), source="search", claim=True)
    store.add_measurement(dead, measured.trial_id, measurement(), state=TrialState.MEASURED)
    store._living.release(dead.run_id)
    clock.now += LEASE_S + 1
    assert [*known(store, begun(store))] == [3]
    assert store.add_trial(begun(store), setting(2), source="search", claim=True).state is TrialState.PLANNED
