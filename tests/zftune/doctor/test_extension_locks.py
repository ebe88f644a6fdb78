"""Locks of torch's extensions, made by torch's own code."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch.utils._filelock import FileLock
from torch.utils.file_baton import FileBaton

from zftune.doctor import software
from zftune.doctor.check import Check
from zftune.doctor.software import deepspeed_checks, extension_locks, left_locks
from zftune.profile.command.document import waits_for

FIVE_HOURS_S = 5 * 3600


def locked(folder: Path) -> FileBaton:
    folder.mkdir(parents=True)
    baton = FileBaton(str(folder / "lock"))
    assert baton.try_acquire()
    return baton


def killed(folder: Path) -> None:
    """What a process leaves that ends while it compiles."""
    baton = locked(folder)
    os.close(vars(baton)["fd"])
    then = (folder / "lock").stat().st_mtime - FIVE_HOURS_S
    os.utime(folder / "lock", (then, then))


def check(folder: Path) -> Check:
    (found,) = left_locks({"TORCH_EXTENSIONS_DIR": str(folder)})
    return found


def test_one_that_nobody_holds_is_broken_and_comes_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(tmp_path / "cpu_adam")
    found = check(tmp_path)
    assert (found.status, found.stops_training, found.is_fault) == ("broken", True, True)
    assert found.finding == (
        'An interrupted compilation of cpu_adam, or a newer torch, left "$TORCH_EXTENSIONS_DIR"/cpu_adam/lock 5 h ago,'
        " and no process has it open: every run that needs it waits without end."
    )
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert [one.finding for one in deepspeed_checks() if one.status == "broken"] == [found.finding]
    assert str(found.fix).startswith('rm "$TORCH_EXTENSIONS_DIR"/cpu_adam/lock ')


def test_one_that_is_held_is_a_note_with_who_compiles(tmp_path: Path) -> None:
    baton = locked(tmp_path / "cpu_adam")
    found = check(tmp_path)
    assert (found.status, found.fix, found.is_fault) == ("note", None, False)
    assert found.finding.startswith(f"Process {os.getpid()} has been compiling cpu_adam for ")
    baton.release()
    assert extension_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path)}) == []


def test_torch_that_locks_by_flock_hangs_on_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "installed", {"torch": "2.14.0+cpu"}.get)
    killed(tmp_path / "async_io")  # what an older torch left
    (tmp_path / "cpu_adam").mkdir()
    with FileLock(str(tmp_path / "cpu_adam" / "lock")):  # as torch 2.14 does
        found = check(tmp_path)
        assert (found.status, found.is_fault, found.figures) == ("note", False, {})
        assert found.finding == f"Process {os.getpid()} is compiling cpu_adam; runs that need it wait until then."
    assert (tmp_path / "cpu_adam" / "lock").exists()
    with (tmp_path / "cpu_adam" / "lock").open():  # who looks at it does not lock it
        assert list(left_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path)})) == []
    with FileLock(str(tmp_path / "async_io" / "lock"), timeout=0):
        pass  # what an older torch left stops nobody
    monkeypatch.setattr(software, "installed", {"torch": "2.13.1"}.get)  # for which the file alone is the lock
    left = left_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    assert [one.status for one in left] == ["broken", "broken"]


@pytest.mark.parametrize("name", ["XDG_CACHE_HOME", "HOME"])
def test_they_are_looked_for_where_torch_makes_them(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.cpp_extension import _get_build_directory

    for other in ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, str(tmp_path))
    (Path(_get_build_directory("cpu_adam", verbose=False)) / "lock").touch()
    (found,) = extension_locks(os.environ)
    assert (found.extension, found.is_left_over) == ("cpu_adam", True)
    shell = os.popen(f"ls {found.shown}")  # as a person would type it
    assert shell.read().endswith("/cpu_adam/lock\n")
    assert shell.close() is None


def test_a_profile_that_waits_names_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    killed(tmp_path / "extensions" / "cpu_adam")
    assert 'End this run, remove it (rm "$TORCH_EXTENSIONS_DIR"/cpu_adam/lock), and start again' in str(
        waits_for(tmp_path, 5)
    )
    baton = locked(tmp_path / "extensions" / "async_io")
    (tmp_path / "extensions" / "cpu_adam" / "lock").unlink()
    assert f"process {os.getpid()} has been compiling async_io" in str(waits_for(tmp_path, 5))
    baton.release()
