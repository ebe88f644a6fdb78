"""`zftune uninstall`: what lies where, and its removal once it is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tests.zftune.store.examples import PRESET
from zftune.cli.uninstall import uninstall
from zftune.daemon.client.http import DaemonClient
from zftune.store import files, open_store


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """All that zftune keeps; a file beside it is somebody else's."""
    monkeypatch.setenv("ZFTUNE_DB", str(tmp_path / "zftune.db"))
    monkeypatch.setenv("ZFTUNE_SOCKET", str(tmp_path / "zftune.sock"))
    with open_store() as store:
        store.save_preset(PRESET)
        assert store.path is not None
        files.back_up(store.path)
    (tmp_path / "zftune.sock.log").write_text("a line\n")
    found = sorted(tmp_path.iterdir())
    (tmp_path / "zftune.db.mine").write_text("x")
    return found


def invoke(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(uninstall)
    return CliRunner().invoke(app, arguments)


def test_it_tells_and_changes_nothing(kept: list[Path], tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    done = invoke()
    assert done.exit_code == 0, done.output
    for path in kept:
        assert str(path) in done.output.replace("\n", "")
    assert "zftune.db.mine" not in done.output
    assert "zftune uninstall --yes removes all of it" in done.output
    assert sorted(tmp_path.iterdir()) == before


def test_a_daemon_that_serves_has_to_end_first_and_that_is_said_at_once(
    kept: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DaemonClient, "get", lambda *_: {})
    first = "removes all of it once the daemon that serves here has ended (zftune daemon stop)."
    assert first in invoke().output
    done = invoke("--yes")
    assert "end it first: zftune daemon stop" in str(done.exception)
    assert all(path.exists() for path in kept)


def test_it_removes_what_it_told(kept: list[Path], tmp_path: Path) -> None:
    done = invoke("--yes")
    assert done.exit_code == 0, done.output
    assert [one.name for one in tmp_path.iterdir()] == ["zftune.db.mine"]
    again = invoke("--yes")
    assert "zftune keeps nothing on this machine." in again.output
    assert "pip uninstall zftune" in again.output


def test_no_empty_folder_of_its_own_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is anybody else's removed: only one that zftune makes, and that nothing is left in."""
    own, others = tmp_path / "share" / "zftune", tmp_path / "cache" / "zftune"
    for folder in (own, others):
        folder.mkdir(parents=True)
    monkeypatch.setenv("ZFTUNE_DB", str(own / "zftune.db"))
    monkeypatch.setenv("ZFTUNE_SOCKET", str(others / "zftune.sock"))
    (own / "zftune.db").write_text("")
    (others / "zftune.sock.log").write_text("a line\n")
    (others / "mine").write_text("x")
    assert invoke("--yes").exit_code == 0
    assert not own.exists()
    assert own.parent.is_dir()
    assert [one.name for one in others.iterdir()] == ["mine"]


def test_nor_is_one_that_held_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that was ended, and a store that was removed by hand, leave theirs."""
    runtime = tmp_path / "runtime"
    own, daemons = tmp_path / "share" / "zftune", runtime / "zftune"
    for folder in (own, daemons):
        folder.mkdir(parents=True)
    monkeypatch.setenv("ZFTUNE_DB", str(own / "zftune.db"))
    monkeypatch.delenv("ZFTUNE_SOCKET", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert invoke().exit_code == 0
    assert own.is_dir()
    assert "zftune keeps nothing on this machine." in invoke("--yes").output
    assert not own.exists()
    assert not daemons.exists()
