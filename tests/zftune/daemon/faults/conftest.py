"""A stage for faults; its processes are forked from one that has imported everything.

`ZFTUNE_FAULTS=50` lets each of them happen so often, at other moments each time.
"""

from __future__ import annotations

import multiprocessing
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from tests.zftune.daemon.faults.stage import FAULTS, SEED, Stage

_worst: dict[str, float] = {}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "number" in metafunc.fixturenames:
        metafunc.parametrize("number", range(FAULTS))


@pytest.fixture
def chance(request: pytest.FixtureRequest, number: int) -> random.Random:
    """Other moments for each test and time, the same whenever it is run again."""
    return random.Random(f"{SEED} {request.node.originalname} {number}")


@pytest.fixture(scope="session")
def context() -> ForkServerContext:
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["tests.zftune.daemon.faults.zygote"])
    return made


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a short path, and for all users: others may plant something in it."""
    made = Path(tempfile.mkdtemp(prefix="zft-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


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
        for name, value in one.worst_ms.items():
            _worst[name] = max(_worst.get(name, 0.0), value)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what the worst hook took: of work, with waits for locks, and in all."""
    if _worst:
        figures = ", ".join(f"{name} {value:.1f} ms" for name, value in _worst.items())
        terminalreporter.write_line(f"worst hook of a tuner: {figures}")
