"""The thread that talks to the daemon: how often it asks, and how it takes its leave."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.zftune.daemon.runs.agents import facts
from zftune.daemon import PROTOCOL
from zftune.daemon.client import session as couriers
from zftune.daemon.client.session import DaemonSession
from zftune.daemon.client.worker import RemoteWorker
from zftune.daemon.protocol.messages import Farewell, Goodbye
from zftune.errors import DaemonError, NoDaemonError
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
        self.late_s: dict[str, float] = {}
        """By route, where time is simulated."""
        self.heard = threading.Event()
        """Whether a report has come."""
        self.on_hello: Callable[[], None] = lambda: None

    def post(self, route: str, document: Any = None, *, timeout_s: float | None = None) -> Any:
        name = route.rpartition("/")[2]
        self.asked.append(name)
        self.documents.append(json.loads(document))
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


class SimulatedTime:
    """What the session's module takes for `time`: it passes where somebody waits, and nowhere else."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.time = time.time

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def passed(met: DaemonSession, daemon: Scripted, monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """Simulated seconds since now; a daemon's answers take `daemon.late_s` of them."""
    clock = SimulatedTime()
    monkeypatch.setattr(couriers, "time", clock)
    post = daemon.post

    def late(route: str, document: Any = None, *, timeout_s: float | None = None) -> Any:
        takes_s, most_s = daemon.late_s.get(route.rpartition("/")[2], 0.0), timeout_s or 0.0
        clock.now_s += min(takes_s, most_s)
        answer = post(route, document, timeout_s=timeout_s)
        if takes_s > most_s:
            raise DaemonError("has not answered in time")
        return answer

    monkeypatch.setattr(daemon, "post", late)
    return lambda: clock.now_s - 1000.0


BUSY = DaemonError("it takes its time", status=409)


def test_a_daemon_that_is_at_work_is_waited_for_and_that_is_said_once(
    met: DaemonSession, daemon: Scripted, passed: Callable[[], float], caplog: pytest.LogCaptureFixture
) -> None:
    daemon.answers["goodbye"] = [*[BUSY] * 20, FAREWELL]
    daemon.late_s["goodbye"] = 2.0
    farewell = last_words(met)
    assert farewell is not None
    assert farewell.sentence == "it was nice"
    assert 40 < passed() < couriers.GOODBYE_S
    assert caplog.messages == ["The daemon is slow: zftune waits up to 60 s for it to write down what was found."]


def test_a_daemon_that_answers_late_is_heard(
    met: DaemonSession, daemon: Scripted, passed: Callable[[], float], caplog: pytest.LogCaptureFixture
) -> None:
    """On a busy machine: reports are given up after 3 s, and so is the first goodbye."""
    daemon.late_s = {"report": 8.0, "goodbye": 8.0}
    farewell = last_words(met)
    assert farewell is not None
    assert farewell.sentence == "it was nice"
    assert daemon.asked[-4:] == ["report", "goodbye", "report", "goodbye"]
    assert len(caplog.messages) == 1


def test_a_daemon_that_says_nothing_any_more_is_given_up_sooner(
    met: DaemonSession, daemon: Scripted, passed: Callable[[], float]
) -> None:
    """Such as a process under SIGSTOP."""
    daemon.late_s = {"report": 1e9, "goodbye": 1e9}
    assert last_words(met) is None
    assert couriers._SILENCE_S <= passed() < couriers._SILENCE_S + 4


@pytest.mark.parametrize("error", [NoDaemonError("no daemon serves 'x'"), DaemonError("no", status=422)])
def test_where_nobody_can_take_a_goodbye_it_is_said_once(
    met: DaemonSession, daemon: Scripted, passed: Callable[[], float], error: DaemonError
) -> None:
    daemon.answers["goodbye"] = [error]
    assert last_words(met) is None
    assert daemon.asked.count("goodbye") == 1
    assert passed() == 0


def test_a_daemon_that_was_started_again_is_told_goodbye_as_well(met: DaemonSession, daemon: Scripted) -> None:
    daemon.answers["report"] = [DaemonError("unknown", status=404), {**HOLD, "session": "c" * 32}]
    daemon.answers["runs"] = [{**WELCOME, "session": "c" * 32}]
    assert last_words(met) is not None
    assert daemon.asked[-4:] == ["report", "runs", "report", "goodbye"]
    assert daemon.documents[-3]["again"] == {"record": RECORD, "trial": None}
    assert daemon.documents[-1]["session"] == "c" * 32


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


def test_without_a_daemon_there_are_no_last_words(daemon_session: DaemonSession, daemon: Scripted) -> None:
    tried = threading.Event()
    daemon.on_hello = tried.set
    daemon.answers["runs"] = [NoDaemonError("no daemon serves 'x'")]
    daemon_session.start()
    assert tried.wait(SOON_S)
    assert last_words(daemon_session) is None
    assert set(daemon.asked) == {"runs"}
    (notice,) = daemon_session.notices
    assert notice.startswith("The daemon cannot be reached (no daemon serves 'x'): ")


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
