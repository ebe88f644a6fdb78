"""The two boxes between a training and the thread that talks to the daemon."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from zftune.daemon import PROTOCOL
from zftune.daemon.client.worker import RemoteWorker
from zftune.daemon.protocol.codec import WireError
from zftune.daemon.protocol.messages import MOST_CHANGES, Directive
from zftune.tuner.evidence import Gain
from zftune.tuner.space import Setting
from zftune.tuner.states import Outcome, Request
from zftune.tuner.worker import Answer

SESSION = "a" * 32
OWN = Setting()
OTHER = Setting(topk_ratio=0.2)
GAIN = Gain(0.25, 0.01)
REQUEST = Request(OTHER, "explore", 3, 4, 20, incumbent_step_ms=10.0, allowance_s=1.0)
MEASURED = Outcome("measured", (1.0,) * 20, (1.0,) * 4)


def orders(kind: str = "hold", decision: int = 1, taken: int = 0, state: str = "searching", **more: Any) -> Directive:
    request = REQUEST if kind == "apply" else None
    known: dict[str, Any] = {"incumbent": OWN, "start": OWN, "reason": "because", "request": request, **more}
    return Directive(
        protocol=PROTOCOL, session=SESSION, decision=decision, kind=kind, state=state,  # type: ignore[arg-type]
        taken=taken, **known,
    )  # fmt: skip


@pytest.fixture
def worker() -> RemoteWorker:
    return RemoteWorker(tokens=16)


@pytest.fixture
def measuring(worker: RemoteWorker) -> RemoteWorker:
    worker.hand(None)
    worker.obey(orders("apply", gain=GAIN))
    assert worker.poll() == Answer(REQUEST, OWN, OWN, gain=GAIN)
    worker.recall()
    return worker


def said(worker: RemoteWorker) -> Any:
    done = worker.report(PROTOCOL, SESSION).done
    return None if done is None else (done.decision, done.outcome.status)


def test_what_came_of_a_request_is_said_until_it_was_taken(measuring: RemoteWorker) -> None:
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
def test_what_is_measured_is_given_up_where_it_is_not_wanted_any_more(measuring: RemoteWorker, kind: str) -> None:
    measuring.obey(orders(kind))
    recall = measuring.recall()
    assert recall is not None
    assert (recall.reason, recall.incumbent) == ("because", OWN)
    assert measuring.recall() is None
    measuring.hand(Outcome("void"))
    assert said(measuring) == (1, "void")
    assert measuring.poll() == (Answer(None, OWN, OWN) if kind == "stop" else None)


def test_another_session_begins_from_nothing(measuring: RemoteWorker) -> None:
    measuring.begin_session("the daemon was started again")
    recall = measuring.recall()
    assert recall is not None
    assert (recall.reason, recall.incumbent) == ("the daemon was started again", None)
    measuring.hand(Outcome("void"))
    assert said(measuring) is None  # it was nothing of this session
    measuring.obey(orders("apply", decision=1))
    assert measuring.poll() is not None


def test_another_daemon_hears_of_all_changes_and_the_same_one_of_each_once(worker: RemoteWorker) -> None:
    def told() -> list[tuple[int, Setting]]:
        found = worker.report(PROTOCOL, SESSION).changes
        return [(one.step, one.knobs) for one in found]

    worker.applied(1, OWN)
    assert told() == told() == [(1, OWN)]  # it was not answered
    worker.applied(5, OTHER)
    worker.heard()
    assert told() == [(5, OTHER)]
    worker.heard()
    worker.applied(7, OTHER)  # they held already
    worker.begin_session("another daemon")
    assert told() == [(1, OWN), (5, OTHER)]
    worker.applied(9, OWN)
    worker.begin_session("yet another")
    assert told() == [(1, OWN), (5, OTHER), (9, OWN)]
    worker.heard()
    assert told() == []
    worker.heard()
    worker.applied(4, OWN)  # after a state of before was loaded
    assert told() == [(4, OWN)]
    worker.begin_session("a third one")
    assert told()[-1] == (4, OWN)
    for step in range(10, 10 + 2 * MOST_CHANGES):
        worker.applied(step, OTHER if step % 2 else OWN)
    worker.begin_session("a last one")
    assert [step for step, _ in told()] == list(range(10 + MOST_CHANGES, 10 + 2 * MOST_CHANGES))


def test_a_loss_that_is_not_finite_is_not_sent(worker: RemoteWorker) -> None:
    for loss in (1.0, math.nan, math.inf, 2.0):
        worker.hear_loss(1, loss)
    assert worker.report(PROTOCOL, SESSION).losses == ((1, 1.0), (1, 2.0))


def test_what_no_daemon_has_heard_is_said_again_before_anything_newer(worker: RemoteWorker) -> None:
    worker.hear_loss(1, 0.5)
    first = worker.report(PROTOCOL, SESSION)
    worker.hear_loss(2, 0.25)
    again = worker.report(PROTOCOL, SESSION)
    assert (again.sequence, again.losses) == (first.sequence, first.losses) == (1, ((1, 0.5),))
    worker.heard()
    newer = worker.report(PROTOCOL, SESSION)
    assert (newer.sequence, newer.losses) == (2, ((2, 0.25),))


@pytest.mark.parametrize("change", [{"steps": 10**6}, {"steps": 0}, {"discard": -1}])
def test_what_no_training_can_do_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(WireError, match="at most 100000 of each can be measured"):
        orders("apply", request=replace(REQUEST, **change))
