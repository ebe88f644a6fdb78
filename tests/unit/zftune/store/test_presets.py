"""Presets are kept, found again for what they were proven for, and only provisionally for anything else."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.zftune.fixtures import Clock
from tests.support.zftune.store.examples import EVIDENCE, HARDWARE, KEY, KNOBS, PRESET, other
from zftune.cli.presets import facts
from zftune.errors import StoreError
from zftune.store import open_store
from zftune.store.preset_file import document_of, read_preset
from zftune.store.presets import differences
from zftune.store.store import Store
from zftune.store.types import Match, Preset, PresetState, Query, Ratios

ELSEWHERE: dict[str, Any] = {
    "model_id": "f" * 16,
    "hw_id": "e" * 16,
    "backend": "deepspeed",
    "stage": 3,
    "dtype": "float32",
    "world_size": 2,
    "nodes": 2,
    "shards": 2,
    "micro_batch": 8,
    "checkpointing": False,
    "quality": "loose",
}


@pytest.fixture
def store(either: Store) -> Store:
    return either


def found(store: Store, key: Any = KEY, **query: Any) -> Match:
    match = store.find_preset(Query(key=key, **query))
    assert match is not None
    return match


def test_what_was_saved_is_there_after_opening_again(store: Store, url: str, clock: Clock) -> None:
    kept = store.save_preset(PRESET)
    store.close()
    with open_store(url) as again:
        assert again.presets() == [kept]
        assert again.preset("llama-2-7b-hf-a100-sxm4-40gb-published") == kept
    assert kept == replace(PRESET, name=kept.name, created_unix_s=clock.now)
    assert kept.evidence.gain == pytest.approx(0.6)


@pytest.mark.parametrize(
    "change",
    [
        {"knobs": {**KNOBS, "topk_ratio": math.nan}},
        {"knobs": {**KNOBS, "apply_lag": 9}},
        {"knobs": {**KNOBS, "max_grad_norm": 1.0}},
        {"name": "best"},
        {"name": "../up"},
        {"evidence": replace(EVIDENCE, step_ms=-1.0)},
    ],
)
def test_what_could_not_be_exported_is_not_kept(store: Store, change: dict[str, Any]) -> None:
    with pytest.raises(StoreError):
        store.save_preset(replace(PRESET, **change))
    assert store.presets() == []


def test_the_same_key_is_found_and_trusted(store: Store) -> None:
    store.save_preset(PRESET)
    match = found(store, usable_cores=8.0)
    assert (match.distance, match.provisional, match.knobs) == (0.0, False, KNOBS)


@pytest.mark.parametrize("field", ELSEWHERE)
def test_every_part_of_the_key_counts(store: Store, field: str) -> None:
    key = replace(KEY, backend="deepspeed") if field == "stage" else KEY
    store.save_preset(replace(PRESET, key=key))
    assert store.find_preset(Query(key=replace(key, **{field: ELSEWHERE[field]}))) is None


def test_with_zenflow_the_stage_does_not_count(store: Store) -> None:
    store.save_preset(PRESET)
    assert not found(store, replace(KEY, stage=3)).provisional


def test_sequences_up_to_the_recorded_one(store: Store) -> None:
    store.save_preset(PRESET)
    assert not found(store, replace(KEY, sequence=10)).provisional
    assert store.find_preset(Query(key=replace(KEY, sequence=1025))) is None


def test_what_is_not_known_is_not_claimed(store: Store, tmp_path: Path) -> None:
    """Of a plain loop, whose batches nobody looks at."""
    key = replace(KEY, micro_batch=0, sequence=0)
    kept = store.save_preset(replace(PRESET, key=key))
    assert {facts(kept)[name] for name in ("micro-batch", "sequence")} == {"not known"}
    assert not found(store, key).provisional
    assert store.find_preset(Query(key=replace(key, micro_batch=1))) is None
    assert differences(replace(key, micro_batch=1, sequence=8), key) == [
        "micro_batch unknown instead of 1",
        "sequence up to unknown instead of 8",
    ]
    (tmp_path / "preset.json").write_text(json.dumps(document_of(kept)))
    assert read_preset(tmp_path / "preset.json").key == key


def test_of_several_the_least_longer_sequence_then_the_newest(store: Store, clock: Clock) -> None:
    for name, sequence in (("long", 4096), ("old", 1024), ("new", 1024)):
        store.save_preset(replace(other(sequence=sequence), name=name))
        clock.now += 1
    assert found(store).preset.name == "new"
    assert found(store, replace(KEY, sequence=2000)).preset.name == "long"


def test_the_nearest_by_ratios_is_provisional_with_its_distance(store: Store) -> None:
    store.save_preset(replace(other(hw_id="1" * 16, ratios=Ratios(4.0, 0.5)), name="far"))
    store.save_preset(replace(other(model_id="2" * 16, ratios=Ratios(2.2, 0.55)), name="near"))
    match = found(store, ratios=Ratios(2.0, 0.5))
    assert match.preset.name == "near"
    assert match.provisional
    assert match.distance == pytest.approx(math.hypot(math.log(1.1), math.log(1.1)))
    assert "distance 0.13" in match.reason
    assert f"model {'2' * 16} instead of {KEY.model_id}" in match.reason


@pytest.mark.parametrize(
    ("preset", "query"),
    [
        (other(hw_id="1" * 16, ratios=Ratios(4.1, 0.5)), {}),  # more than a factor of 2
        (other(hw_id="1" * 16, ratios=None), {}),
        (other(hw_id="1" * 16), {"ratios": None}),
        (other(hw_id="1" * 16, ratios=Ratios(0.0, 0.5)), {}),
        (other(hw_id="1" * 16, quality="loose"), {}),
        (other(hw_id="1" * 16, backend="deepspeed"), {}),
        (replace(other(hw_id="1" * 16), hardware=replace(HARDWARE, hw_id="1" * 16, rig="a rig")), {}),
        (other(hw_id="1" * 16), {"rig": "a rig"}),
    ],
)
def test_what_must_not_serve(store: Store, preset: Preset, query: dict[str, Any]) -> None:
    store.save_preset(preset)
    assert store.find_preset(Query(key=KEY, **{"ratios": Ratios(2.0, 0.5), **query})) is None


def test_imported_ones_are_provisional_and_come_second(store: Store, clock: Clock) -> None:
    store.save_preset(replace(PRESET, name="theirs", imported=True))
    assert found(store).provisional
    store.save_preset(replace(PRESET, name="ours"))
    clock.now += 1
    store.save_preset(replace(PRESET, name="theirs-later", imported=True))
    match = found(store)
    assert (match.preset.name, match.provisional) == ("ours", False)


@pytest.mark.parametrize(
    ("threads", "then", "now", "expected"),
    [(6, 8.0, 16.0, 12), (6, 8.0, 2.0, 2), (6, 8.0, None, None), (6, None, 4.0, None), (1, 64.0, 4.0, 1)],
)
def test_threads_follow_the_cores(
    store: Store, threads: int, then: float | None, now: float | None, expected: int | None
) -> None:
    store.save_preset(replace(PRESET, knobs={**KNOBS, "host_threads": threads}, usable_cores=then))
    match = found(store, usable_cores=now)
    assert match.knobs["host_threads"] == expected
    assert match.provisional is False
    if expected != threads:
        assert "host_threads" in match.reason


def test_two_lost_comparisons_withdraw(store: Store) -> None:
    name = store.save_preset(PRESET).name
    assert store.record_comparison(name, won=True) is PresetState.ACTIVE
    assert store.record_comparison(name, won=False) is PresetState.ACTIVE
    assert store.record_comparison(name, won=False) is PresetState.WITHDRAWN
    assert store.find_preset(Query(key=KEY, ratios=PRESET.ratios)) is None
    assert store.presets()[0].lost_comparisons == 2
    assert store.record_comparison("gone", won=False) is PresetState.WITHDRAWN


def test_removing(store: Store) -> None:
    name = store.save_preset(PRESET).name
    assert store.remove_preset(name)
    assert not store.remove_preset(name)
    assert store.presets() == []
