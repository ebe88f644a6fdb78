"""What takes long is made once for all workers of a run of the tests."""

from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

_Made = TypeVar("_Made")


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], _Made]) -> _Made:
    """What `make` returns (it is pickled), by whichever worker of the run comes first; the others wait for it."""
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, result = shared / f"once-{name}", shared / f"once-{name}.pickle"
    with (shared / f"once-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            folder.mkdir()
            result.write_bytes(pickle.dumps(make(folder)))
        made: _Made = pickle.loads(result.read_bytes())
    return made
