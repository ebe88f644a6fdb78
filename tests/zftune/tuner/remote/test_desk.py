"""The two boxes between a training and the thread that talks to the daemon."""

from __future__ import annotations

import math
from typing import Any

import pytest

from zenflow import ZenFlowError
from zftune.daemon import PROTOCOL
from zftune.daemon.wire import Directive, WireError, encode
from zftune.tuner.remote.desk import Orders, RemoteDesk
from zftune.tuner.settings import Setting
from zftune.tuner.states import Outcome, Request
from zftune.tuner.thinking import Answer

SESSION = "a" * 32
OWN = Setting()
OTHER = Setting(topk_ratio=0.2)
REQUEST = Request(OTHER, "explore", 3, 4, 20, 10.0, 1.0)
MEASURED = Outcome("measured", (1.0,) * 20, (1.0,) * 4)


def orders(kind: str = "hold", decision: int = 1, taken: int = 0, state: str = "searching", **more: Any) -> Orders:
    request = encode(REQUEST) if kind == "apply" else None
    known: dict[str, Any] = {"incumbent": OWN.knobs(), "start": OWN.knobs(), "reason": "because", **more}
    return Orders.of(
        Directive(
            protocol=PROTOCOL, session=SESSION, decision=decision, kind=kind, state=state,  # type: ignore[arg-type]
            request=request, taken=taken, **known,
        )
    )  # fmt: skip


@pytest.fixture
def desk() -> RemoteDesk:
    return RemoteDesk(tokens=16)


@pytest.fixture
def measuring(desk: RemoteDesk) -> RemoteDesk:
    desk.hand(None)
    desk.obey(orders("apply"))
    assert desk.poll() == Answer(REQUEST, OWN, OWN)
    desk.recall()
    return desk


def said(desk: RemoteDesk) -> Any:
    done = desk.report(PROTOCOL, SESSION).done
    return None if done is None else (done.decision, done.outcome["status"])


def test_what_came_of_a_request_is_said_until_it_was_taken(measuring: RemoteDesk) -> None:
    waited = [measuring.waits]
    measuring.obey(orders("apply"))
    assert measuring.poll() is None  # the same is asked for once
    measuring.hand(MEASURED)
    assert [*waited, measuring.waits] == [False, True]
    assert said(measuring) == said(measuring) == (1, "measured")
    measuring.obey(orders("hold", decision=1, taken=0))
    assert said(measuring) == (1, "measured")
    measuring.obey(orders("hold", decision=1, taken=1))
    assert said(measuring) is None
    measuring.obey(orders("apply", decision=2, taken=1))
    assert measuring.poll() is not None
    assert measuring.trial == 3


@pytest.mark.parametrize("kind", ["pause", "hold", "stop"])
def test_what_is_measured_is_given_up_where_it_is_not_wanted_any_more(measuring: RemoteDesk, kind: str) -> None:
    measuring.obey(orders(kind))
    recall = measuring.recall()
    assert recall is not None
    assert (recall.reason, recall.incumbent) == ("because", OWN)
    assert measuring.recall() is None
    measuring.hand(Outcome("void"))
    assert said(measuring) == (1, "void")
    assert measuring.poll() == (Answer(None, OWN, OWN) if kind == "stop" else None)


def test_what_was_not_fetched_yet_is_void(desk: RemoteDesk) -> None:
    desk.obey(orders("apply"))
    desk.obey(orders("pause"))
    assert desk.poll() is None
    assert said(desk) == (1, "void")
    done = desk.report(PROTOCOL, SESSION).done
    assert done is not None
    assert done.outcome["called_off"]  # it speaks not against measuring it again


def test_another_incumbent_runs_at_once(desk: RemoteDesk) -> None:
    desk.obey(orders())
    desk.recall()
    desk.obey(orders())
    assert desk.recall() is None
    desk.obey(orders(incumbent=OTHER.knobs()))
    recall = desk.recall()
    assert recall is not None
    assert recall.incumbent == OTHER


def test_a_recall_of_what_came_before_does_not_hit_the_next_request(desk: RemoteDesk) -> None:
    desk.hand(None)
    desk.obey(orders())
    desk.recall()
    desk.obey(orders(incumbent=OTHER.knobs()))
    desk.obey(orders("apply", incumbent=OTHER.knobs()))
    assert desk.poll() == Answer(REQUEST, OTHER, OWN)
    assert desk.recall() is None
    desk.hand(MEASURED)
    desk.obey(orders("apply", decision=2, taken=1))
    desk.begin_session("the daemon was started again")  # while nobody has fetched that
    desk.obey(orders("apply", decision=1))
    assert desk.poll() is not None
    assert desk.recall() is None


@pytest.mark.parametrize(
    ("kind", "state", "waits"),
    [
        ("hold", "warming", True), ("hold", "searching", True), ("hold", "drifted", True),
        ("pause", "paused", False), ("hold", "frozen", False), ("stop", "ended", False),
    ],
)  # fmt: skip
def test_an_answer_is_waited_for_where_somebody_thinks(desk: RemoteDesk, kind: str, state: str, *, waits: bool) -> None:
    desk.own = OWN
    desk.hand(None)
    desk.obey(orders(kind, decision=0, state=state))
    assert desk.waits is waits
    if kind != "stop":
        desk.obey(orders(decision=0))
        assert desk.waits


def test_another_session_begins_from_nothing(measuring: RemoteDesk) -> None:
    measuring.begin_session("the daemon was started again")
    recall = measuring.recall()
    assert recall is not None
    assert (recall.reason, recall.incumbent) == ("the daemon was started again", None)
    measuring.hand(Outcome("void"))
    assert said(measuring) is None  # it was nothing of this session
    measuring.obey(orders("apply", decision=1))
    assert measuring.poll() is not None


def test_where_training_goes_wrong_nothing_more_is_obeyed(measuring: RemoteDesk) -> None:
    measuring.guard("the loss is nan")
    measuring.obey(orders("apply", decision=2))
    assert measuring.poll() is None
    assert measuring.report(PROTOCOL, SESSION).guard == measuring.wrong == "the loss is nan"
    assert not measuring.waits


def test_where_nothing_is_known_a_stop_keeps_the_users_knobs(desk: RemoteDesk) -> None:
    desk.obey(orders("stop", incumbent=None, start=None))
    assert desk.poll() is None
    desk.own = OWN
    desk.obey(orders("stop", incumbent=None, start=None))
    assert desk.poll() == Answer(None, OWN, None)


def test_what_is_applied_is_said_at_once_and_with_its_step(measuring: RemoteDesk) -> None:
    measuring.wake.clear()
    measuring.applied(7, OTHER)
    assert measuring.wake.is_set()  # not only with what comes of it
    report = measuring.report(PROTOCOL, SESSION)
    assert report.applied is not None
    assert (report.applied.decision, report.applied.step) == (1, 7)
    assert report.knobs == OTHER.knobs()
    measuring.hand(MEASURED)
    measuring.applied(9, OWN)
    report = measuring.report(PROTOCOL, SESSION)
    assert report.applied is not None
    assert report.applied.step == 7
    assert report.knobs == OWN.knobs()


def test_a_loss_that_is_not_finite_is_not_sent(desk: RemoteDesk) -> None:
    for loss in (1.0, math.nan, math.inf, 2.0):
        desk.hear_loss(1, loss)
    assert desk.report(PROTOCOL, SESSION).losses == ((1, 1.0), (1, 2.0))


def test_what_failed_is_heard_by_the_training(desk: RemoteDesk) -> None:
    desk.fail(ZenFlowError("a bug"))
    with pytest.raises(RuntimeError, match=r"the daemon is not asked any more \(ZenFlowError: a bug\)"):
        desk.poll()


@pytest.mark.parametrize("change", [{"steps": 10**6}, {"steps": 0}, {"discard": -1}])
def test_what_no_training_can_do_is_refused(change: dict[str, int]) -> None:
    directive = Directive(
        protocol=PROTOCOL,
        session=SESSION,
        decision=1,
        kind="apply",
        state="searching",
        request={**encode(REQUEST), **change},
    )
    with pytest.raises(WireError, match="allowed are at most 100000 of each"):
        Orders.of(directive)
