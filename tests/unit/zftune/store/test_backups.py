"""The tables are made once; a backup of them comes back."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateTable

from tests.support.zftune.store.examples import PRESET
from zftune.errors import BadInputError, StoreError
from zftune.store import open_store, opening
from zftune.store.opening import chosen, restore
from zftune.store.tables import Base


def test_the_tables_can_be_made_on_a_server() -> None:
    for table in Base.metadata.sorted_tables:
        assert "CREATE TABLE" in str(CreateTable(table).compile(dialect=postgresql.dialect()))  # type: ignore[no-untyped-call]


def test_the_tables_are_made_by_one_at_a_time(path: Path) -> None:
    path.parent.mkdir()
    opened = []
    threads = [threading.Thread(target=lambda: opened.append(open_store(str(path)))) for _ in range(3)]
    with opening.locked(path):
        for thread in threads:
            thread.start()
        assert opening.file_state(path).kind == "empty"
    for thread in threads:
        thread.join(30)
    assert [store.notices for store in opened] == [[]] * len(threads)
    for store in opened:
        store.close()
    assert opening.file_state(path).schema == opening.SCHEMA


def test_three_backups_are_kept(path: Path) -> None:
    with open_store(str(path)) as store:
        made = []
        for _ in range(5):
            store.save_preset(PRESET)
            made.append(opening.back_up(path))
    assert opening.backups(path) == made[:1:-1]
    assert [oct(backup.stat().st_mode & 0o777) for backup in opening.backups(path)] == ["0o600"] * 3


def test_a_backup_comes_back_while_the_store_is_open(path: Path) -> None:
    with open_store(str(path)) as store:
        name = store.save_preset(PRESET).name
        backup = opening.back_up(path)
        store.remove_preset(name)
        before = restore(path, chosen(path, "1"))
        assert [preset.name for preset in store.presets()] == [name]
        store.save_preset(PRESET)
    assert before in opening.backups(path)
    assert backup in opening.backups(path)


@pytest.mark.parametrize("fault", ["corrupt", "another", "missing"])
def test_a_backup_comes_back_in_place_of_what_cannot_be_used(path: Path, fault: str) -> None:
    with open_store(str(path)) as store:
        store.save_preset(PRESET)
        opening.back_up(path)
    if fault == "corrupt":
        path.write_bytes(b"x" * 5000)
    elif fault == "missing":
        path.unlink()
    else:
        connection = sqlite3.connect(path)
        connection.execute("UPDATE zftune_schema SET number = 9999")
        connection.commit()
        connection.close()
    before = restore(path, chosen(path, "1"))
    with open_store(str(path)) as store:
        assert store.notices == []
        assert len(store.presets()) == 1
    assert (before is None) == (fault == "missing")
    if before is not None:
        assert before.name.startswith("zftune.db.replaced-")


def test_an_unknown_backup(path: Path) -> None:
    with pytest.raises(BadInputError, match="there is no backup '1': none was made yet"):
        chosen(path, "1")
    with open_store(str(path)) as store:
        store.save_preset(PRESET)
        opening.back_up(path)
    with pytest.raises(BadInputError, match=r"there is no backup '../x': --list shows"):
        chosen(path, "../x")
    assert chosen(path, opening.backups(path)[0].name) == opening.backups(path)[0]


@pytest.mark.parametrize("content", [b"", b"x" * 5000], ids=["empty", "corrupt"])
def test_a_backup_that_is_none_is_refused(path: Path, content: bytes) -> None:
    with open_store(str(path)) as store:
        store.save_preset(PRESET)
        backup = opening.back_up(path)
        backup.write_bytes(content)
        with pytest.raises(StoreError, match=r"backup-.* is (empty|corrupt)"):
            restore(path, chosen(path, "1"))
        assert len(store.presets()) == 1
