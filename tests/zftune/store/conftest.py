"""A store in a file of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from zftune.store import open_store
from zftune.store.store import Store


class Clock:
    """Wall clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "zftune.db"


@pytest.fixture
def store(path: Path, clock: Clock) -> Iterator[Store]:
    with open_store(str(path), clock=clock) as opened:
        assert opened.notices == []
        yield opened
