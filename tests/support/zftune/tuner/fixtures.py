"""Trainings that are tuned while they train."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import optuna
import pytest

from tests.support.zftune.tuner.scene import Make, Scene
from zftune.tuner import forecast


@pytest.fixture
def random_proposals(monkeypatch: pytest.MonkeyPatch) -> None:
    """For searches of which it does not matter what they propose: a Gaussian process takes its time."""
    monkeypatch.setattr(forecast, "_sampler", lambda _, seed: optuna.samplers.RandomSampler(seed=seed))


@pytest.fixture
def make() -> Iterator[Make]:
    scenes: list[Scene] = []

    def make(**more: Any) -> Scene:
        scenes.append(Scene(**more))
        return scenes[-1]

    yield make
    for scene in scenes:
        scene.live.close()
        scene.optimizer.abandon()
