"""A run as every screen, page and document shows it: the state of its search, its rows, and its account."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from zftune import __version__
from zftune.explain import words
from zftune.quality import (
    adopted_from,
    allowed_loss_percent,
    coverage_warning,
    most_late_steps,
    selected_share,
    summary,
)
from zftune.store.account import Account
from zftune.store.store import facts_of, goes_on, is_written_to
from zftune.store.types import Curve, Decision, Hardware, Measurement, Model, RunRecord, RunState, TrialRecord
from zftune.text import slowest_rank
from zftune.tuner.messages import sentence
from zftune.tuner.record import state_adapter
from zftune.tuner.states import LEARNING_RATE, TRAINED_ON, ExplorationCost, SearchOptions, SearchState
from zftune.words import TRIALS

if TYPE_CHECKING:
    from zftune.store.store import Store

SCHEMA = "zftune.explain/1"
TUNE_SCHEMA = "zftune.tune/1"
_ENDS, _CONTINUES = ("stop", "guard"), ("resume", "reopen")
_LISTS = ("trials", "decisions", "history", "rejected", "notices")
_UNKNOWN = (
    "run", "budget", "start", "best", "gain", "cost", "measurements", "stopped", "loss", "coverage", "curve",
    "ranks_ms",
)  # fmt: skip
"""Of a search of which nothing was written down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run: `RunSummary.read` makes it, and `document` is what is shown of it."""

    run: RunRecord
    model: Model
    hardware: Hardware
    lives: bool
    """Whether its training goes on."""
    is_tuned: bool
    """Whether its search does, too."""
    rows: Sequence[TrialRecord]
    measured: Sequence[tuple[int, Measurement]]
    """With the number of its trial, oldest first."""
    notes: Sequence[Decision]
    """Oldest first."""
    state: SearchState | None
    """All that its search knows; None: it has not begun."""
    account: Account
    curve: Curve

    @classmethod
    def read(cls, store: Store, run: RunRecord, clock: Callable[[], float] = time.time) -> RunSummary:
        """A run of a store; `clock` is the wall clock, s."""
        run_id, now = run.run_id, clock()
        rows, found, lives = store.trials(run_id), store.search_state(run_id), goes_on(store, run, now)
        measured = [(row.number, one) for row in rows for one in store.measurements(row.trial_id)]
        model, hardware = facts_of(store, run.key)
        return cls(
            run=run,
            model=model,
            hardware=hardware,
            lives=lives,
            is_tuned=lives and is_written_to(store, run, now),
            rows=rows,
            measured=sorted(measured, key=lambda pair: pair[1].began_unix_s + _seconds(pair[1])),
            notes=sorted(store.decisions(run_id), key=lambda one: one.at_unix_s),
            state=None if found is None else state_adapter().validate_python(found),
            account=store.account(run_id) or Account(),
            curve=store.curve(run_id),
        )

    @property
    def best(self) -> int:
        """The trial whose knobs are the best so far."""
        return 0 if self.state is None else self.state.book.incumbent_number

    @property
    def gain(self) -> dict[str, Any] | None:
        """Of the incumbent over its reference, with two standard errors; None: nothing was adopted."""
        book = None if self.state is None else self.state.book
        if book is None or book.gain is None:
            return None
        is_start = self.rows[book.reference_number].knobs == self.rows[0].knobs
        reference = None if is_start else dict(self.rows[book.reference_number].knobs)
        return {"share": book.gain.share, "error": 2 * book.gain.error, "reference": reference}

    @property
    def stopped(self) -> str | None:
        """Why the search is over; None: it is not."""
        ends = [one for one in self.notes if one.kind in (*_ENDS, *_CONTINUES)]
        return sentence(ends[-1]) if ends and ends[-1].kind in _ENDS else None

    def document(self) -> dict[str, Any]:
        """All of it as JSON."""
        run, key, trials = self.run, self.run.key, self.trials()
        ranks_ms = () if self.state is None else self.state.ranks_ms
        slowest = slowest_rank(dict(enumerate(ranks_ms)))
        document = {
            "schema": SCHEMA,
            "zftune": __version__,
            "run": self._run(),
            "device": self.hardware.gpu or self.hardware.cpu_model or self.hardware.hw_id,
            "rig": None if self.hardware.rig is None else {"name": self.hardware.rig},
            "workload": {
                "model": self.model.name or self.model.model_id,
                "parameters": self.model.parameters,
                "micro_batch": key.micro_batch or None,
                "sequence": key.sequence or None,
                **{name: getattr(key, name) for name in ("dtype", "world_size", "nodes", "shards", "ranks")},
                "learning_rate": run.settings.get(LEARNING_RATE),
            },
            "quality": key.quality,
            "ranks_ms": list(ranks_ms) or None,
            "budget": self._budget(),
            "interrupted": self.stopped is not None and run.state is RunState.LOST,
            "start": trials[0] if trials else None,
            "best": trials[self.best] if trials else None,
            "gain": self.gain,
            "cost": self._cost(),
            "measurements": 0 if self.state is None else self.state.measurements,
            "stopped": self.stopped,
            "trials": trials,
            "decisions": self.decisions(),
            "history": self._history(),
            "rejected": words.rejected(trials),
            **self._quality(),
        }
        document["notices"] += [] if slowest is None else [slowest]
        return {**document, "verdict": words.verdict(document)}

    def trials(self) -> list[dict[str, Any]]:
        """Every setting that was thought of."""
        return [self._trial(row) for row in self.rows]

    def _trial(self, row: TrialRecord) -> dict[str, Any]:
        book = None if self.state is None else self.state.book
        known = book.trials[row.number] if book is not None and row.number < len(book.trials) else None
        late, ratio = words.staleness_steps(row.knobs, self.run.settings), row.knobs.get("topk_ratio")
        cost = None
        if self.state is not None and self.state.movement and late is not None and isinstance(ratio, int | float):
            cost = (1 - selected_share(ratio)) * late
        elif row.number and row.constraint is not None and row.state.value != "rejected":
            cost = (1 + row.constraint) * float(self.run.settings.get("budget_steps") or 0.0) or None
        return {
            "number": row.number,
            "knobs": dict(row.knobs),
            "source": row.source,
            "state": row.state.value,
            "fate": self._fate(row),
            "reason": row.reason or (known.reason if known is not None else "") or None,
            "step_ms": None if known is None or book is None else book.step_ms(known),
            "predicted_step_ms": row.predicted_step_ms,
            "staleness_steps": late,
            "quality_cost_steps": cost,
            "constraint": row.constraint,
        }

    def _fate(self, row: TrialRecord) -> str:
        """What became of a setting, in a word or two; nothing is claimed of one that was not compared."""
        decided = {note.kind for note in self.notes if note.trial == row.number}
        if row.state.value != "measured":
            return TRIALS[row.state.value]
        if row.number == self.best:
            return "kept"
        if row.source == "start":
            return "start"
        kept = "compared again" if row.source == "reference" else "not adopted"
        fates = {"rollback": "rolled back", "adopt": "adopted before", "keep": kept}
        return next((fate for kind, fate in fates.items() if kind in decided), "not compared")

    def decisions(self) -> list[dict[str, Any]]:
        """What was decided, and why, oldest first."""
        return [
            {**asdict(one), "reason": sentence(one), "at_s": one.details.get("elapsed_s", 0.0)} for one in self.notes
        ]

    def _history(self) -> list[dict[str, Any]]:
        """Every measurement, oldest first."""
        return [
            {
                "number": number,
                "trial": trial,
                "role": one.role,
                "status": "measured" if one.void_reason is None else "void",
                "reason": one.void_reason,
                "steps": one.steps,
                "step_ms": one.step_ms or None,
                "seconds": _seconds(one),
                "at_unix_s": one.began_unix_s + _seconds(one),
            }
            for number, (trial, one) in enumerate(self.measured, 1)
        ]

    def _run(self) -> dict[str, Any]:
        run = self.run
        state = RunState.RUNNING if self.lives else RunState.LOST if run.state is RunState.RUNNING else run.state
        last = next((one for one in reversed(self.notes) if TRAINED_ON in one.details or one.kind == "resume"), None)
        return {
            "run_id": run.run_id,
            "state": "ended" if state is RunState.LOST else state.value,
            "trained_on": state is RunState.FINISHED and last is not None and TRAINED_ON in last.details,
            "tuned": self.is_tuned,
            **{name: getattr(run.key, name) for name in ("backend", "stage", "model_id", "hw_id")},
            **{name: getattr(run, name) for name in ("began_unix_s", "ended_unix_s", "usable_cores")},
            "resumed": len(self.account.earlier),
            "settings": dict(run.settings),
            "versions": dict(run.versions),
        }

    def _cost(self) -> dict[str, Any]:
        total, options = self.account.total, SearchOptions()
        changes = [] if self.state is None else self.state.cost.changes_s
        share = 0.0 if self.gain is None else self.gain["share"]
        return {
            "spent_s": total.spent_s,
            "allowed_s": ExplorationCost(options.cost_share, options.cost_floor_s, elapsed_s=total.seconds).allowed_s,
            "elapsed_s": total.seconds,
            "change_s": fmean(changes) if changes else None,
            "steps": total.steps or None,
            "tokens": total.tokens_told,
            "saved_s": total.saved_s,
            "break_even_s": self.account.break_even_s,
            "remaining_s": self.account.remaining_s(share),
        }

    def _budget(self) -> dict[str, Any] | None:
        """What bounds lateness, by the newest movement of the weights."""
        settings, quality = self.run.settings, self.run.key.quality
        steps, movement, rate = (settings.get(name) for name in ("budget_steps", "movement_percent", "movement_rate"))
        if steps is None:
            return None
        guesses: bool = settings.get("guesses", False)
        if movement is not None and self.state is not None and self.state.movement is not None:
            movement, rate = self.state.movement
            steps = most_late_steps(quality, movement, guesses=guesses)
        loss = None if movement is None else allowed_loss_percent(quality, movement, guesses=guesses)[0]
        return {
            "steps": steps,
            "fixed_because": settings.get("fixed_because"),
            "movement_percent": movement,
            "movement_learning_rate": rate,
            "expected_loss_percent": loss,
        }

    def _quality(self) -> dict[str, Any]:
        """How the training went beside its speed."""
        curve, rows = self.curve, self.rows
        knobs = curve.changes[-1].knobs if curve.changes else self.run.knobs
        losses = summary([point.loss for point in curve.points if point.loss is not None])
        since = curve.changes[-1].step if curve.changes else 0
        held = [one.coverage for one in curve.points if one.coverage is not None and one.step - one.steps >= since]
        covered = fmean(held) if held else None  # under the present knobs: others, which were tried, select others
        start = adopted_from(knobs, rows[0].knobs, rows[self.best].knobs) if rows else None
        warning = coverage_warning(covered, knobs, start)
        return {
            "loss": None if losses is None else {**asdict(losses), "sentence": str(losses)},
            "coverage": covered,
            "curve": {name: list(points) for name, points in asdict(curve).items()},
            "notices": [] if warning is None else [warning],
        }


def _seconds(measurement: Measurement) -> float:
    """Of all its steps: it was written down at its end."""
    discarded_ms: list[float] = measurement.aggregates.get("discarded_ms", [])
    return (sum(measurement.steps_ms) + sum(discarded_ms)) / 1e3


def tune_document(
    store: Store, run_id: str | None, about: Mapping[str, Any], notices: Sequence[str], conclusion: str
) -> dict[str, Any]:
    """The document of `zftune tune --json`: that of `zftune explain --json`, and what only the command knows.

    `about` has "device", "rig", "workload", "quality", "interrupted"; `conclusion` is the result where nothing was
    written down (`run_id` None). Raises StoreError: the store could not be read.
    """
    run = None if run_id is None else store.run(run_id)
    if run is None:
        found: dict[str, Any] = {"zftune": __version__, **dict.fromkeys(_UNKNOWN), **{name: [] for name in _LISTS}}
    else:
        found = RunSummary.read(store, run).document()
    document = {**found, **about, "schema": TUNE_SCHEMA, "notices": [*found["notices"], *notices]}
    return {**document, "verdict": words.verdict(document) if run is not None else conclusion.splitlines()}
