"""What is PostgreSQL's alone: its URL, roles, tables, a server that is away, killed, or says nothing."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from tests.support.governance.documents import blocks
from tests.support.tiers import everything, fast
from tests.support.zftune.store import rows as store_rows
from tests.support.zftune.store.examples import HARDWARE, KEY, KNOBS, MODEL, PRESET, measurement
from tests.support.zftune.store.servers import PASSWORD, Server, emptied, served
from zftune.doctor.software import store_check
from zftune.errors import StoreError
from zftune.store import open_store, opening
from zftune.store.location import locate, masked, meant_by
from zftune.store.store import Store
from zftune.store.types import LEASE_S, Decision, Run, TrialState

pytestmark = pytest.mark.smoke

PAGE = Path(__file__).parents[4] / "docs/how-to/shared-store.md"
KILLS = int(os.environ.get("ZFTUNE_KILLS", fast("1", all_of="10")))


@pytest.fixture
def url(server: Server) -> str:
    """Of the server, with the newest tables and nothing in them."""
    return emptied(server)


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with open_store(url) as opened:
        assert opened.notices == []
        yield opened


def begun(store: Store, **more: Any) -> Run:
    return store.begin_run(KEY, MODEL, HARDWARE, knobs=KNOBS, **more)


WRONG = [
    ("postgres://me:s3cret@host/db", "postgres://me:***@host/db", "it must be a path, sqlite:///PATH or postgresql"),
    ("mysql://me:s3cret@host/db", "mysql://me:***@host/db", "it must be a path, sqlite:///PATH or postgresql"),
    ("postgresql+asyncpg://me:s3cret@host/db", "asyncpg://me:***@host/db", "it must be a path"),
    ("postgresql://me:s3cret@host", "postgresql://me:***@host", "it names no database"),
    ("postgresql://me:s3c@ret@host/db", "postgresql://me:***@host/db", "must be percent-encoded"),
    ("postgresql://me:s3c/ret@host/db", "postgresql://me:***@host/db", "must be percent-encoded"),
    ("postgresql://me:s3c:ret@host/db", "postgresql://me:***@host/db", "must be percent-encoded"),
    ("postgresql://me:s3c?ret@host/db", "postgresql://me:***@host/db", "must be percent-encoded"),
    ("postgresql://me:s3cret/db", "postgresql://me:***/db", "its port is no number"),
    ("postgresql://host?password=s3cret", "postgresql://host?password=***", "it names no database"),
]


@pytest.mark.parametrize(("value", "shown", "allowed"), WRONG)
def test_a_url_that_is_none_is_one_sentence_without_the_password(value: str, shown: str, allowed: str) -> None:
    check = store_check({"ZFTUNE_DB": value}, Path("/nowhere"))
    with open_store(value) as store:
        (notice,) = store.notices
    assert check.status == "broken"
    for sentence in (notice, check.finding):
        assert shown in sentence
        assert allowed in sentence
        assert not any(part in sentence for part in ("s3c", "ret@", "/ret"))


@pytest.mark.parametrize(
    "fault",
    [
        lambda server: server.url(password="wr0ng"),
        lambda server: server.url(database="missing"),
        lambda server: server.url(user="nobody-here"),
        lambda server: f"postgresql://zftune:{PASSWORD}@/zftune?host=/nowhere",
        lambda server: f"{server.url()}&sslmode=s3cret",
    ],
)
def test_whoever_is_not_let_in_reads_no_password(
    server: Server, fault: Callable[[Server], str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG"), open_store(fault(server)) as store:
        (notice,) = store.notices
        assert not store.is_kept
        shown = f"{notice} {caplog.text} {locate(fault(server), {}, None)!r} {store._database.engine!r}"
    assert notice.startswith("the postgresql database of $ZFTUNE_DB cannot be used (")
    for secret in (PASSWORD, PASSWORD.replace("%40", "@"), "wr0ng"):
        assert secret not in shown


def test_an_open_store_shows_no_password(url: str, store: Store) -> None:
    shown = [repr(store._database.engine), repr(store._database.engine.url), store._database.shown, masked(url)]
    shown.append(repr(meant_by({"ZFTUNE_DB": url})))
    store._database.engine.dispose()
    assert not any(PASSWORD in one or PASSWORD.replace("%40", "@") in one for one in shown)


def test_the_roles_of_the_documentation_suffice_and_can_do_no_more(server: Server) -> None:
    (block,) = [one for one in blocks(PAGE) if one.language == "sql"]
    database = "CREATE DATABASE fleet OWNER zftune_owner"
    script = block.text.replace("CREATE DATABASE zftune OWNER zftune_owner", database)
    outside, inside = script.replace("DATABASE zftune", "DATABASE fleet").split("\\connect zftune\n")
    for name, part in (("postgres", outside), ("fleet", inside)):
        with server.connect(name) as connection:
            for statement in filter(str.strip, part.split(";")):
                connection.execute(statement)
    owner = server.url("fleet", "zftune_owner", "choose-one")
    tuner = server.url("fleet", "zftune_tuner", "choose-another")
    with open_store(tuner) as store:
        assert "cannot be used (permission denied for schema public" in store.notices[0]
        assert "choose-another" not in store.notices[0]
    with open_store(owner) as store:
        assert store.notices == []
    with open_store(tuner) as store:
        assert store.notices == []
        run = begun(store)
        trial = store_rows.add_trial(store, run, KNOBS, source="search")
        store_rows.mark_in_flight(store, run, trial.trial_id)
        store_rows.add_measurement(store, run, trial.trial_id, measurement(), state=TrialState.MEASURED)
        store_rows.add_decision(store, run, Decision("adopt", trial.number))
        assert store.remove_preset(store.save_preset(PRESET).name)
        store.finish_run(run)
        for said in ("DROP TABLE trial", "CREATE TABLE more (x int)", "ALTER TABLE run ADD COLUMN x int"):

            def work(session: Session, said: str = said) -> None:
                session.execute(text(said))

            with pytest.raises(StoreError, match=r"permission denied|must be owner"):
                store._database.write(work)


def test_tables_of_another_schema_are_not_opened(server: Server, url: str) -> None:
    with server.connect() as connection:
        connection.execute("UPDATE zftune_schema SET number = 9999")
        with open_store(url) as store:
            assert "has schema 9999 of another zftune" in store.notices[0]
        connection.execute("UPDATE zftune_schema SET number = %s", (opening.SCHEMA,))


def test_one_process_at_a_time_makes_the_tables(server: Server) -> None:
    with server.connect() as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    opened: list[Store] = []
    threads = [threading.Thread(target=lambda: opened.append(open_store(server.url()))) for _ in range(3)]
    with opening.server_engine(server.url()).begin() as first, server.connect() as looking:
        opening.wait_for_turn(first)
        for thread in threads:
            thread.start()
        while _waiting(looking) < len(threads):
            assert all(thread.is_alive() for thread in threads), "somebody did not wait"
        assert looking.execute("SELECT to_regclass('public.run')").fetchone() == (None,)
    for thread in threads:
        thread.join(60)
    assert [store.notices for store in opened] == [[]] * len(threads)
    with server.connect() as looking:
        assert looking.execute("SELECT number FROM zftune_schema").fetchall() == [(opening.SCHEMA,)]


def _waiting(connection: psycopg.Connection) -> int:
    found = connection.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted").fetchone()
    assert found is not None
    return int(found[0])


def test_leases_go_by_the_servers_clock(url: str) -> None:
    with open_store(url) as store, open_store(url, clock=lambda: 1e9) as slow:
        run = begun(slow)
        assert LEASE_S - 60 < store.lease_left_s(run.run_id) <= LEASE_S
        assert store.reap() == []


@dataclass(slots=True)
class Told:
    """What a store has said that it keeps."""

    trials: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """By run, with the time measured."""
    doubted: list[str | None] = field(default_factory=list)
    """Runs of which the store does not know whether it has kept the last write; None: the run itself is that."""


def acknowledged(store: Store, ends: threading.Event, each: threading.Semaphore) -> Told:
    """Write until the end, with patience."""
    told = Told()
    while not ends.is_set():
        run_id = None
        try:
            with store.patient(600, threading.Event()):
                run = begun(store)
                run_id = run.run_id
                told.trials[run_id] = []
                for number in range(20):
                    trial = store_rows.add_trial(store, run, KNOBS, source="search")
                    store_rows.add_measurement(
                        store, run, trial.trial_id, measurement(700.0 + number), state=TrialState.MEASURED
                    )
                    told.trials[run_id].append((trial.trial_id, 700.0 + number))
                    each.release()
                store.finish_run(run)
        except StoreError as error:
            if "was lost during a write, and may have kept it" not in str(error):
                raise
            told.doubted.append(run_id)
    return told


@pytest.mark.timeout(120 + 30 * KILLS)
def test_a_server_that_is_killed_again_and_again_loses_nothing_and_keeps_nothing_twice() -> None:
    moment = random.Random(23)
    for server in served(durable=everything()):
        ends, each = threading.Event(), threading.Semaphore(0)
        with open_store(server.url()) as store, ThreadPoolExecutor(2) as threads:
            assert store.notices == []
            writers = [threads.submit(acknowledged, store, ends, each) for _ in range(2)]
            try:
                for _ in range(KILLS):
                    while each.acquire(blocking=False):
                        pass
                    for _ in range(moment.randrange(1, 40)):  # any moment
                        assert each.acquire(timeout=60), "nothing was written since the server is back"
                    server.kill()
                    server.start()
            finally:
                ends.set()
            results = [writer.result() for writer in writers]
            told = {run: trials for result in results for run, trials in result.trials.items()}
            doubted = [run for result in results for run in result.doubted]
            assert sum(map(len, told.values())) > KILLS
            kept = {run.run_id for run in store.runs()}
            assert kept >= told.keys()
            assert len(kept - told.keys()) <= doubted.count(None)
            for run_id, trials in told.items():
                rows = store.trials(run_id)
                assert [row.trial_id for row in rows[: len(trials)]] == [trial_id for trial_id, _ in trials]
                found = [[one.step_ms for one in store.measurements(row.trial_id)] for row in rows]
                assert found[: len(trials)] == [[step_ms] for _, step_ms in trials]
                unsure = found[len(trials) :]
                assert unsure in ([], [[]], [[700.0 + len(trials)]] if run_id in doubted else [])
                assert run_id in doubted or not unsure
