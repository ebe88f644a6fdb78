"""A stage for faults; its processes are forked from one that has imported everything.

`ZFTUNE_FAULTS=50` lets each of them happen so often, at other moments each time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from tests import zygote
from tests.zftune.daemon.faults.stage import FAULTS, HOOK_AWAKE_MS, HOOK_MS, SEED, Stage

_worst_ms: list[dict[str, float]] = []
"""Of each training's hooks."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "number" in metafunc.fixturenames:
        metafunc.parametrize("number", range(FAULTS))


@pytest.fixture
def chance(request: pytest.FixtureRequest, number: int) -> random.Random:
    """Other moments for each test and time, the same whenever it is run again."""
    return random.Random(f"{SEED} {request.node.originalname} {number}")


@pytest.fixture(scope="session")
def context() -> ForkServerContext:
    return zygote.context()


@pytest.fixture(scope="session")
def hooks_are_short() -> Iterator[None]:
    """Looked at once all faults have happened."""
    yield
    over = [worst for worst in _worst_ms if worst["cpu"] >= HOOK_MS or worst["awake"] >= HOOK_AWAKE_MS]
    assert len(over) <= max(1, len(_worst_ms) // 10), over


@pytest.fixture
def stage(context: ForkServerContext, folder: Path, hooks_are_short: None) -> Iterator[Callable[..., Stage]]:
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
        _worst_ms.extend(one.worst_ms)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what the worst hook took: of work, with waits for locks, and in all."""
    if _worst_ms:
        worst = {name: max(one[name] for one in _worst_ms) for name in _worst_ms[0]}
        figures = ", ".join(f"{name} {value:.1f} ms" for name, value in worst.items())
        terminalreporter.write_line(f"worst hook of a tuner: {figures}")
