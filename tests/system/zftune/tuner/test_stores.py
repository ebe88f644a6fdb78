"""Whatever is wrong with the database, `zftune tune` trains and searches, and says so in one sentence."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from tests.support.zftune.fixtures import rig_text
from tests.support.zftune.tuner import commanding
from zftune.store import open_store
from zftune.store.opening import SCHEMA

STEPS = 160
DATABASE = ".local/share/zftune/zftune.db"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """With a database that is as it should be."""
    with open_store(str(tmp_path / "home" / DATABASE)) as store:
        assert store.notices == []
    return tmp_path / "home"


def nothing(home: Path) -> Mapping[str, Any]:
    return {}


def read_only(home: Path) -> Mapping[str, Any]:
    for path in sorted(home.rglob("*"), reverse=True):
        path.chmod(0o555 if path.is_dir() else 0o444)
    home.chmod(0o555)
    return {"powerless": True}


def full(home: Path) -> Mapping[str, Any]:
    (home / DATABASE).unlink()
    return {"most_bytes": 60_000}  # more than the document has, less than the tables


def filling(home: Path) -> Mapping[str, Any]:
    return {"most_bytes": 110_000}  # of the log, which is written first: the tables are there


def newer(home: Path) -> Mapping[str, Any]:
    with sqlite3.connect(home / DATABASE) as connection:
        connection.execute("UPDATE zftune_schema SET number = 9999")
    connection.close()
    return {}


def corrupt(home: Path) -> Mapping[str, Any]:
    (home / DATABASE).write_bytes(b"no database at all" * 100)
    return {}


def network(home: Path) -> Mapping[str, Any]:
    root = home.parent / "root"
    (root / "proc/self").mkdir(parents=True)
    lines = [f"1 0 0:1 / {at} rw - {kind} source rw\n" for at, kind in {"/": "ext4", str(home): "nfs4"}.items()]
    (root / "proc/self/mountinfo").write_text("".join(lines))
    return {"root": str(root), "local": str(home.parent / f"zftune-{os.getuid()}" / "zftune.db")}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (nothing, None),
        (read_only, "cannot be used (Permission denied): what zftune learns is kept in memory"),
        (full, "cannot be used ("),
        (filling, "could not be written ("),
        (newer, f"has schema 9999 of another zftune (this one's is {SCHEMA}) and was not opened: what"),
        pytest.param(
            corrupt,
            "is corrupt (it is not a SQLite database) and was left as it is (zftune presets restore): what",
            marks=pytest.mark.smoke,
        ),
        (network, "is on a network file system (nfs4), where SQLite's locks cannot be trusted: "),
    ],
)
def test_training_starts_whatever_the_database_is(
    context: ForkServerContext,
    tmp_path: Path,
    home: Path,
    mini_model: Path,
    wrong: Callable[[Path], Mapping[str, Any]],
    sentence: str | None,
) -> None:
    (tmp_path / "rig.toml").write_text(
        rig_text("quick", forward_ms=6, backward_ms=6, d2h_ms=2, host_ms=8, h2d_ms=2, scale=1)
    )
    (tmp_path / "text.txt").write_text("to be, or not to be, that is the question: " * 400)
    given = {"rig": tmp_path / "rig.toml", "model": mini_model, "text": tmp_path / "text.txt", "steps": STEPS}
    given |= {"sampler": "random", "json": tmp_path / "found.json", "thinking-s": 0.01}  # on a busy machine too
    arguments = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    environment = {"HOME": str(home), "ZFTUNE_DB": "", "XDG_DATA_HOME": "", "COLUMNS": "400"}
    output = tmp_path / "output"
    process = context.Process(target=commanding.tune, args=(arguments, str(output), environment, wrong(home)))
    process.start()
    process.join(100)
    home.chmod(0o755)
    *lines, code = output.read_text().splitlines()
    assert code == "0", lines
    document = json.loads((tmp_path / "found.json").read_text())
    assert document["steps"] == STEPS or wrong is filling  # nothing is tried that cannot be written down first
    assert document["measurements"] >= 1
    assert "Traceback" not in "\n".join(lines)
    notices = [one for one in document["notices"] if "of the gradient energy" not in one]
    assert len(notices) == (sentence is not None)
    assert all(any(notice in line for line in lines) for notice in notices)
    if sentence is not None:
        assert sentence in notices[0]
        assert notices[0].startswith(("~/.local/share/zftune/zftune.db ", "the store"))
