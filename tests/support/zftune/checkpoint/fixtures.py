"""Checkpoints that DeepSpeed saved, once for all tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import upstream_ops
from tests.support.once import once
from tests.support.zftune.checkpoint import upstream


@pytest.fixture(scope="session")
def saved_by(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    upstream_ops.need()

    def start(folder: Path) -> Path:
        upstream.start(folder)
        return folder

    folder = once(tmp_path_factory, "checkpoint", start)
    return lambda ranks: folder / str(ranks)
