"""Locks that torch's loader of compiled operations leaves where its process is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import upstream_ops


def test_a_lock_is_removed_once_no_process_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_ops, "folder", lambda: tmp_path)
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    with lock.open("x"):
        upstream_ops.environment()
        assert lock.exists()
    upstream_ops.environment()
    assert not lock.exists()
