"""The thread that talks to the daemon: how often it asks, and how it takes its leave."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.tiers import by_day
from tests.zftune.daemon.runs.agents import facts
from zftune.daemon import PROTOCOL
from zftune.daemon.client import session as couriers
from zftune.daemon.client.session import DaemonSession
from zftune.daemon.client.worker import RemoteWorker
from zftune.daemon.protocol.messages import Farewell, Goodbye
from zftune.errors import DaemonError
from zftune.tuner.space import Setting

SESSION = "a" * 32
RECORD = "b" * 32
WELCOME = {"protocol": PROTOCOL, "session": SESSION, "lease_s": 60.0}
HOLD = {"protocol": PROTOCOL, "session": SESSION, "decision": 0, "kind": "hold", "state": "searching", "record": RECORD}
FAREWELL = {"protocol": PROTOCOL, "sentence": "it was nice"}
SOON_S = 30.0


class Scripted:
    """A daemon that answers what a test says; an error is raised. The last answer of a route is its answer for good."""

    def __init__(self) -> None:
        self.answers: dict[str, list[Any]] = {"runs": [WELCOME], "report": [HOLD], "goodbye": [FAREWELL]}
        self.asked: list[str] = []
        self.documents: list[Any] = []
        self.timeouts_s: list[float] = []
        self.heard = threading.Event()
        """Whether a report has come."""
        self.on_hello: Callable[[], None] = lambda: None

    def post(self, route: str, document: Any = None, *, timeout_s: float | None = None) -> Any:
        name = route.rpartition("/")[2]
        self.asked.append(name)
        self.documents.append(json.loads(document))
        self.timeouts_s.append(timeout_s or 0.0)
        if name == "runs":
            self.on_hello()
        found = self.answers[name]
        answer = found.pop(0) if len(found) > 1 else found[0]
        if name == "report":
            self.heard.set()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        return


@pytest.fixture
def daemon() -> Scripted:
    return Scripted()


@pytest.fixture
def worker() -> Iterator[RemoteWorker]:
    worker = RemoteWorker(tokens=16)
    worker.own = Setting()
    yield worker
    worker.close()


@pytest.fixture
def daemon_session(daemon: Scripted, worker: RemoteWorker) -> DaemonSession:
    return DaemonSession(daemon, worker, facts, tokens=16)


@pytest.fixture
def met(daemon_session: DaemonSession, daemon: Scripted) -> DaemonSession:
    """It has said Hello, and has nothing to say before its lease needs a report."""
    daemon.answers["report"] = [{**HOLD, "kind": "pause", "state": "paused"}]
    daemon_session.start()
    assert daemon.heard.wait(SOON_S)
    return daemon_session


def message(session: str) -> Goodbye:
    return Goodbye(protocol=PROTOCOL, session=session, steps=1, begins=1)


def last_words(daemon_session: DaemonSession) -> Farewell | None:
    return daemon_session.goodbye(message)


def test_goodbye_has_more_time_than_a_report_and_is_said_again(met: DaemonSession, daemon: Scripted) -> None:
    daemon.answers["goodbye"] = [DaemonError("it takes its time", status=409), FAREWELL]
    farewell = last_words(met)
    assert farewell is not None
    assert farewell.sentence == "it was nice"
    assert daemon.asked[-3:] == ["report", "goodbye", "goodbye"]
    report_s, first_s, second_s = daemon.timeouts_s[-3:]
    assert report_s < 4 < second_s < first_s <= 12


def test_goodbye_is_not_said_again_for_ever(
    met: DaemonSession, daemon: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(couriers, "_GOODBYE_S", 0.3)
    daemon.answers["goodbye"] = [DaemonError("it takes its time", status=409)]
    began_s = time.monotonic()
    assert last_words(met) is None
    assert time.monotonic() - began_s < 3
    assert daemon.asked.count("goodbye") > 1


def test_a_goodbye_that_is_refused_or_not_answered_is_said_once(met: DaemonSession, daemon: Scripted) -> None:
    daemon.answers["goodbye"] = [DaemonError("has not answered in time")]
    assert last_words(met) is None
    assert daemon.asked.count("goodbye") == 1


@pytest.mark.parametrize("answer", [DaemonError("has not answered in time"), {"protocol": 1}, None])
def test_goodbye_is_said_where_the_last_report_is_not_taken(met: DaemonSession, daemon: Scripted, answer: Any) -> None:
    daemon.answers["report"] = [answer]
    assert last_words(met) is not None
    assert daemon.asked[-1] == "goodbye"


def test_a_daemon_that_was_started_again_is_told_goodbye_as_well(met: DaemonSession, daemon: Scripted) -> None:
    daemon.answers["report"] = [DaemonError("unknown", status=404), {**HOLD, "session": "c" * 32}]
    daemon.answers["runs"] = [{**WELCOME, "session": "c" * 32}]
    assert last_words(met) is not None
    assert daemon.asked[-4:] == ["report", "runs", "report", "goodbye"]
    assert daemon.documents[-3]["again"] == {"record": RECORD, "trial": None}
    assert daemon.documents[-1]["session"] == "c" * 32


def test_what_was_taken_for_dead_since_its_last_report_comes_back_to_say_goodbye(
    met: DaemonSession, daemon: Scripted, worker: RemoteWorker
) -> None:
    daemon.answers["goodbye"] = [DaemonError("unknown", status=404), FAREWELL]
    daemon.answers["report"] = [{**HOLD, "record": "d" * 32}]
    farewell = last_words(met)
    assert farewell is not None
    assert farewell.sentence == "it was nice"
    assert daemon.asked[-5:] == ["report", "goodbye", "runs", "report", "goodbye"]


def test_who_ends_before_its_hello_was_answered_says_goodbye_all_the_same(
    daemon_session: DaemonSession, daemon: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon may follow it: else it would show a run that was lost some time after its training's end."""
    monkeypatch.setattr(couriers, "_FIRST_BACKOFF_S", SOON_S)
    said = threading.Event()
    daemon.answers["runs"] = [DaemonError("has not answered in time"), WELCOME]
    daemon.on_hello = said.set
    daemon_session.start()
    assert said.wait(SOON_S)
    assert last_words(daemon_session) is not None
    assert daemon.asked == ["runs", "runs", "report", "goodbye"]


def test_a_report_that_was_not_heard_comes_again(met: DaemonSession, daemon: Scripted, worker: RemoteWorker) -> None:
    worker.hear_loss(1, 0.5)
    daemon.answers["report"] = [DaemonError("has not answered in time"), daemon.answers["report"][0]]
    reports = len(daemon.documents)
    worker.wake.set()
    ends_s = time.monotonic() + SOON_S
    while len(daemon.documents) < reports + 2:
        assert time.monotonic() < ends_s
        time.sleep(0.005)
    lost, again = daemon.documents[reports : reports + 2]
    assert (again["sequence"], again["losses"]) == (lost["sequence"], [[1, 0.5]])


def test_one_that_knows_nothing_of_the_run_is_not_told(daemon_session: DaemonSession, daemon: Scripted) -> None:
    daemon.answers["report"] = [{**HOLD, "kind": "pause", "record": None}, DaemonError("unknown", status=404)]
    daemon_session.start()
    assert daemon.heard.wait(SOON_S)
    assert last_words(daemon_session) is None
    assert "goodbye" not in daemon.asked


def test_without_a_daemon_there_are_no_last_words(daemon_session: DaemonSession, daemon: Scripted) -> None:
    tried = threading.Event()
    daemon.on_hello = tried.set
    daemon.answers["runs"] = [DaemonError("no daemon serves 'x'")]
    daemon_session.start()
    assert tried.wait(SOON_S)
    assert last_words(daemon_session) is None
    assert set(daemon.asked) == {"runs"}
    (notice,) = daemon_session.notices
    assert notice.startswith("The daemon cannot be reached (no daemon serves 'x'): ")


def test_one_that_somebody_starts_again_is_waited_for_in_silence(daemon: Scripted, worker: RemoteWorker) -> None:
    patient = DaemonSession(daemon, worker, facts, tokens=16, patience_s=3600.0)
    daemon.answers["runs"] = [DaemonError("no daemon serves 'x'")]
    for _ in range(3):
        patient._exchange()
    assert patient.notices == []
    daemon.answers["runs"] = [DaemonError("the run's store is another one", status=409)]
    patient._exchange()
    (notice,) = patient.notices  # waiting is of no use
    assert "the run's store is another one" in notice


def test_it_says_which_store_it_means(
    daemon_session: DaemonSession, daemon: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZFTUNE_DB", "/srv/zftune.db")
    daemon_session._exchange()
    told = daemon.documents[0]
    assert (told["store"], told["store_named"]) == ("/srv/zftune.db", True)


def test_who_ends_between_hello_and_report_is_not_kept_waiting(
    daemon_session: DaemonSession, daemon: Scripted, worker: RemoteWorker
) -> None:
    daemon.on_hello = worker.close
    daemon_session._exchange()
    assert daemon.asked == ["runs"]


@pytest.mark.parametrize(
    ("directive", "pause_s"),
    [
        (HOLD, couriers.QUICK_S),
        ({**HOLD, "kind": "pause", "state": "paused"}, couriers.SLOW_S),
        ({**HOLD, "state": "frozen"}, couriers.SLOW_S),
        ({**HOLD, "kind": "stop", "incumbent": Setting().knobs()}, couriers.SLOW_S),
    ],
)
def test_it_asks_often_only_while_somebody_thinks(
    daemon_session: DaemonSession, daemon: Scripted, directive: Any, pause_s: float
) -> None:
    daemon.answers["report"] = [directive]
    assert daemon_session._exchange() == pause_s


def test_arguments_of_another_encoding_are_sent_all_the_same(
    daemon_session: DaemonSession, daemon: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "data/\udcff"])
    daemon_session._exchange()
    assert daemon.documents[0]["argv"] == ["train.py", "data/?"]


class Stopped(Scripted):
    """Takes what is sent, and answers nothing any more once it is stopped, as a process under SIGSTOP."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped = threading.Event()
        self.held = threading.Event()
        """Whether somebody waits for it."""

    def post(self, route: str, document: Any = None, *, timeout_s: float | None = None) -> Any:
        if not self.stopped.is_set():
            return super().post(route, document, timeout_s=timeout_s)
        self.held.set()
        assert timeout_s is not None
        threading.Event().wait(timeout_s)
        raise DaemonError("has not answered in time")


@pytest.mark.parametrize("while_it_reports", by_day([True], all_of=[False, True]))
def test_a_daemon_that_is_stopped_keeps_the_end_of_a_training_for_some_seconds_only(
    worker: RemoteWorker, *, while_it_reports: bool
) -> None:
    daemon = Stopped()
    if not while_it_reports:
        daemon.answers["report"] = [{**HOLD, "kind": "pause", "state": "paused"}]
    daemon_session = DaemonSession(daemon, worker, facts, tokens=16)
    daemon_session.start()
    assert daemon.heard.wait(SOON_S)
    daemon.stopped.set()
    if while_it_reports:
        worker.wake.set()
        assert daemon.held.wait(SOON_S)
    began_s = time.monotonic()
    assert last_words(daemon_session) is None
    assert time.monotonic() - began_s < 6
