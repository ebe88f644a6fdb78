"""Study 010's scripted GPU is an oracle: it is checked by hand here, and the recorder against it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "studies" / "010-attribution"


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """The study's modules, which are no part of a package."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("scripted", "scenarios")
    modules: list[ModuleType] = [__import__(name) for name in names]
    yield modules[0], modules[1]
    for name in names:
        sys.modules.pop(name, None)


def test_truth_of_a_blocking_wait_is_what_the_queue_does_not_hide(study: tuple[Any, Any]) -> None:
    gpu = study[0].ScriptedGpu()
    gpu.launch(30.0)
    gpu.block("host", 50.0)
    assert gpu.stalls_ms()["host"] == pytest.approx(20.0)


def test_truth_counts_an_idle_moment_once(study: tuple[Any, Any]) -> None:
    gpu = study[0].ScriptedGpu()
    gpu.join("comm", 50.0)
    gpu.block("d2h", 60.0)
    found = gpu.stalls_ms()
    assert found["comm"] == pytest.approx(50.0)
    assert found["d2h"] == pytest.approx(10.0)


def test_truth_of_a_hidden_wait_is_nothing(study: tuple[Any, Any]) -> None:
    gpu = study[0].ScriptedGpu()
    gpu.launch(80.0)
    gpu.block("data", 50.0)
    assert gpu.stalls_ms() == pytest.approx(dict.fromkeys(study[0].CAUSES, 0.0))


def test_there_are_thirty_scenarios_with_a_name_each(study: tuple[Any, Any]) -> None:
    found = study[1].scripted()
    assert len({scenario.name for scenario in found}) == len(found) == 30
    assert {scenario.kind for scenario in found} == {"alone", "hidden", "partly", "pair", "jitter"}


def test_every_cause_is_found_within_3_points_of_the_step(study: tuple[Any, Any]) -> None:
    scripted, scenarios = study
    for scenario in scenarios.scripted():
        outcome = scripted.play(scenario, steps=20, seed=7)
        assert max(map(abs, outcome.errors().values())) <= 0.03, scenario.name
        assert outcome.phases_off_ms < 1e-3, scenario.name
        hidden = scenario.kind == "hidden" or scenario.name == "d2h hidden, jitter"
        assert (sum(outcome.truth_ms.values()) < 0.1) == hidden, scenario.name
