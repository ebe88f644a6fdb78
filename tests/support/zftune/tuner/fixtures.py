"""Trainings that are tuned while they train."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.zftune.tuner.scene import Make, Scene


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
