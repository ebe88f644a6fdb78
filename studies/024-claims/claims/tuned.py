"""What a search gains over the published setting, set by hand, and what that costs: on every rig, and on this CPU.

On a rig the search is `zftune tune` in simulated time, and both settings are measured afterwards without it. On this
CPU a training searches for itself (`zftune.attach`), by the machine's clock; then two trainings, one with each setting,
take turns in random order, so that whatever else the machine does it does to both.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from studykit import Job, code_digest

from claims.rigs import MODEL, PLANNED_CODE, SEQUENCE, SIMULATED_CODE, measured, rig_inputs, task_for
from zenflow import ZenFlowConfig
from zftune import attach
from zftune.builtin import TuneOptions, tune
from zftune.explain.summary import tune_document
from zftune.profile.measure import Training
from zftune.store import open_store
from zftune.store.store import Store
from zftune.tuner.search import SearchOptions
from zftune.tuner.space import Setting

PUBLISHED = ZenFlowConfig(topk_ratio=0.1, update_interval=4, select_interval=1_000_000)
"""By hand. Selections stay as they are, so that a setting has one time."""
QUALITY: Final = "published"
THINKING_S = 0.5
"""Simulated time that a thought takes."""
LEARNING_RATE = 2e-6
"""`zftune tune`'s own: weights that are random move little enough for late updates."""
REPEATS, MOST_STEPS = 2, 4000
PAIRS, WINDOWS = 60, 2
"""Of the comparison on this CPU: turns of each, and the windows that count in a turn, after one that does not."""
_SEARCH = ("belief", "evidence", "executor", "search", "space", "states", "study", "worker")
CODE = (
    *SIMULATED_CODE,
    *PLANNED_CODE,
    *(f"zftune/tuner/{part}.py" for part in _SEARCH),
    "zftune/builtin.py",
    "zftune/quality.py",
    "studies/024-claims/claims/tuned.py",
)


def job(rig: str) -> Job:
    """One search on one rig."""
    search = {"start": repr(PUBLISHED), "thinking_s": THINKING_S, "code": code_digest(*CODE)}
    inputs = {**rig_inputs(rig), **search}
    return Job(f"tuned--{rig}", inputs, figures, (rig,))


def cpu_job(seed: int) -> Job:
    """One search on this machine's CPU, and the comparison after it."""
    inputs = {
        "start": repr(PUBLISHED),
        "model": [MODEL, SEQUENCE],
        "seed": seed,
        "turns": [PAIRS, WINDOWS],
        "code": code_digest(*CODE),
    }
    return Job(f"tuned-on-cpu--{seed}", inputs, cpu_figures, (seed,))


def figures(rig: str) -> dict[str, Any]:
    """What the search found and cost, and both settings' steps."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, opened(folder) as store:
        config = Path(folder) / "ds_config.json"
        config.write_text(json.dumps(PUBLISHED.to_ds_config()), encoding="utf-8")
        search = SearchOptions(thinking_s=THINKING_S)
        options = TuneOptions(config=str(config), quality=QUALITY, rig=rig, fresh=True, search=search)
        document = tune(options, lambda _steps, _tuner: None, store)
    published, chosen = (measured(rig, one)["step_ms"] for one in (PUBLISHED, chosen_in(document)))
    return {**outcome(document), "published_ms": published, "tuned_ms": chosen}


def cpu_figures(seed: int) -> dict[str, Any]:
    """The same by the machine's clock: the comparison's ratios of tuned to published steps, a pair of turns each."""
    torch.set_num_threads(1)
    task = replace(task_for(None, dtype=torch.float32, seed=seed), learning_rate=LEARNING_RATE)
    with tempfile.TemporaryDirectory() as folder, opened(folder) as store:
        with Training(task, PUBLISHED) as training:
            began_s = time.monotonic()
            tuner = attach(
                training.optimizer,
                quality=QUALITY,
                micro_batch=1,
                sequence=SEQUENCE,
                store=store,
                fresh=True,
                seed=seed,
            )
            while tuner.searching and training.optimizer.steps < MOST_STEPS:
                tuner.log_loss(training.step())
            tuner.close()
            took_s = time.monotonic() - began_s
        assert tuner.run_id is not None
        document = tune_document(store, tuner.run_id, {}, tuner.notices, tuner.conclusion)
    found = {**outcome(document), "wall_s": took_s, "load_15min": os.getloadavg()[2]}
    with Training(task, PUBLISHED) as by_hand, Training(task, chosen_in(document)) as tuned:
        return {**found, **compared(in_turns({"published": by_hand, "tuned": tuned}, random.Random(seed)))}


@contextmanager
def opened(folder: str) -> Iterator[Store]:
    """A store of its own, in which no earlier run is remembered."""
    store = open_store(f"sqlite:///{folder}/zftune.db")
    try:
        yield store
    finally:
        store.close()


def chosen_in(document: Mapping[str, Any]) -> ZenFlowConfig:
    """The setting that a search ended with."""
    return Setting.from_knobs(document["best"]["knobs"]).config(PUBLISHED)


def outcome(document: Mapping[str, Any]) -> dict[str, Any]:
    """Of a search: what it chose, when it had that, when it ended, and what exploring cost beyond the incumbents."""
    adopted = [one["at_s"] for one in document["decisions"] if one["kind"] == "adopt"]
    cost = document["cost"]
    return {
        "chosen": str(Setting.from_knobs(document["best"]["knobs"])),
        "adopted": len(adopted),
        "late_steps": document["best"]["staleness_steps"],
        "late_steps_by_hand": document["start"]["staleness_steps"],
        "reached_s": max(adopted, default=0.0),
        "ended_s": cost["elapsed_s"],
        "steps": cost["steps"],
        "spent_s": cost["spent_s"],
        "measurements": document["measurements"],
        "stopped": document["stopped"],
    }


def in_turns(trainings: Mapping[str, Training[Any]], draw: random.Random) -> list[dict[str, float]]:
    """Step times of pairs of turns, ms: each training once a pair, in random order; short, as a load changes."""
    pairs = []
    for _ in range(PAIRS):
        times = {}
        for name in draw.sample(list(trainings), len(trainings)):
            training = trainings[name]
            window = training.optimizer.config.longest_window
            for _ in range(window):  # in which the other's last update ends
                training.step()
            begin_s = time.perf_counter()
            for _ in range(WINDOWS * window):
                training.step()
            times[name] = 1e3 * (time.perf_counter() - begin_s) / (WINDOWS * window)
        pairs.append(times)
    return pairs


def compared(pairs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Median steps, and the median of the pairs' ratios with its 95% interval, from their order."""
    ratios = sorted(one["tuned"] / one["published"] for one in pairs)
    middle, reach = (len(ratios) - 1) / 2, math.sqrt(len(ratios))
    low, high = (ratios[max(round(middle - reach), 0)], ratios[min(round(middle + reach), len(ratios) - 1)])
    return {
        "published_ms": statistics.median(one["published"] for one in pairs),
        "tuned_ms": statistics.median(one["tuned"] for one in pairs),
        "ratio": statistics.median(ratios),
        "ratio_error": (high - low) / 2,
        "pairs": len(ratios),
    }
