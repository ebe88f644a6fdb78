"""What each process of the test of several does: a whole search on a surface of its own."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

from tests.support.zftune.tuner.surfaces import make, recording_of
from zftune.store import open_store
from zftune.tuner.messages import sentence
from zftune.tuner.record import MachineInfo


def model_id(number: int) -> str:
    return f"{number:016x}"


def search(path: str, number: int, begin: str, told: str) -> None:
    """Search once the file `begin` is there, and write down in `told` what the store must hold."""
    while not Path(begin).exists():
        os.sched_yield()
    with open_store(path) as store:
        recording = recording_of(store, MachineInfo.now(), model_id=model_id(number))
        search, driver = make(number, 0.03, sampler="random", most_measurements=40)
        search.options = replace(search.options, barred=recording.barred())
        recorder = recording.begin(search)
        assert recorder is not None
        while (request := search.next()) is not None:
            assert recorder.before(search, request) is None
            driver.run(search, most=1)
            recorder.after(search, request, driver.outcomes[-1])
        recording.finish(search)
        trials = [[one.number, one.source, one.state.value, one.setting.knobs()] for one in search.book.trials]
        found = {
            "notices": recording.notices,
            "trials": trials,
            "outcomes": [list(one.steps_ms) for one in driver.outcomes],
            "reasons": [sentence(note) for note in search.notes],
            "best": search.book.incumbent.setting.knobs(),
            "gain": search.book.gain is not None,
        }
    Path(told).write_text(json.dumps(found))
