"""Folders for daemons, and a daemon for whole modules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.zftune.daemon.daemons import Daemon, serving, short_folder
from tests.support.zftune.daemon.hosted import Hosted
from tests.support.zftune.daemon.in_process import Application, hosting


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as made:
        yield made


@pytest.fixture(scope="module")
def served() -> Iterator[Daemon]:
    """A daemon for a module's tests, which leave it as it was: `hosted.py` says what it hosts."""
    with short_folder() as made, serving(made) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def application() -> Iterator[Application]:
    with hosting(Hosted()) as made:
        yield made
