"""Several processes tune different models against one database, each a whole search."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import fork_server
from tests.support.tiers import fast
from tests.support.zftune.tuner import searching
from zftune.store import open_store
from zftune.store.types import RunState
from zftune.tuner.messages import sentence

PROCESSES = fast(3, all_of=8)


@pytest.mark.smoke
@pytest.mark.timeout(180)
def test_processes_search_at_once(tmp_path: Path) -> None:
    context = fork_server.context()
    path, begin = tmp_path / "zftune.db", tmp_path / "begin"
    processes = [
        context.Process(target=searching.search, args=(str(path), number, str(begin), str(tmp_path / f"{number}.json")))
        for number in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    begin.touch()
    for process in processes:
        process.join(150)
    assert [process.exitcode for process in processes] == [0] * PROCESSES
    told = [json.loads((tmp_path / f"{number}.json").read_text()) for number in range(PROCESSES)]
    assert [one["notices"] for one in told] == [[]] * PROCESSES
    with open_store(str(path)) as store:
        assert store.notices == []
        runs = {run.key.model_id: run for run in store.runs()}
        assert len(store.runs()) == len(runs) == PROCESSES
        assert {run.state for run in runs.values()} == {RunState.FINISHED}
        for number, one in enumerate(told):
            run = runs[searching.model_id(number)]
            trials = store.trials(run.run_id)
            assert [[trial.number, trial.source, trial.state.value, dict(trial.knobs)] for trial in trials] == one[
                "trials"
            ]
            found = [row for trial in trials for row in store.measurements(trial.trial_id)]
            assert sorted(list(row.steps_ms) for row in found) == sorted(one["outcomes"])
            assert [sentence(decision) for decision in store.decisions(run.run_id)] == one["reasons"]
        presets = {preset.key.model_id: dict(preset.knobs) for preset in store.presets()}
        assert presets == {searching.model_id(number): one["best"] for number, one in enumerate(told) if one["gain"]}
        assert presets
