"""Locks of torch's extensions: their names and ages."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from zftune.doctor import software
from zftune.doctor.software import deepspeed_checks, extension_locks, left_locks
from zftune.profile.command.document import waits_for

FIVE_HOURS_S = 5 * 3600


def locked(folder: Path, age_s: float) -> None:
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    then = (folder / "lock").stat().st_mtime - age_s
    os.utime(folder / "lock", (then, then))


def test_an_old_lock_is_broken_and_comes_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    locked(tmp_path / "cpu_adam", FIVE_HOURS_S)
    (found,) = left_locks(os.environ)
    assert (found.status, found.stops_training, found.is_fault) == ("broken", True, True)
    assert found.finding.startswith('The compilation lock "$TORCH_EXTENSIONS_DIR"/cpu_adam/lock is 5 h old: ')
    assert str(found.fix).startswith('rm "$TORCH_EXTENSIONS_DIR"/cpu_adam/lock ')
    assert [one.finding for one in deepspeed_checks() if one.status == "broken"] == [found.finding]


def test_a_young_lock_is_a_note(tmp_path: Path) -> None:
    locked(tmp_path / "cpu_adam", 60)
    (found,) = left_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    assert (found.status, found.fix, found.is_fault) == ("note", None, False)
    assert found.figures["age_s"] == pytest.approx(60, abs=30)


def test_torch_that_locks_by_flock_hangs_on_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked(tmp_path / "cpu_adam", FIVE_HOURS_S)
    for version, count in (("2.14.0+cpu", 0), ("2.13.1", 1)):
        monkeypatch.setattr(software, "installed", {"torch": version}.get)
        assert len(extension_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path)})) == count


@pytest.mark.parametrize("name", ["XDG_CACHE_HOME", "HOME"])
def test_they_are_looked_for_where_torch_makes_them(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.cpp_extension import _get_build_directory

    for other in ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, str(tmp_path))
    built = Path(_get_build_directory("cpu_adam", verbose=False))
    (built / "lock").touch()
    (found,) = extension_locks(os.environ)
    (word,) = shlex.split(found.shown)  # as a shell would read it
    assert Path(os.path.expandvars(word)).expanduser().samefile(built / "lock")


def test_a_profile_that_waits_names_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    locked(tmp_path / "extensions" / "async_io", 60)
    assert str(waits_for(tmp_path, 5)).endswith("/async_io/lock is 60 s old")
    locked(tmp_path / "extensions" / "cpu_adam", FIVE_HOURS_S)
    assert 'End this run, remove it (rm "$TORCH_EXTENSIONS_DIR"/cpu_adam/lock), and start again' in str(
        waits_for(tmp_path, 5)
    )
