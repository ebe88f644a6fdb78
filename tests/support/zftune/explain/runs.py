"""Runs to be explained: of the real search on a surface, and written by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pytest

from tests.support.zftune.fixtures import Clock
from tests.support.zftune.store import rows as store_rows
from tests.support.zftune.tuner.surfaces import START, TOKENS, Driver, Surface, make
from zftune.explain.summary import RunSummary
from zftune.store.account import Account, Count
from zftune.store.store import Store
from zftune.store.types import (
    Decision,
    DecisionKind,
    Hardware,
    Key,
    Measurement,
    Model,
    Progress,
    Run,
    RunRecord,
    TrialState,
)
from zftune.tuner.evidence import Gain
from zftune.tuner.messages import sentence
from zftune.tuner.record import StoreRecorder, state_adapter
from zftune.tuner.search import Search
from zftune.tuner.space import Setting
from zftune.tuner.states import Outcome, Request, Trial

KEY = Key(
    model_id="m" * 16, hw_id="h" * 16, backend="zenflow", stage=0, dtype="bfloat16", world_size=1, micro_batch=1,
    sequence=TOKENS, checkpointing=False, quality="published",
)  # fmt: skip
MODEL = Model(model_id=KEY.model_id, name="tiny", parameters=1_000_000)
HARDWARE = Hardware(hw_id=KEY.hw_id, gpu="NVIDIA H200")


def begin(
    store: Store, *, model: Model = MODEL, hardware: Hardware = HARDWARE, budget: float = 1.8, **settings: Any
) -> Run:
    settings["budget_steps"] = budget
    return store.begin_run(KEY, model, hardware, knobs=START.knobs(), settings=settings)


def record(store: Store, run: Run) -> RunRecord:
    return next(one for one in store.runs() if one.run_id == run.run_id)


def searched(
    store: Store,
    seed: int,
    *,
    most: int = 1000,
    fault: Callable[[Request], Outcome | None] = lambda request: None,
    **options: Any,
) -> tuple[Run, Search, Driver, StoreRecorder]:
    """A search that was written down while it went on; nobody has said goodbye yet."""
    search, driver = make(seed, 0.05, **{"most_measurements": 24, **options})
    driver.fault = fault
    run = begin(store, budget=search.space.budget)
    recorder = StoreRecorder(store, run)
    follow(recorder, search, "first")
    go_on(search, driver, recorder, most)
    return run, search, driver, recorder


def follow(recorder: StoreRecorder, search: Search, process: str) -> None:
    """Count what the search sees; after a resumption only what comes since."""
    before, cost = recorder.account.total, search.cost

    def counted() -> Count:
        return Count(seconds=cost.elapsed_s - before.seconds, spent_s=cost.spent_s - before.spent_s)

    recorder.follow(counted, process)


def go_on(search: Search, driver: Driver, recorder: StoreRecorder, most: int = 1000) -> None:
    for _ in range(most):
        request = search.next()
        if request is None:
            break
        assert recorder.before(search, request) is None
        driver.run(search, most=1)
        recorder.after(search, request, driver.outcomes[-1])
    assert recorder.notices == []


def finished(store: Store, seed: int, **more: Any) -> tuple[Run, Search]:
    run, search, _, recorder = searched(store, seed, **more)
    recorder.finish(search)
    return run, search


def explained(store: Store, run: Run, clock: Any = None) -> dict[str, Any]:
    document = RunSummary.read(store, record(store, run), **({} if clock is None else {"clock": clock})).document()
    json.dumps(document, allow_nan=False)
    return document


class ByHand:
    """Rows with round figures; measurements move the clock."""

    def __init__(self, store: Store, clock: Clock, run: Run) -> None:
        self.store, self.clock, self.run = store, clock, run
        self.count = 0
        self.took_s = 0.0
        """By its steps."""

    def trial(self, source: str = "search", **knobs: Any) -> int:
        row = store_rows.add_trial(self.store, self.run, {**START.knobs(), **knobs}, source=source, constraint=0.0)
        return row.trial_id

    def measure(
        self,
        trial: int,
        role: str,
        ms: float,
        *,
        steps: int = 20,
        reason: str | None = None,
    ) -> None:
        began = self.clock.now
        self.clock.now += steps * ms / 1e3
        self.took_s += steps * ms / 1e3
        row = Measurement(
            role=role,
            steps=steps,
            step_ms=ms,
            began_unix_s=began,
            void_reason=reason,
            steps_ms=(ms,) * steps,
            aggregates={"tokens": TOKENS},
        )
        self.count += 1
        state = TrialState.MEASURED if reason is None else None
        store_rows.add_measurement(self.store, self.run, trial, row, state=state)
        self.clock.now += 0.001

    def knows(
        self, *, incumbent: int = 0, gain: Gain | None = None, step_ms: Sequence[float | None], **more: Any
    ) -> None:
        """What the search knows of its trials: the mean step time of each, None where it was not measured."""
        surface = Surface.random(0)
        search = Search(surface.space(START), START, surface.forecast)
        for number, (row, ms) in enumerate(zip(self.store.trials(self.run.run_id), step_ms, strict=True)):
            trial = search.book.trials[0] if number == 0 else search.add(Setting.from_knobs(row.knobs), row.source)
            if ms is not None:
                trial.keep([math.log(1e3 * ms / TOKENS)])
        search.book.incumbent_number, search.book.gain, search.book.tokens = incumbent, gain, TOKENS
        search.known.measurements = self.count
        for name, value in more.items():
            setattr(search.known, name, value)
        state = state_adapter().dump_python(search.known, mode="json")
        self.store.record(self.run, Progress(search=state))

    def counted(self, *counts: Count) -> None:
        """What the process that trains has counted, one count after the other."""
        account = Account()
        for count in counts:
            account = account.taken("first", count)
        self.store.renew_lease(self.run, account=account)

    def decide(self, kind: DecisionKind, trial: int | None = None, text: str = "Because.", **details: float) -> None:
        rows = self.store.trials(self.run.run_id)
        number = next((row.number for row in rows if row.trial_id == trial), None)
        about = {"elapsed_s": self.took_s, "text": text, **details}
        store_rows.add_decision(self.store, self.run, Decision(kind, number, about))
        self.clock.now += 0.001


def by_hand(store: Store, clock: Clock) -> Run:
    """400 ms at first. A look at 500 ms costs 2 s, another one finds 200 ms; then the training goes on for 10 s.

    Seconds of its clock: start 0 to 8, too slow 8 to 18, a look 18 to 22, incumbent 22 to 30, challenger 30 to 34,
    incumbent 34 to 42, waiting under the new incumbent 42 to 52. A second of that saves a second.
    """
    rows = ByHand(store, clock, begin(store))
    start = rows.trial("start")
    rows.measure(start, "start", 400)
    rows.decide("start", start, "The search begins.")
    slow = rows.trial("planner", update_interval=8, apply_lag=8)
    rows.measure(slow, "explore", 500)
    rows.decide("keep", slow, "Not adopted: it is 25% slower.", gain=-0.25)
    fast = rows.trial(topk_ratio=0.2)
    for trial, role, ms in ((fast, "explore", 200), (start, "a1", 400), (fast, "b", 200), (start, "a2", 400)):
        rows.measure(trial, role, ms)
    rows.decide("adopt", fast, "Adopted: it saves half.", gain=0.5, error=0.01)
    rows.measure(fast, "hold", 200, steps=50)
    rows.decide("stop", fast, "That is enough.")
    rows.knows(incumbent=2, gain=Gain(0.5, 0.01), step_ms=(400.0, 500.0, 200.0))
    rows.counted(Count(seconds=42.0, spent_s=2.0), Count(seconds=52.0, spent_s=2.0, saved_s=10.0))
    return rows.run


def noted(decision: Mapping[str, Any]) -> dict[str, Any]:
    """Of a decision, what the search itself has; what it took is the account's."""
    about = {name: value for name, value in decision["details"].items() if name not in ("elapsed_s", "spent_s")}
    return {**{name: decision[name] for name in ("kind", "trial")}, "details": about}


def live_document(search: Search) -> dict[str, Any]:
    """What a search itself knows of what is told from its rows."""
    book, gain = search.book, search.book.gain
    over = None if book.reference == book.trials[0].setting else book.reference.knobs()
    return {
        "start": _live_trial(search, book.trials[0]),
        "best": _live_trial(search, book.incumbent),
        "gain": None if gain is None else {"share": gain.share, "error": 2 * gain.error, "reference": over},
        "cost": {"spent_s": search.cost.spent_s, "elapsed_s": search.cost.elapsed_s},
        "measurements": search.measurements,
        "stopped": next((sentence(note) for note in reversed(search.notes) if note.kind in ("stop", "guard")), None),
        "trials": [_live_trial(search, trial) for trial in book.trials],
        "decisions": [noted(asdict(note)) for note in search.notes],
    }


def _live_trial(search: Search, trial: Trial) -> dict[str, Any]:
    return {
        "number": trial.number,
        "knobs": trial.setting.knobs(),
        "source": trial.source,
        "state": trial.state.value,
        "reason": trial.reason or None,
        "step_ms": search.book.step_ms(trial),
        "predicted_step_ms": search.forecast(trial.setting).step_ms,
        "staleness_steps": trial.setting.mean_staleness_steps,
        "quality_cost_steps": search.space.cost(trial.setting),
        "constraint": trial.constraint,
    }


EXACT = ("start", "best", "trials", "measurements", "stopped")
LATE_S = 60.0  # a busy machine may take that long for a search on a surface


def same(found: dict[str, Any], live: dict[str, Any]) -> None:
    """Found from the rows is what the search itself knows."""
    unknown = {"quality_cost_steps", "predicted_step_ms"}
    for name in EXACT[:3]:
        pairs = zip(found[name], live[name], strict=True) if name == "trials" else [(found[name], live[name])]
        for one, other in pairs:
            assert {k: v for k, v in one.items() if k not in {*unknown, "fate"}} == {
                k: pytest.approx(v) if isinstance(v, float) else v for k, v in other.items() if k not in unknown
            }
            assert one["predicted_step_ms"] == (pytest.approx(other["predicted_step_ms"]) if one["number"] else None)
            cost = one["quality_cost_steps"]
            assert cost is None or cost == pytest.approx(other["quality_cost_steps"])
    for name in EXACT[3:]:
        assert found[name] == live[name]
    notes = [note for note in found["decisions"] if note["kind"] in {one["kind"] for one in live["decisions"]}]
    assert [noted(note) for note in notes] == live["decisions"]
    if live["gain"] is None:
        assert found["gain"] is None
    else:
        figures = {name: pytest.approx(live["gain"][name], rel=1e-4) for name in ("share", "error")}
        assert found["gain"] == {**figures, "reference": live["gain"]["reference"]}
    assert found["cost"]["spent_s"] == pytest.approx(live["cost"]["spent_s"], abs=0.005)
    assert live["cost"]["elapsed_s"] <= found["cost"]["elapsed_s"] + 0.005 <= live["cost"]["elapsed_s"] + LATE_S
