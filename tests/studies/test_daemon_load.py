"""Study 015: simulated runs do what agents do, and none of their decisions is lost."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.studies.test_studies import STUDIES, load
from tests.tiers import by_day
from tests.zftune.daemon.conftest import folder
from tests.zftune.daemon.daemons import COMMAND, serving
from zftune.daemon import PROTOCOL
from zftune.daemon.client.http import DaemonClient
from zftune.daemon.protocol.codec import decode
from zftune.daemon.protocol.messages import Report

__all__ = ["folder"]


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield load(STUDIES / "015-daemon-load" / "run.py")
    sys.modules.pop("simulated", None)


@pytest.mark.parametrize("single", by_day([False], all_of=[False, True]))
def test_every_decision_is_carried_out(study: Any, folder: Path, single: bool) -> None:
    counts = study.Counts()
    with serving(folder, module=COMMAND) as daemon, ExitStack() as stack:
        runs = [study.Run(daemon.path, hello, counts, single=single) for hello in study.hellos(3)]
        for run in runs:
            stack.callback(run.connection.close)
        study.train(runs, 0.2, 5.0)
        with DaemonClient(daemon.path) as client:
            shown = {one["run"]: one for one in client.get("/v1/runs")}
    assert counts.refused == []
    assert counts.asked >= 1
    assert counts.asked == counts.taken + counts.withdrawn + sum(run.measuring for run in runs)
    assert all(shown[run.name]["step"] > 20 and shown[run.name]["dropped"] == 0 for run in runs)


def test_a_report_is_one_of_the_wire(study: Any, folder: Path) -> None:
    training = sys.modules["simulated"].Training("x")
    training.apply(sys.modules["simulated"].Asked(1, {"topk_ratio": 0.1}, 1, 2))
    assert [training.take_step() for _ in range(4)] == [False, False, True, False]
    assert [len(training.done["outcome"][name]) for name in ("discarded_ms", "steps_ms")] == [1, 2]
    message = {
        "protocol": PROTOCOL,
        "session": "0" * 32,
        "sequence": 1,
        "steps": training.figures,
        "done": training.done,
    }
    assert [one.step for one in decode(Report, json.loads(json.dumps(message))).steps] == [1, 2, 3, 4]


def test_shares_and_growth(study: Any) -> None:
    assert study._shares([float(one) for one in range(101)])["p99"] == 99
    watch = study.Watch.__new__(study.Watch)
    now_s = time.perf_counter()
    watch.rows = [{"at_s": now_s + one, "rss_bytes": 1000.0 + one, "threads": 1.0} for one in range(11)]
    assert study._memory(watch, now_s)["rss_growth"] == pytest.approx(10 / 1005)
