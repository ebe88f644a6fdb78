"""A training that is thrown away: nobody closes its tuner."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest

import zftune
from tests.zftune.tuner.test_attach import Loop
from zftune.store import open_store
from zftune.store.types import RunState, TrialState
from zftune.tuner.states import Request


def test_a_training_that_is_thrown_away_is_gone_on_with_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "z.db"
    monkeypatch.setenv("ZFTUNE_DB", f"sqlite:///{path}")

    def train() -> weakref.ref[zftune.Tuner]:
        loop = Loop()
        tuner = zftune.attach(loop.optimizer)
        loop.run(tuner, until=lambda: tuner.live is not None and is_challenger(tuner.live.request))
        return weakref.ref(tuner)

    def is_challenger(request: Request | None) -> bool:
        return request is not None and request.trial > 0

    def kept() -> tuple[list[RunState], set[TrialState]]:
        with open_store(str(path), environment={"HOME": str(tmp_path)}) as store:
            runs = store.runs()
            return [run.state for run in runs], {one.state for run in runs for one in store.trials(run.run_id)}

    tuner = train()
    gc.collect()
    assert tuner() is None
    runs, trials = kept()
    assert runs == [RunState.RUNNING]
    assert TrialState.IN_FLIGHT in trials
    loop = Loop()
    again = zftune.attach(loop.optimizer)
    loop.run(again, until=lambda: again.live is not None)
    again.close()
    loop.optimizer.close()
    runs, trials = kept()
    assert runs == [RunState.LOST]  # the same one
    assert {TrialState.IN_FLIGHT, TrialState.CRASHED}.isdisjoint(trials)
