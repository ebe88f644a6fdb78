"""A stage for faults, forked from what has imported everything. `ZFTUNE_FAULTS=50`: each happens so often."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from tests.support.zftune.daemon.faults.stage import FAULTS, SEED, Stage


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "number" in metafunc.fixturenames:
        metafunc.parametrize("number", range(FAULTS))


@pytest.fixture
def chance(request: pytest.FixtureRequest, number: int) -> random.Random:
    """Other moments for each test and time, the same whenever it is run again."""
    return random.Random(f"{SEED} {request.node.originalname} {number}")


@pytest.fixture
def stage(context: ForkServerContext, folder: Path) -> Iterator[Callable[..., Stage]]:
    """Makes stages, each with a folder of its own."""
    made: list[Stage] = []

    def make(**more: Any) -> Stage:
        own = folder / str(len(made))
        own.mkdir(mode=0o755)
        made.append(Stage(context, own, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()
