"""The native backend against the eager one, bit by bit and with guards around all that it may write."""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import zenflow
from tests.support.seeds import fresh_seeds
from tests.support.zenflow.native_cases import (
    DTYPES,
    Draw,
    Memory,
    Raw,
    Scene,
    assert_untouched,
    draw_pair,
    draw_scene,
    drawn_memories,
    drawn_range,
    drawn_weights,
    indices,
    same,
    same_state,
    thorough,
    update,
)
from zenflow import ConfigError, HostEngineError, ZenFlowAdamW, ZenFlowConfig
from zenflow.host.backend import choose_backend
from zenflow.host.eager import EagerBackend
from zenflow.host.native import NativeBackend, load_native
from zenflow.host.tasks import ReadMasters, Update
from zenflow.rules import RULES, Rule
from zenflow.state import ColumnState

SEEDS = st.integers(0, 2**48)
THREADS = (1, 2, 8)
NATIVE = load_native()


@pytest.fixture(scope="module")
def backends() -> Iterator[dict[int, NativeBackend]]:
    made = {threads: NativeBackend(NATIVE, [-1] * threads) for threads in THREADS}
    yield made
    for backend in made.values():
        backend.close()


@pytest.fixture
def backend() -> Iterator[NativeBackend]:
    made = NativeBackend(NATIVE, [-1, -1])
    yield made
    made.close()


def every_rule(test: Any) -> Any:
    return pytest.mark.parametrize("rule", RULES.values(), ids=RULES)(test)


def check(scene: Scene, backend: NativeBackend, expected: tuple[ColumnState, Tensor | None]) -> None:
    state, result = update(scene, backend)
    same_state(state, expected[0])
    assert_untouched(scene, state)
    if result is not None and expected[1] is not None:
        same(result, expected[1], "result")


# Updates.


@every_rule
@given(seed=SEEDS)
@thorough(20)
def test_any_update_is_the_eager_one(rule: Rule, backends: dict[int, NativeBackend], seed: int) -> None:
    scene = draw_scene(rule, seed)
    expected = update(scene, EagerBackend())
    for backend in backends.values():
        check(scene, backend, expected)


@every_rule
@given(seed=SEEDS)
@thorough(3)
def test_updates_that_several_threads_share(rule: Rule, backends: dict[int, NativeBackend], seed: int) -> None:
    scene = draw_scene(rule, seed, large=True)
    expected = update(scene, EagerBackend())
    for backend in backends.values():
        check(scene, backend, expected)


@every_rule
@given(seed=SEEDS)
@thorough(10)
def test_one_pass_of_a_window_is_one_pass_an_entry(rule: Rule, backends: dict[int, NativeBackend], seed: int) -> None:
    scene = replace(draw_scene(rule, seed), closing=None)
    backend = backends[2]
    state, result = update(scene, backend)
    streams, count, last = scene.streams, scene.count, None
    for step in range(len(scene.parts[0].entries)):
        parts = tuple(replace(part, entries=[part.entries[step]]) for part in scene.parts)
        alone, last = update(replace(scene, streams=streams, count=count, parts=parts), backend)
        streams, count = (alone.master, *alone.moments), alone.count
    same_state(state, alone)
    if result is not None and last is not None:
        same(result, last, "result")


# Other tasks, and many of them in a row.


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@given(seed=SEEDS)
@thorough(12)
def test_masters_are_read_as_in_pytorch(
    backends: dict[int, NativeBackend], dtype: torch.dtype, keep: bool, seed: int
) -> None:
    draw = Draw(seed)
    theirs, *ours = drawn_memories(draw, RULES["adagrad"], EagerBackend(), *backends.values())
    slots = drawn_range(draw, len(theirs.state.count))
    weights = drawn_weights(draw, theirs.state, slots, dtype)
    for memory in (theirs, *ours):
        memory.do(ReadMasters(memory.columns, slots, weights, keep))
        same_state(memory.state, theirs.state)


@every_rule
@pytest.mark.parametrize("seed", fresh_seeds("queued", 3))
def test_tasks_that_are_queued_run_in_order(rule: Rule, backend: NativeBackend, seed: int) -> None:
    draw = Draw(seed)
    ours, theirs = drawn_memories(draw, rule, backend, EagerBackend())
    backend.engine.inject("jitter", 0, 2e-4, seed)
    pairs = [draw_pair(draw, rule, ours, theirs) for _ in range(25)]
    began_s = time.monotonic()
    tickets = [backend.start(mine) for mine, _ in pairs]
    for _, other in pairs:
        theirs.do(other)
    spans = [backend.finish(ticket) for ticket in tickets]
    same_state(ours.state, theirs.state)
    for (mine, other), _ in zip(pairs, spans, strict=True):
        if isinstance(mine, Update) and isinstance(other, Update):
            for result, expected in ((mine.weights, other.weights), (mine.packed, other.packed)):
                if result is not None and expected is not None:
                    same(result, expected, "result")
    bounds = [moment for span in spans for moment in (span.begin_s, span.end_s)]
    assert bounds == sorted(bounds)
    assert began_s <= bounds[0] <= bounds[-1] < time.monotonic()


# Lifetimes, memory.


def test_a_tasks_memory_lives_until_it_is_finished(backend: NativeBackend) -> None:
    backend.engine.inject("delay", 0, 0.2)
    scene = draw_scene(RULES["adamw"], 3)
    memory = Memory(backend, scene.rule, scene.streams, scene.count)
    weights = torch.zeros(scene.targets, scene.streams[0].shape[1])
    of_task = [weakref.ref(weights), weakref.ref(scene.parts[0].entries[0][0].gradient.memory[0])]
    of_state = weakref.ref(memory.state.master)
    ticket = backend.start(Update(memory.columns, scene.parts, None, weights=weights))
    del memory, weights, scene
    gc.collect()
    assert None not in [reference() for reference in of_task]
    backend.finish(ticket)
    gc.collect()
    assert [reference() for reference in of_task] == [None, None]
    assert of_state() is not None  # the next task may use it


@pytest.mark.parametrize("nbytes", [1, 63, 4095, 4097, 3 << 20])
@pytest.mark.parametrize("interval_bytes", [1, 100, 8192, 1 << 30])
def test_memory_is_zeroed_and_outlives_the_engine(nbytes: int, interval_bytes: int) -> None:
    if nbytes // interval_bytes > 1 << 16:
        interval_bytes = 64
    backend = NativeBackend(NATIVE, [-1] * 3)
    arrays = [backend.allocate(nbytes, interval_bytes) for _ in range(2)]
    backend.close()
    del backend
    gc.collect()
    for array in arrays:
        assert array.shape == (nbytes,)
        assert array.ctypes.data % 64 == 0
        assert not array.any()
        array[:] = 255
    assert int(arrays[0].sum(dtype=np.int64)) == 255 * nbytes


def test_more_memory_than_there_is_is_a_sentence(backend: NativeBackend) -> None:
    with pytest.raises(MemoryError, match="could not get 4611686018427387904 bytes of host memory"):
        backend.allocate(1 << 62, 4096)
    assert backend.allocate(64, 64).shape == (64,)  # and the engine is well


# Refusals.


REFUSED: dict[str, tuple[Any, str]] = {
    "no thread": (lambda raw: NATIVE.Engine([]), "cpus must not be empty"),
    "rule": (lambda raw: raw.register(rule="rmsprop"), "'rmsprop' is not known"),
    "no moment": (lambda raw: raw.register(moments=[]), "wrong number of moments"),
    "moments": (lambda raw: raw.register(moments=[raw.state.data_ptr()] * 2), "wrong number of moments"),
    "dtype of an entry": (lambda raw: raw.entry(dtype="fp8"), "'fp8' is not known"),
    "hyperparameters": (lambda raw: raw.entry(hyper=((1.0,) * 6, 1.0)), "too many hyperparameters"),
    "weight": (lambda raw: raw.update(weight=1), "no weight has this number"),
    "first": (lambda raw: raw.update(raw.part(first=3)), "slots are out of range"),
    "far first": (lambda raw: raw.update(raw.part(first=2**64 - 1)), "slots are out of range"),
    "slot": (lambda raw: raw.update(raw.part(slots=indices(1, 4))), "slots is out of range"),
    "negative slot": (lambda raw: raw.update(raw.part(slots=indices(-1, 1))), "slots is out of range"),
    "slots": (lambda raw: raw.update(raw.part(slots=indices(0, 1, 2))), "slots has the wrong length"),
    "row": (lambda raw: raw.update(raw.part([raw.entry(rows=indices(0, 2))])), "rows is out of range"),
    "negative row": (lambda raw: raw.update(raw.part([raw.entry(rows=indices(0, -1))])), "rows is out of range"),
    "rows": (lambda raw: raw.update(raw.part([raw.entry(rows=indices(0))])), "rows has the wrong length"),
    "short": (
        lambda raw: raw.update(raw.part([raw.entry(), raw.entry(extents=[(raw.gradient.data_ptr(), 5)])])),
        "an entry is too short",
    ),
    "no extent": (lambda raw: raw.update(raw.part([raw.entry(extents=[])])), "an entry is too short"),
    "long out": (lambda raw: raw.update(raw.part(out=indices(0, 1, 2))), "out has the wrong length"),
    "far out": (lambda raw: raw.update(raw.part(out=indices(0, 2))), "out is out of range"),
    "negative out": (lambda raw: raw.update(raw.part(out=indices(0, -1))), "out is out of range"),
    "dtype of a result": (lambda raw: raw.update(weights=(raw.results.data_ptr(), "int8")), "'int8' is not known"),
    "dtype to read": (lambda raw: raw.read(dtype="half"), "'half' is not known"),
    "range to read": (lambda raw: raw.read(first=3), "slots are out of range"),
    "slot to unpack": (lambda raw: raw.unpack(4), "slots is out of range"),
    "negative slot to unpack": (lambda raw: raw.unpack(-1), "slots is out of range"),
    "ticket": (lambda raw: raw.engine.wait(77, 0.0), "no task has this ticket"),
    "fault": (lambda raw: raw.engine.inject("explode"), "'explode' is not known"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_sense_is_refused_and_does_no_harm(name: str) -> None:
    raw = Raw()
    call, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=sentence):
        call(raw)
    assert raw.engine.wait(raw.update(), 30.0) is not None
    assert raw.state[0].tolist() == [[0.0] * 3, [-2.0] * 3, [-2.0] * 3, [0.0] * 3]
    assert raw.results[40:42].tolist() == [[-2.0] * 3] * 2
    assert not bool(raw.results[:40].any() or raw.results[42:].any())
    raw.engine.close()
    with pytest.raises(RuntimeError, match="the host engine was closed"):
        raw.update()


def test_a_short_out_is_refused() -> None:
    raw = Raw()
    with pytest.raises(ValueError, match="out has the wrong length"):
        raw.update(raw.part(out=indices(0, 1, 2)))  # first: where nothing is checked, the next line reads wild memory
    with pytest.raises(ValueError, match="out has the wrong length"):
        raw.update(raw.part(out=indices(0)))


@pytest.mark.parametrize(
    "wrong", [{"slots": np.zeros((1, 2), np.int64)}, {"first": -1}, {"targets": 1.5}, {"out": "x"}]
)
def test_what_has_the_wrong_type_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        Raw().part(**wrong)


# Which backend it is.


@pytest.fixture
def no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(zenflow, "_native")
    monkeypatch.setitem(sys.modules, "zenflow._native", None)


@pytest.mark.parametrize("mode", [None, "", "auto", "require"])
def test_the_native_backend_is_taken_where_it_is_there(monkeypatch: pytest.MonkeyPatch, mode: str | None) -> None:
    monkeypatch.delenv("ZENFLOW_NATIVE", raising=False) if mode is None else monkeypatch.setenv("ZENFLOW_NATIVE", mode)
    weights = [nn.Parameter(torch.ones(3, 4))]
    optimizer = ZenFlowAdamW(weights, config=ZenFlowConfig(host_threads=3))
    assert optimizer.host_engine == ("native", 3)
    optimizer.close()


def test_off_is_eager(monkeypatch: pytest.MonkeyPatch, no_module: None) -> None:
    monkeypatch.setenv("ZENFLOW_NATIVE", "off")
    optimizer = ZenFlowAdamW([nn.Parameter(torch.ones(3, 4))], config=ZenFlowConfig(host_threads=3))
    assert optimizer.host_engine == ("eager", 1)
    optimizer.close()


def test_a_wrong_mode_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZENFLOW_NATIVE", "yes")
    with pytest.raises(ConfigError, match=r"^ZENFLOW_NATIVE is 'yes'; it must be require or auto or off$"):
        ZenFlowAdamW([nn.Parameter(torch.ones(3, 4))])


def test_require_without_the_module_is_a_sentence(monkeypatch: pytest.MonkeyPatch, no_module: None) -> None:
    monkeypatch.setenv("ZENFLOW_NATIVE", "require")
    with pytest.raises(HostEngineError, match=r"^zenflow's native module cannot be loaded \(.+\); reinstall zftune$"):
        ZenFlowAdamW([nn.Parameter(torch.ones(3, 4))])


def test_auto_without_the_module_warns_and_is_eager(monkeypatch: pytest.MonkeyPatch, no_module: None) -> None:
    monkeypatch.setenv("ZENFLOW_NATIVE", "auto")
    with pytest.warns(UserWarning, match="host updates run in PyTorch, several times slower: .*reinstall zftune"):
        backend = choose_backend([-1, -1])
    assert (backend.name, backend.threads) == ("eager", 1)
