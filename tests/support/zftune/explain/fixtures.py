"""A store that ends with its test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.zftune.explain.runs import Clock
from zftune.store import open_store
from zftune.store.store import Store


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store("sqlite://", environment={"HOME": "/nowhere"}) as store:
        yield store


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timed(clock: Clock) -> Iterator[Store]:
    with open_store("sqlite://", environment={"HOME": "/nowhere"}, clock=clock) as store:
        yield store
