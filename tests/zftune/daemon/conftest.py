"""Folders with short paths: a socket's has at most 107 bytes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.zftune.daemon.daemons import Daemon, serving


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users may enter, as they may enter /tmp."""
    made = Path(tempfile.mkdtemp(prefix="zft-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def served() -> Iterator[Daemon]:
    """A daemon for a module's tests, which leave it as it was: `hosted.py` says what it hosts."""
    made = Path(tempfile.mkdtemp(prefix="zft-"))
    made.chmod(0o755)
    with serving(made) as daemon:
        yield daemon
    shutil.rmtree(made)
