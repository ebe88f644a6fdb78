"""A search that is killed: real training on an emulated accelerator, which says what its store has acknowledged."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers.models.llama.modeling_llama  # noqa: F401 - before it is forked, not after

from zftune import attaching
from zftune.builtin import TuneOptions, tune
from zftune.store import open_store
from zftune.store.account import Account
from zftune.store.store import Store
from zftune.store.types import Progress, Run, TrialRecord, TrialState
from zftune.tuner.search import SearchOptions
from zftune.tuner.tuner import Tuner

Acknowledge = Callable[[str, Any], None]


def undisturbed() -> None:
    """Let every measurement count: times do not matter here, and steps are shorter than a rig's may be."""
    vars(attaching)["disturbance_of"] = lambda device, sampled: None


class Acknowledging(Store):
    """A store that says what is on the disk, once it is there."""

    acknowledge: Acknowledge

    @classmethod
    def open(cls, path: str, acknowledge: Acknowledge) -> Acknowledging:
        opened = open_store(path)
        store = cls(opened._database, opened.path, opened.notices, time.time)
        store.acknowledge = acknowledge
        for notice in opened.notices:
            acknowledge("notice", notice)
        return store

    def begin_run(self, *given: Any, **more: Any) -> Run:
        begun = super().begin_run(*given, **more)
        self.acknowledge("began", begun.run_id)
        return begun

    def resume_run(self, *given: Any, **more: Any) -> Run:
        resumed = super().resume_run(*given, **more)
        self.acknowledge("resumed", resumed.run_id)
        return resumed

    def record(self, run: Run, progress: Progress, account: Account | None = None) -> list[TrialRecord]:
        made = super().record(run, progress, account)
        ids = {one.number: one.trial_id for one in self.trials(run.run_id)}
        if progress.measured is not None:
            number, measurement = progress.measured
            self.acknowledge("measured", [ids[number], measurement.began_unix_s])
        for number, (state, _) in progress.states.items():
            if state is TrialState.IN_FLIGHT:
                self.acknowledge("in_flight", ids[number])
        return made


def search(
    path: str, log: str, given: dict[str, Any], steps: int = 100_000, last: tuple[str, int] | None = None
) -> dict[str, Any]:
    """Search for some steps, or until killed, which ("measured", 2) does at the second acknowledgement of that name.

    The log gets one line for each acknowledgement.
    """
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    times: Counter[str] = Counter()

    def acknowledge(what: str, value: Any) -> None:
        os.write(written, (json.dumps([what, value]) + "\n").encode())
        times[what] += 1
        if last == (what, times[what]):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step(done: int, tuner: Tuner) -> None:
        if done == 1:
            acknowledge("trains", os.getpid())

    undisturbed()
    asked = SearchOptions(most_measurements=10_000, hold=True)
    with Acknowledging.open(path, acknowledge) as store:
        document = tune(TuneOptions(steps=steps, search=asked, **given), on_step, store)
    acknowledge("ended", document["stopped"])
    return document


def read(log: Path) -> list[tuple[str, Any]]:
    """What was acknowledged; a line that was cut off is none."""
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [tuple(json.loads(line)) for line in lines if line.endswith("\n")]
