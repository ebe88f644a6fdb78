"""A training that is thrown away: nobody closes its tuner."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest

import zftune
from tests.support.zftune.tuner.loop import Loop
from zftune.store import open_store
from zftune.store.types import RunState, TrialState
from zftune.tuner.states import Request


def is_challenger(request: Request | None) -> bool:
    return request is not None and request.trial > 0


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


def test_a_search_ends_with_its_optimizer_and_the_next_training_goes_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZFTUNE_DB", f"sqlite:///{tmp_path / 'z.db'}")
    kept: list[tuple[Loop, zftune.Tuner]] = []  # as a notebook does
    for _ in range(2):
        loop = Loop()
        tuner = zftune.attach(loop.optimizer)
        loop.run(tuner, until=lambda: tuner.live is not None and is_challenger(tuner.live.request))  # noqa: B023
        loop.optimizer.close()
        assert not tuner.searching
        assert tuner.conclusion
        with open_store(str(tmp_path / "z.db"), environment={"HOME": str(tmp_path)}) as store:
            assert [one.state for one in store.runs()] == [RunState.LOST]
        kept.append((loop, tuner))
    assert kept[0][1].run_id == kept[1][1].run_id


def test_what_a_tuner_sets_at_the_end_is_no_hindrance_to_closing() -> None:
    loop = Loop()
    tuner = zftune.attach(loop.optimizer, store=False)
    loop.step()
    seen: list[bool] = []
    handle = loop.optimizer.register_close_hook(lambda: seen.append(loop.optimizer.trains))
    removed = loop.optimizer.register_close_hook(lambda: seen.append(False))
    removed.remove()
    loop.optimizer.close()
    loop.optimizer.close()  # again: nothing is left to do
    assert seen == [True]
    assert handle.id in loop.optimizer._close_hooks
    assert not tuner.searching


def test_an_optimizer_ends_whatever_its_hooks_do() -> None:
    loop = Loop()

    def fail() -> None:
        raise RuntimeError("of the hook")

    loop.optimizer.register_close_hook(fail)
    loop.step()
    with pytest.raises(RuntimeError, match="of the hook"):
        loop.optimizer.close()
    assert not loop.optimizer.trains
