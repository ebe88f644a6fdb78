"""The schema of every revision becomes the newest one, after a backup, and loses nothing."""

from __future__ import annotations

import re
import shutil
import sqlite3
import threading
import time
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateTable

from tests.zftune.store.examples import CURVE, PRESET
from zftune.errors import BadInputError, StoreError
from zftune.store import files, open_store, opening
from zftune.store.opening import chosen, restore
from zftune.store.tables import Base
from zftune.store.types import Curve, RunState, TrialState, Withdrawal

FROZEN = Path(__file__).parent / "data"


def test_the_revisions_are_those_of_the_folder() -> None:
    config = Config()
    config.set_main_option("script_location", str(opening.MIGRATIONS))
    scripts = ScriptDirectory.from_config(config)
    assert [script.revision for script in scripts.walk_revisions()][::-1] == list(opening.REVISIONS)
    assert scripts.get_heads() == [opening.HEAD]


def test_the_migrations_make_the_tables_of_the_program(path: Path) -> None:
    open_store(str(path)).close()
    engine = create_engine(f"sqlite:///{path}")
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, Base.metadata) == []
        rows = connection.exec_driver_sql("SELECT name, sql FROM sqlite_master WHERE type = 'table'")
        made = {str(name): str(statement) for name, statement in rows}
    engine.dispose()
    for table in Base.metadata.sorted_tables:  # what the comparison does not look at: constraints, down to their names
        wanted = str(CreateTable(table).compile(engine))
        assert sorted(_parts(made[table.name])) == sorted(_parts(wanted))


def _parts(statement: str) -> list[str]:
    """Columns and constraints; SQLite writes an added column behind the last one."""
    body = statement[statement.index("(") + 1 : statement.rindex(")")]
    return [" ".join(part.split()) for part in re.split(r",(?![^()]*\))", body)]


def test_the_tables_can_be_made_on_a_server() -> None:
    for table in Base.metadata.sorted_tables:
        assert "CREATE TABLE" in str(CreateTable(table).compile(dialect=postgresql.dialect()))  # type: ignore[no-untyped-call]


def test_there_is_a_frozen_file_for_every_revision() -> None:
    assert {file.stem for file in FROZEN.glob("*.db")} == set(opening.REVISIONS)


@pytest.mark.parametrize("revision", opening.REVISIONS)
def test_a_database_of_every_revision_opens_with_all_that_it_held(path: Path, revision: str) -> None:
    path.parent.mkdir()
    shutil.copy(FROZEN / f"{revision}.db", path)
    with open_store(str(path)) as store:
        assert store.notices == []
        presets = {preset.name: preset for preset in store.presets()}
        assert set(presets) == {"frozen", "frozen-2"}
        assert (presets["frozen"].key, presets["frozen"].knobs) == (PRESET.key, PRESET.knobs)
        assert presets["frozen-2"].lost_comparisons == 1
        withdrawn = Withdrawal("rollback", "by hand")
        assert presets["frozen-2"].withdrawn == (None if revision < "0004" else withdrawn)
        (run,) = store.runs()
        assert (run.key, run.state) == (PRESET.key, RunState.RUNNING)
        measured, flying = store.trials(run.run_id)
        assert (measured.state, flying.state) == (TrialState.MEASURED, TrialState.IN_FLIGHT)
        assert [one.step_ms for one in store.measurements(measured.trial_id)] == [790.0]
        assert [one.kind for one in store.decisions(run.run_id)] == ["adopt"]
        assert store.curve(run.run_id) == (CURVE if revision >= "0003" else Curve())
        account = store.account(run.run_id)
        assert (None if account is None else account.total.seconds) == (None if revision < "0004" else 6.5)
        assert store.reap()[0].crashed == (flying.trial_id,)
        store.save_preset(PRESET)
    assert files.state_of(path).revision == BEFORE
    assert len(files.backups(path)) == (revision != opening.HEAD)


# --- an older revision, made up: the first tables without one of them -------------------------------------------------


BEFORE = opening.HEAD
"""Which `older` has one more than."""


@pytest.fixture
def older(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A database with a preset, for which there is one more revision to come."""
    with open_store(str(path)) as store:
        store.save_preset(PRESET)
    migrations = tmp_path / "100% migrations"
    shutil.copytree(opening.MIGRATIONS, migrations)
    (migrations / "versions" / "r9998.py").write_text(
        "from alembic import op\nimport sqlalchemy as sa\n"
        f"revision, down_revision, branch_labels, depends_on = '9998', '{opening.HEAD}', None, None\n"
        "def upgrade():\n    op.add_column('preset', sa.Column('more', sa.Integer()))\n"
    )
    monkeypatch.setattr(opening, "MIGRATIONS", migrations)
    monkeypatch.setattr("zftune.store.opening.HEAD", "9998")
    monkeypatch.setattr("zftune.store.opening.REVISIONS", (*opening.REVISIONS, "9998"))
    return path


def columns(path: Path) -> set[str]:
    connection = sqlite3.connect(path)
    found = {row[1] for row in connection.execute("PRAGMA table_info(preset)")}
    connection.close()
    return found


def test_an_upgrade_comes_after_a_backup(older: Path) -> None:
    with open_store(str(older)) as store:
        assert store.notices == []
        assert len(store.presets()) == 1
    assert "more" in columns(older)
    (backup,) = files.backups(older)
    assert files.state_of(backup).revision == BEFORE
    assert "more" not in columns(backup)
    open_store(str(older)).close()
    assert files.backups(older) == [backup]  # nothing to do, no backup


def test_an_upgrade_that_fails_changes_nothing(older: Path) -> None:
    with (opening.MIGRATIONS / "versions" / "r9998.py").open("a") as file:
        file.write("    op.execute('SELECT * FROM nowhere')\n")
    with open_store(str(older)) as store:
        (notice,) = store.notices
        assert "cannot be used (no such table: nowhere)" in notice
        assert not store.is_kept
    assert files.state_of(older).revision == BEFORE
    assert "more" not in columns(older)


def test_without_room_for_a_backup_there_is_no_upgrade(older: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "copy", full)
    with open_store(str(older)) as store:
        assert "cannot be used (No space left on device)" in store.notices[0]
    assert "more" not in columns(older)
    assert [one.name for one in older.parent.iterdir() if ".backup" in one.name] == []


def test_it_is_upgraded_by_one_at_a_time(older: Path) -> None:
    opened = []
    thread = threading.Thread(target=lambda: opened.append(open_store(str(older))))
    with files.locked(older):
        thread.start()
        time.sleep(0.3)
        assert "more" not in columns(older)
    thread.join(30)
    opened[0].close()
    assert "more" in columns(older)


# --- backups ----------------------------------------------------------------------------------------------------------


def test_three_backups_are_kept(path: Path) -> None:
    with open_store(str(path)) as store:
        made = []
        for _ in range(5):
            store.save_preset(PRESET)
            made.append(files.back_up(path))
    assert files.backups(path) == made[:1:-1]
    assert [oct(backup.stat().st_mode & 0o777) for backup in files.backups(path)] == ["0o600"] * 3


def test_a_backup_comes_back_while_the_store_is_open(path: Path) -> None:
    with open_store(str(path)) as store:
        name = store.save_preset(PRESET).name
        backup = files.back_up(path)
        store.remove_preset(name)
        before = restore(path, chosen(path, "1"))
        assert [preset.name for preset in store.presets()] == [name]
        store.save_preset(PRESET)
    assert before in files.backups(path)
    assert backup in files.backups(path)


@pytest.mark.parametrize("fault", ["corrupt", "newer", "missing"])
def test_a_backup_comes_back_in_place_of_what_cannot_be_used(path: Path, fault: str) -> None:
    with open_store(str(path)) as store:
        store.save_preset(PRESET)
        files.back_up(path)
    if fault == "corrupt":
        path.write_bytes(b"x" * 5000)
    elif fault == "missing":
        path.unlink()
    else:
        connection = sqlite3.connect(path)
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
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
        files.back_up(path)
    with pytest.raises(BadInputError, match=r"there is no backup '../x': --list shows"):
        chosen(path, "../x")
    assert chosen(path, files.backups(path)[0].name) == files.backups(path)[0]


@pytest.mark.parametrize("content", [b"", b"x" * 5000], ids=["empty", "corrupt"])
def test_a_backup_that_is_none_is_refused(path: Path, content: bytes) -> None:
    with open_store(str(path)) as store:
        store.save_preset(PRESET)
        backup = files.back_up(path)
        backup.write_bytes(content)
        with pytest.raises(StoreError, match=r"backup-.* is (empty|corrupt)"):
            restore(path, chosen(path, "1"))
        assert len(store.presets()) == 1
