"""The scratch copy of a working directory: what a trial writes in it never reaches the original."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.zftune.restarts.training import content
from zftune.errors import BadInputError
from zftune.restarts import scratch
from zftune.restarts.scratch import Outside, Scratch, surroundings


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A working directory with everything that makes it hard."""
    root, far = tmp_path / "source", tmp_path / "far"
    for folder in ("outputs/run-1", "data", ".git/objects", "venv/bin", "__pycache__"):
        (root / folder).mkdir(parents=True)
    (far / "deep").mkdir(parents=True)
    (root / "train.py").write_text("print()")
    (root / "train.py").chmod(0o755)
    (root / "outputs" / "run-1" / "log.txt").write_text("old")
    (root / "venv" / "pyvenv.cfg").write_text("")
    (root / ".git" / "HEAD").write_text("ref")
    (root / "__pycache__" / "train.pyc").write_text("")
    (far / "deep" / "checkpoint.bin").write_text("weights")
    (root / "linked").symlink_to(far)
    (root / "data" / "self").symlink_to(root / "data")
    (root / "broken").symlink_to(far / "nothing")
    os.mkfifo(root / "pipe")
    return root


def test_the_copy_may_go_into_a_folder_that_is_there(source: Path, tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    Scratch(source, tmp_path / "copy")  # as where the working directory is right below the root
    assert (tmp_path / "copy" / "data").is_dir()


def test_what_is_written_stays_in_the_copy(source: Path, tmp_path: Path) -> None:
    before = content(source), content(tmp_path / "far")
    copy = Scratch(source, tmp_path / "copy").target
    (copy / "outputs" / "run-1" / "log.txt").write_text("new")
    (copy / "linked" / "deep" / "checkpoint.bin").write_text("new")
    (copy / "linked" / "new.txt").write_text("new")
    (copy / "broken").write_text("new")
    shutil.rmtree(copy / "outputs")
    assert (content(source), content(tmp_path / "far")) == before


def test_the_copy_is_what_the_command_needs(source: Path, tmp_path: Path) -> None:
    copy = Scratch(source, tmp_path / "copy").target
    assert os.access(copy / "train.py", os.X_OK)
    assert (copy / "linked" / "deep" / "checkpoint.bin").read_text() == "weights"
    assert (copy / ".git").resolve() == source / ".git"
    assert (copy / "venv").resolve() == source / "venv"
    assert (copy / "data" / "self").resolve() == source / "data"
    assert sorted(path.name for path in copy.iterdir()) == [".git", "data", "linked", "outputs", "train.py", "venv"]


def test_large_files_are_links_and_writing_through_them_is_found_out(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / "big.bin").write_bytes(bytes(4000))
    monkeypatch.setattr(scratch, "COPIED_BYTES", 2000)
    copied = Scratch(source, tmp_path / "copy")
    assert (copied.target / "big.bin").is_symlink()
    assert not (copied.target / "train.py").is_symlink()
    assert copied.changed() == ([], [])
    (copied.target / "big.bin").write_bytes(bytes(5000))
    (source / "outputs" / "new.txt").write_text("by an absolute path")
    assert copied.changed() == (["big.bin"], ["outputs/new.txt"])


def test_too_much_is_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "MOST_ENTRIES", 5)
    with pytest.raises(BadInputError, match="has more than 5 files"):
        Scratch(source, tmp_path / "copy")


def test_what_is_left_out_is_neither_copied_nor_watched(source: Path, tmp_path: Path) -> None:
    (source / "zftune.db").write_text("rows")
    copied = Scratch(source, tmp_path / "copy", left_out=[source / "zftune.db"])
    (source / "zftune.db").write_text("more rows")
    (source / "zftune.db-wal").write_text("rows")
    assert not (copied.target / "zftune.db").exists()
    assert copied.changed() == ([], [])


def test_programs_and_data_that_are_not_copied_are_where_they_were(source: Path, tmp_path: Path) -> None:
    copied = Scratch(source, tmp_path / "copy")
    given = ["venv/bin/python", "./train.py", "--data=../far/deep", "--out=../new", "data/x", "a=b/c"]
    assert copied.command(given) == [
        f"{source}/venv/bin/python", "./train.py", f"--data={tmp_path}/far/deep", *given[3:]
    ]  # fmt: skip


def test_arguments_in_the_working_directory_are_moved(source: Path, tmp_path: Path) -> None:
    copied = Scratch(source, tmp_path / "copy")
    given = [f"{source}/venv/bin/python", f"{source}/train.py", f"--out={source}/outputs", "--data", f"{source}/new",
             f"{source}/venv/bin/x", "train.py", "/usr", f"{source}-other"]  # fmt: skip
    moved = copied.command(given)
    assert moved == [given[0], f"{copied.target}/train.py", f"--out={copied.target}/outputs", "--data",
                     f"{copied.target}/new", given[5], *given[6:]]  # fmt: skip


def test_what_is_above_can_be_read_by_relative_paths(source: Path, tmp_path: Path) -> None:
    inner = source / "outputs" / "run-1"
    (tmp_path / "root").mkdir()
    copied = Scratch(inner, surroundings(inner, tmp_path / "root"))
    assert copied.target.name == "run-1"
    assert (copied.target / "../../train.py").read_text() == "print()"
    assert (copied.target / "../../../far/deep/checkpoint.bin").read_text() == "weights"
    (copied.target / "log.txt").write_text("new")
    assert (inner / "log.txt").read_text() == "old"
    outside = Outside(["x", "--out", "../out"], inner)
    (source / "outputs" / "out").mkdir()
    assert outside.changed() == [str(source / "outputs" / "out")]


def test_folders_that_are_named_by_absolute_paths_are_watched(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    outside = Outside(["x", "--out", str(tmp_path / "out"), f"--log={tmp_path}/new", str(source)], source)
    assert outside.changed() == []
    (tmp_path / "out" / "checkpoint").write_text("")
    (tmp_path / "new").mkdir()
    (source / "inside").write_text("")
    assert outside.changed() == [str(tmp_path / "out"), str(tmp_path / "new")]
