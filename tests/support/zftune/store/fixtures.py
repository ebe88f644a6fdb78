"""A store in a file of its own, and one that is a file's or a PostgreSQL server's by turns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tiers import fast
from tests.support.zftune.fixtures import Clock
from tests.support.zftune.store.servers import Server, emptied, served
from zftune.store import open_store
from zftune.store.store import Store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "zftune.db"


@pytest.fixture
def store(path: Path, clock: Clock) -> Iterator[Store]:
    with open_store(str(path), clock=clock) as opened:
        assert opened.notices == []
        yield opened


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """One for all tests of a worker; who kills one has one of its own."""
    yield from served()


@pytest.fixture(params=fast(["file"], all_of=["file", "server"]))
def url(request: pytest.FixtureRequest, path: Path) -> str:
    """Of a store: what holds of one holds of the other. By day test_runs.py and test_servers.py ask the server."""
    return str(path) if request.param == "file" else emptied(request.getfixturevalue("server"))


@pytest.fixture
def either(url: str, clock: Clock) -> Iterator[Store]:
    with open_store(url, clock=clock) as opened:
        assert opened.notices == []
        opened._database.ahead_s = 0.0
        yield opened
