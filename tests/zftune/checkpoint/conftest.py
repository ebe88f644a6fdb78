"""Checkpoints that DeepSpeed saved, once for all tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import upstream_ops
from tests.zftune.checkpoint import upstream


@pytest.fixture(scope="session")
def saved_by(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The folder of all cases of a number of ranks."""
    upstream_ops.need()
    folder = tmp_path_factory.mktemp("upstream")
    upstream.start(folder)
    return lambda ranks: folder / str(ranks)
