"""Knobs that change while it trains: memory and steps over the offload ratio, and a search beside a setting by hand."""

from __future__ import annotations

import dataclasses
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from gpu.bench import Bench, Size
from gpu.machine import machine_of
from gpu.parts import KNOBS
from gpu.record import Record, figures_of
from gpu.training import Loop, Ours, config_of

from zenflow import ZenFlowConfig
from zftune import attach
from zftune.explain.summary import tune_document
from zftune.planner.closed_form import predict
from zftune.planner.model import Job, Machine, ModelFacts
from zftune.store import open_store
from zftune.store.store import Store
from zftune.tuner.space import Setting

_RATIOS = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)
_SETTLE = 3
"""Windows after a change of a knob, in which columns move and memory grows."""
_BY_HAND = ZenFlowConfig(topk_ratio=0.1, update_interval=4, select_interval=16)
_QUALITY: Final = "published"
_LEARNING_RATE = 2e-6
"""At which weights that are random move little enough for late updates."""
_COMPARE_S, _ON_THE_STUB_S = 15.0, 2.0
"""Of the part's time, for turns of both settings; and a search that shows only that it works."""
_PAIRS = 20


def ratios(record: Record, bench: Bench, size: Size) -> None:
    """Step and memory over the offload ratio, with nothing late and with ZenFlow beside it, in one training each."""
    measured = figures_of(record.path.parent, "link").get("machine")
    machine = Machine(**measured) if measured else machine_of(bench)
    for system in ("zero-offload", "zenflow"):
        trainee = Ours(bench, size, KNOBS[system])
        try:
            _over_ratios(record, trainee, system, machine)
        finally:
            trainee.close()


def _over_ratios(record: Record, trainee: Ours, system: str, machine: Machine) -> None:
    size, loop = trainee.size, Loop(trainee)
    loop.steps(size.warm)
    facts = ModelFacts.from_module(system, trainee.model)
    plain = figures_of(record.path.parent, "adamw").get("step_ms", {}).get("device_ms")
    for ratio in _RATIOS[::5] if trainee.bench.simulated else _RATIOS:
        name = f"{system}, offload_ratio {ratio:g}"
        found = record.measure(name, lambda ratio=ratio: _at(trainee, loop, ratio), needs_s=3)
        if found is not None and plain is not None:
            passes = {f"{one}_ms": plain[one] for one in ("forward", "backward")}
            job = Job(seq=size.sequence, micro_batch=size.batch, **passes)
            said = predict(facts, machine, job, dataclasses.replace(config_of(system), offload_ratio=ratio))
            planned = {"planned_ms": said.step_ms, "planned_device_bytes": said.memory.device_bytes}
            record.note(name, {**found, **planned})


def _at(trainee: Ours, loop: Loop, ratio: float) -> dict[str, Any]:
    trainee.optimizer.set_knobs(offload_ratio=ratio)
    window = trainee.optimizer.config.longest_window
    loop.steps(_SETTLE * window)
    trainee.bench.reset_peaks()
    figures = loop.figures(loop.steps(max(2 * window, 6)))
    return {"p50": figures["p50"], "p95": figures["p95"], **trainee.bench.peaks()}


def search(record: Record, bench: Bench, size: Size) -> None:
    """`zftune.attach` from a setting by hand; then both settings by turns in the same training, without the search."""
    trainee = Ours(bench, size, dataclasses.asdict(_BY_HAND), learning_rate=_LEARNING_RATE)
    try:
        loop = Loop(trainee)
        loop.steps(size.warm)
        with _opened() as store:
            chosen = _searched(record, trainee, loop, store)
        record.measure("turns", lambda: _turns(record, trainee, loop, chosen), needs_s=3)
    finally:
        trainee.close()


@contextmanager
def _opened() -> Iterator[Store]:
    """A store of its own, in which no earlier run is remembered."""
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(f"sqlite:///{folder}/zftune.db")
        try:
            yield store
        finally:
            store.close()


def _searched(record: Record, trainee: Ours, loop: Loop, store: Store) -> Setting:
    size = trainee.size
    began_s, taken = time.monotonic(), loop.taken
    most_s = _ON_THE_STUB_S if trainee.bench.simulated else record.remaining_s - _COMPARE_S
    tuner = attach(
        trainee.optimizer,
        quality=_QUALITY,
        micro_batch=size.batch,
        sequence=size.sequence,
        store=store,
        fresh=True,
        seed=0,
    )
    while tuner.searching and time.monotonic() - began_s < most_s:
        tuner.log_loss(loop.step())
    ended = not tuner.searching
    tuner.close()
    assert tuner.run_id is not None
    document = tune_document(store, tuner.run_id, {}, tuner.notices, tuner.conclusion)
    chosen = Setting.from_knobs(document["best"]["knobs"]) if document["best"] else Setting.of(_BY_HAND)
    found = {name: document[name] for name in ("best", "gain", "cost", "measurements", "stopped", "loss", "decisions")}
    took_s = round(time.monotonic() - began_s, 1)
    about = {"ended": ended, "seconds": took_s, "steps": loop.taken - taken, "chosen": str(chosen)}
    record.note("search", {**about, "by_hand": str(Setting.of(_BY_HAND)), "notices": list(tuner.notices), **found})
    return chosen


def _turns(record: Record, trainee: Ours, loop: Loop, chosen: Setting) -> dict[str, Any]:
    """Medians, ms, and the median of the ratios of pairs with their quartiles."""
    settings: Mapping[str, Setting] = {"by_hand": Setting.of(_BY_HAND), "found": chosen}
    draw = random.Random(0)
    pairs: list[dict[str, float]] = []
    while len(pairs) < (2 if trainee.bench.simulated else _PAIRS) and record.remaining_s > 3:
        times = {}
        for name in draw.sample(list(settings), 2):
            trainee.optimizer.set_knobs(**settings[name].knobs())
            window = settings[name].update_interval
            loop.steps(2 * window)  # in which columns move, and the other's last update ends
            times[name] = loop.figures(loop.steps(2 * window))["p50"]
        pairs.append(times)
    ratios_of = [pair["found"] / pair["by_hand"] for pair in pairs]
    low, middle, high = statistics.quantiles(ratios_of, n=4) if len(pairs) > 1 else 3 * ratios_of
    medians = {f"{name}_ms": statistics.median(pair[name] for pair in pairs) for name in settings}
    return {"found": str(chosen), **medians, "ratio": middle, "quartiles": [low, high], "pairs": len(pairs)}
