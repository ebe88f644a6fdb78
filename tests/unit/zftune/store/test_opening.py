"""Whatever is wrong with the database, opening gives a store that works, and one sentence."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sqlite3
import stat
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.support.zftune.store.examples import PRESET
from zftune.doctor.software import store_check
from zftune.errors import StoreError
from zftune.store import open_store, opening
from zftune.store.location import locate, meant_by, settled
from zftune.store.opening import SCHEMA, backups
from zftune.store.store import Store


def one_notice(store: Store) -> str:
    """The only notice: a sentence of one line."""
    (notice,) = store.notices
    assert "\n" not in notice
    assert not notice.endswith(".")
    return notice


def works_in_memory(store: Store) -> None:
    assert not store.is_kept
    name = store.save_preset(PRESET).name
    assert [preset.name for preset in store.presets()] == [name]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_database(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    ("value", "data_home", "expected"),
    [
        ("", None, "HOME/.local/share/zftune/zftune.db"),
        ("", "", "HOME/.local/share/zftune/zftune.db"),
        ("", "relative", "HOME/.local/share/zftune/zftune.db"),
        ("", "HOME/xdg", "HOME/xdg/zftune/zftune.db"),
        ("HOME/own.db", "HOME/xdg", "HOME/own.db"),
        ("~/own.db", None, "HOME/own.db"),
        ("sqlite:///HOME/own.db", None, "HOME/own.db"),
        ("sqlite+pysqlite:///HOME/own.db?timeout=1", None, "HOME/own.db"),
        ("file:HOME/own.db", None, "HOME/own.db"),
        ("file://HOME/my%20own.db?mode=rwc", None, "HOME/my own.db"),
        ("file://localhostHOME/own.db#x", None, "HOME/own.db"),
    ],
)
def test_the_file_is_where_the_environment_says(
    tmp_path: Path, value: str, data_home: str | None, expected: str
) -> None:
    home = str(tmp_path)
    environment = {"HOME": home, "ZFTUNE_DB": value.replace("HOME", home)}
    if data_home is not None:
        environment["XDG_DATA_HOME"] = data_home.replace("HOME", home)
    with open_store(environment=environment) as store:
        assert store.notices == []
        assert store.path == Path(expected.replace("HOME", home))
        store.save_preset(PRESET)
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(store.path.with_name("zftune.db").parent.stat().st_mode) & 0o077 in (0, 0o055)


def test_two_environments_that_mean_one_store_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path / "link")
    names = ["own.db", "file:own.db", "sqlite:///own.db", f"{tmp_path}/link/own.db", "~/own.db"]
    assert {meant_by({"ZFTUNE_DB": name, "HOME": str(tmp_path)}).value for name in names} == {f"{tmp_path}/own.db"}
    assert meant_by({"HOME": str(tmp_path)}).value == f"{tmp_path}/.local/share/zftune/zftune.db"
    assert meant_by({"ZFTUNE_DB": "sqlite://"}).value == "sqlite://"
    server = "postgresql://me:secret@host/db"
    assert meant_by({"ZFTUNE_DB": server}).value == server
    assert "secret" not in repr(meant_by({"ZFTUNE_DB": server}))


def test_a_relative_path_stays_what_it_was_meant_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert settled({"ZFTUNE_DB": "own.db", "A": "b"}) == {"ZFTUNE_DB": str(tmp_path / "own.db"), "A": "b"}
    for kept in ({}, {"ZFTUNE_DB": "sqlite://"}, {"ZFTUNE_DB": "postgresql://host/db"}):
        assert settled(kept) == kept
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with open_store("own.db") as store:
        assert one_notice(store).startswith("$ZFTUNE_DB cannot be used (No such file or directory)")
        works_in_memory(store)


@pytest.mark.parametrize(
    "url", ["sqlite://", "sqlite:///:memory:", "sqlite:///", "file::memory:", "file:x?mode=memory"]
)
def test_a_database_in_memory_if_asked_for(url: str) -> None:
    with open_store(url) as store:
        assert "asks for a database in memory" in one_notice(store)
        works_in_memory(store)


@pytest.mark.parametrize(
    "content", [b"no database at all" * 100, b"SQLite format 3\0" + b"\xff" * 8000], ids=["text", "pages"]
)
def test_a_corrupt_file_is_left_as_it_is(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with open_store(str(path)) as store:
        assert "$ZFTUNE_DB is corrupt (" in one_notice(store)
        works_in_memory(store)
    assert path.read_bytes() == content
    assert backups(path) == []


@pytest.mark.parametrize("schema", [9999, 0], ids=["newer", "older"])
def test_another_schema_is_not_opened(path: Path, store: Store, schema: int) -> None:
    store.close()
    write_database(path, f"UPDATE zftune_schema SET number = {schema}")
    before = digest(path)
    with open_store(str(path)) as another:
        said = f"has schema {schema} of another zftune (this one's is {SCHEMA}) and was not opened"
        assert said in one_notice(another)
        works_in_memory(another)
    assert digest(path) == before


@pytest.mark.parametrize("made", [False, True])
def test_a_write_that_was_cut_short_is_undone(path: Path, tmp_path: Path, made: bool) -> None:
    """As by a process that was killed before the log is written ahead: its journal lies beside the file."""
    if made:
        open_store(str(path)).close()
    path.parent.mkdir(exist_ok=True)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
        connection.execute("PRAGMA cache_size=1")
        if not made:
            connection.execute("VACUUM")
        connection.execute("BEGIN")
        connection.execute("CREATE TABLE half (x)")
        for _ in range(20):
            connection.execute("INSERT INTO half VALUES (randomblob(9000))")
        cut = tmp_path / "cut" / path.name
        cut.parent.mkdir()
        for name in (path.name, f"{path.name}-journal"):
            shutil.copy(path.with_name(name), cut.with_name(name))
    assert cut.with_name(f"{path.name}-journal").read_bytes()[0] != 0  # it would be played back
    with open_store(str(cut)) as store:
        assert store.notices == []
        assert store.is_kept
        store.save_preset(PRESET)


def test_another_programs_database_is_not_opened(path: Path) -> None:
    path.parent.mkdir()
    write_database(path, "CREATE TABLE preset (theirs INTEGER)")
    before = digest(path)
    with open_store(str(path)) as store:
        assert "is another program's database" in one_notice(store)
        works_in_memory(store)
    assert digest(path) == before


@pytest.mark.parametrize("value", ["/proc/zftune/zftune.db", "/dev/null/zftune.db", "/", "x" * 300, "a\0b"])
def test_a_place_that_cannot_be_written(value: str) -> None:
    with open_store(value) as store:
        assert one_notice(store).startswith("$ZFTUNE_DB ")
        works_in_memory(store)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://somebody:secret@localhost:1/zftune",
        "nothing+known://somebody:secret@host/zftune",
        "mysql+nothing://somebody:secret@host/zftune",
    ],
)
def test_a_server_that_cannot_be_had(url: str) -> None:
    with open_store(url) as store:
        notice = one_notice(store)
        assert ("database of $ZFTUNE_DB cannot be used (" in notice) == url.startswith("postgresql:")
        assert ("$ZFTUNE_DB is " in notice and "it must be a path" in notice) != url.startswith("postgresql:")
        assert "secret" not in notice
        works_in_memory(store)


def mounts(root: Path, kinds: Mapping[str, str]) -> Path:
    """A root whose mount table says what is asked for."""
    lines = [f"1 0 0:1 / {point} rw - {kind} source rw\n" for point, kind in {"/": "ext4", **kinds}.items()]
    table = root / "proc/self/mountinfo"
    table.parent.mkdir(parents=True)
    table.write_text("".join(lines))
    return root


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "fuse.sshfs", "cifs"])
def test_a_network_file_system_is_avoided(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    path.parent.mkdir()
    own = tmp_path / "local" / f"zftune-{os.getuid()}" / "zftune.db"
    own.parent.parent.mkdir()
    monkeypatch.setattr("zftune.store.opening.node_local", lambda uid, root: [own])
    root = mounts(tmp_path / "root", {str(path.parent): kind, str(tmp_path / "local"): "tmpfs"})
    with open_store(str(path), root=root) as store:
        assert f"is on a network file system ({kind})" in one_notice(store)
        assert str(own) in one_notice(store)
        assert (store.path, store.is_kept) == (own, True)
        store.save_preset(PRESET)
    assert not path.exists()
    assert stat.S_IMODE(own.parent.stat().st_mode) == 0o700


def test_a_folder_of_somebody_else_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    path.parent.mkdir()
    shared, linked = tmp_path / "shared", tmp_path / "linked"
    shared.mkdir(mode=0o777)
    shared.chmod(0o777)
    linked.symlink_to(shared)
    candidates = [shared / "zftune.db", linked / "zftune.db", tmp_path / "no" / "such" / "zftune.db"]
    monkeypatch.setattr("zftune.store.opening.node_local", lambda uid, root: candidates)
    with open_store(str(path), root=mounts(tmp_path / "root", {str(path.parent): "nfs"})) as store:
        assert "kept in memory" in one_notice(store)
        works_in_memory(store)


@pytest.mark.parametrize(
    ("value", "kinds", "status"),
    [
        ("", {}, "ok"),
        ("HOME/own.db", {}, "ok"),
        ("/dev/null/own.db", {}, "broken"),
        ("sqlite://", {}, "note"),
        ("HOME/own.db", {"HOME": "nfs4"}, "note"),
        ("postgresql://localhost:1/x", {}, "note"),
    ],
)
def test_doctor_says_what_opening_does(
    tmp_path: Path, value: str, kinds: dict[str, str], status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zftune.store.opening.node_local", lambda uid, root: [])
    home = tmp_path / "home"
    home.mkdir()
    root = mounts(tmp_path / "root", {point.replace("HOME", str(home)): kind for point, kind in kinds.items()})
    environment = {"HOME": str(home), "ZFTUNE_DB": value.replace("HOME", str(home))}
    check = store_check(environment, home, root)
    assert check.status == status
    location = locate(environment["ZFTUNE_DB"], environment, home)
    if location.url is None:
        assert check.finding.startswith(location.shown)
        with open_store(environment=environment, root=root) as store:
            assert (store.notices == []) == (status == "ok")


class Waits(threading.Event):
    """Does `then` whenever somebody waits, and does not wait itself."""

    def __init__(self, then: Callable[[], object]) -> None:
        super().__init__()
        self._then = then

    def wait(self, timeout: float | None = None) -> bool:
        self._then()
        return self.is_set()


def test_a_patient_write_outwaits_a_locked_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "BUSY_TIMEOUT_S", 0.0)
    with (
        open_store(str(tmp_path / "z.db"), environment={"HOME": str(tmp_path)}) as store,
        contextlib.closing(sqlite3.connect(tmp_path / "z.db", isolation_level=None)) as other,
    ):
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreError, match="database is locked"):  # nobody is patient
            store.save_preset(PRESET)
        hurried = Waits(lambda: hurried.set())
        with pytest.raises(StoreError, match="database is locked"), store.patient(0.0, hurried):
            store.save_preset(PRESET)
        with store.patient(0.0, Waits(lambda: other.execute("ROLLBACK"))):
            name = store.save_preset(PRESET).name
        assert [one.name for one in store.presets()] == [name]
