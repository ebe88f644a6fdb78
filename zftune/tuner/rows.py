"""What a search was told, as rows of the store, and the search that follows from them.

Rows that do not follow from those before them cost the comparison that was open there, and no more: what was adopted,
and what it gained, is in the decisions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

from zftune.errors import ZftuneError
from zftune.store.types import Decision, Measurement, TrialRecord, TrialState
from zftune.tuner.scores import Pace, Sample, describe
from zftune.tuner.search import Search
from zftune.tuner.space import Setting
from zftune.tuner.states import (
    LATE,
    LIFE,
    OF_INCUMBENT,
    Choosing,
    Exploring,
    MeasuringBaseline,
    Outcome,
    Request,
    Stopped,
    Trial,
    UnmeasuredSteps,
    WaitingForBudget,
)


@dataclass(frozen=True, slots=True)
class Told:
    """One thing that a search was told."""

    trial: int
    role: str
    outcome: Outcome
    life: int = 0
    """How often its run had been resumed before."""
    cost: tuple[float, float] = (0.0, 0.0)
    """What the search had spent until then, and in how long."""
    stopped: str | None = None
    """Why the search had ended, and only looked at step times; None: it had not."""
    trials: int = 0
    """How many settings it had thought of by then."""


def measurement_row(
    request: Request,
    outcome: Outcome,
    sequence: int,
    *,
    began_unix_s: float,
    life: int,
    cost: tuple[float, float],
    trials: int,
    at_s: float | None = None,
    stopped: str | None = None,
) -> Measurement:
    """An outcome as a row of the store.

    `sequence` counts the search's outcomes before it, `life` the run's resumptions, `trials` the trials stored before
    it; `cost` is what the search had spent, and in how long, both in s; `at_s` is the run's time at its end; `stopped`
    why the search had ended before the request.
    """
    sample = Sample.of(outcome.steps_ms, request.setting.update_interval, outcome.tokens)
    token_us, mad_us = describe(sample) if sample.token_us else (0.0, None)
    return Measurement(
        role=request.role,
        steps=len(outcome.steps_ms),
        step_ms=token_us * outcome.tokens / 1e3,
        token_us=token_us,
        mad_us=mad_us,
        began_unix_s=began_unix_s,
        void_reason=None if outcome.status == "measured" else outcome.reason or outcome.status,
        steps_ms=outcome.steps_ms,
        aggregates={
            "sequence": sequence,
            "status": outcome.status,
            "discarded_ms": list(outcome.discarded_ms),
            "tokens": outcome.tokens,
            "device_bytes": outcome.device_bytes,
            "host_bytes": outcome.host_bytes,
            "between": astuple(outcome.between),
            "life": life,
            "cost": cost,
            "trials": trials,
            **({} if at_s is None else {"at_s": at_s}),
            **({} if stopped is None else {"stopped": stopped}),
            **({"called_off": True} if outcome.called_off else {}),
            **({} if outcome.pace is None else {"pace": asdict(outcome.pace)}),
            **({"ranks_ms": list(outcome.ranks_ms)} if outcome.ranks_ms else {}),
            **({} if outcome.movement_percent is None else {"movement_percent": outcome.movement_percent}),
            **({} if outcome.movement_percent is None else {"movement_rate": outcome.movement_rate}),
            **({} if outcome.before_ms is None else {"before_ms": outcome.before_ms}),
        },
    )


@dataclass(frozen=True, slots=True)
class Followed:
    """What was made of the rows of a run."""

    crashes: tuple[Told, ...] = ()
    """That no measurement tells of: trials that were in flight when the run ended without goodbye."""
    lost: int = 0
    """How many measurements do not follow from those before them."""


def rebuild(
    search: Search,
    trials: Sequence[TrialRecord],
    measurements: Mapping[int, Sequence[Measurement]],
    decisions: Sequence[Decision] = (),
) -> Followed:
    """Bring a new search to the state of the rows; it then asks what the old one would have asked.

    Where training was ended and went on, the incumbent was measured again (see `Search.begin_again`), here as there.
    `measurements` are by trial id; trials and decisions are in order.

    Raises:
        ZftuneError: the run began with another setting.
    """
    if not trials:
        return Followed()
    book = search.book
    if Setting.from_knobs(trials[0].knobs) != book.incumbent.setting:
        raise ZftuneError("the run in the store began with another setting than this one: it cannot go on from it")
    life, lost = -1, 0
    for told in _in_order(trials, measurements):
        thought_of = trials[: max(told.trial + 1, told.trials)]
        if told.life > life:
            life = told.life
            moves = [one for one in decisions if one.details.get(LIFE) == life]
            _take_in(search, _before(search, thought_of, moves))
            _repeat(search, trials)
            if life:
                search.begin_again()
            for one in moves:
                _obey(search, trials, one)
        _take_in(search, thought_of)
        search.cost.spent_s, search.cost.elapsed_s = told.cost
        known = len(book.trials)
        follows = _follows(search, told)
        lost += not (_agrees(search, trials[known : len(book.trials)]) and follows)
    later = [one for one in decisions if one.details.get(LIFE, -1) > life]
    _take_in(search, _before(search, trials, later))
    crashes = []
    for row in trials[: len(book.trials)]:
        if row.state is TrialState.CRASHED and book.trials[row.number].state is not TrialState.CRASHED:
            crashes.append(Told(row.number, _role(search, row.number), Outcome("crashed", reason=row.reason or "")))
            lost += not _follows(search, crashes[-1])
    if lost:
        _restore(search, [one for one in decisions if one not in later])
    _repeat(search, trials)
    for one in decisions:
        if one in later or one.kind != "movement":
            _obey(search, trials, one)
    _take_in(search, trials)
    return Followed(tuple(crashes), lost)


def _before(search: Search, trials: Sequence[TrialRecord], moves: Sequence[Decision]) -> Sequence[TrialRecord]:
    """Those that were thought of before a life of a run went back to earlier updates."""
    known = len(search.book.trials)
    return trials[: min((one.trial for one in moves if one.trial is not None and one.trial >= known), default=None)]


def _obey(search: Search, trials: Sequence[TrialRecord], decision: Decision) -> None:
    """What no measurement tells of holds on: earlier updates in a training that went on, what somebody asked for."""
    about = decision.details
    if decision.kind == "movement" and decision.trial is not None:
        _take_in(search, trials[: decision.trial + 1])
        kept = {name: about[name] for name in (LIFE, LATE) if name in about}
        search.go_on_with(search.book.trials[decision.trial], decision.reason, **kept)
    elif decision.kind == "rollback" and search.book.adoptions:
        search.roll_back(str(about.get("by", "")), decision.reason)
    elif decision.kind == "stop" and about.get("final"):
        search.stop(decision.reason, final=True)
    elif decision.kind == "guard":
        search.guard(decision.reason)


def _repeat(search: Search, trials: Sequence[TrialRecord]) -> None:
    """Have those proposed again that a life of the run did not come to."""
    for trial, row in zip(search.book.trials, trials, strict=False):  # one may not have been written down yet
        left = row.state is TrialState.VOID and trial.state is TrialState.PLANNED
        if trial.number and left and trial is not search.book.incumbent:
            if search.book.find(trial.setting) is trial:
                search.agenda.repeat(trial)
            else:
                trial.state = TrialState.VOID  # it was repeated


def lives(measurements: Mapping[int, Sequence[Measurement]]) -> int:
    """In how many lives of a run something was measured."""
    return 1 + max((one.aggregates["life"] for rows in measurements.values() for one in rows), default=-1)


def _take_in(search: Search, trials: Sequence[TrialRecord]) -> None:
    for row in trials[len(search.book.trials) :]:
        search.book.append(_trial(search, row))


def _trial(search: Search, row: TrialRecord) -> Trial:
    setting = Setting.from_knobs(row.knobs)
    trial = Trial(row.number, setting, row.source, forecast=search.book.forecast(setting))
    trial.constraint = row.constraint or 0.0
    if row.state is TrialState.REJECTED:
        trial.state, trial.reason = TrialState.REJECTED, row.reason or ""
    return trial


def _in_order(trials: Iterable[TrialRecord], measurements: Mapping[int, Sequence[Measurement]]) -> list[Told]:
    found = [
        (int(one.aggregates["sequence"]), _told(row, one))
        for row in trials
        for one in measurements.get(row.trial_id, ())
    ]
    return [told for _, told in sorted(found, key=lambda pair: pair[0])]


def _told(trial: TrialRecord, row: Measurement) -> Told:
    about, outcome = row.aggregates, _outcome(row)
    return Told(
        trial.number, row.role, outcome, about["life"], tuple(about["cost"]), about.get("stopped"), about["trials"]
    )


def _outcome(row: Measurement) -> Outcome:
    about: Mapping[str, Any] = row.aggregates
    return Outcome(
        status=about["status"],
        steps_ms=tuple(row.steps_ms),
        discarded_ms=tuple(about["discarded_ms"]),
        tokens=about["tokens"],
        device_bytes=about["device_bytes"],
        host_bytes=about["host_bytes"],
        reason=row.void_reason or "",
        between=UnmeasuredSteps(*about["between"]),
        called_off=about.get("called_off", False),
        pace=Pace(**about["pace"]) if "pace" in about else None,
        ranks_ms=tuple(about.get("ranks_ms", ())),
        movement_percent=about.get("movement_percent"),
        movement_rate=about.get("movement_rate"),
        before_ms=about.get("before_ms"),
    )


def _role(search: Search, trial: int) -> str:
    """What a trial was in flight for when it crashed."""
    if isinstance(search.state, Choosing):
        return "explore"
    request = search.next()
    return request.role if request is not None and request.trial == trial else "explore"


def _asks(search: Search, told: Told) -> bool:
    """Whether it asks for what it is told next: what was chosen then is chosen again, without asking Optuna."""
    if isinstance(search.state, Choosing):
        if not search.book.incumbent.samples:
            return False  # nothing is chosen before it was measured
        search.resume_choice(told.trial, told.role, told.stopped)
        if told.role == "explore":
            search.agenda.taken(search.book.trials[told.trial].setting)
    request = search.next()
    return request is not None and (request.trial, request.role) == (told.trial, told.role)


def _follows(search: Search, told: Told) -> bool:
    """Take in what it was told; where it does not follow from what was told before, give up what was compared."""
    if _asks(search, told):
        search.tell(told.outcome)
        return True
    book, trial = search.book, search.book.trials[told.trial]
    if told.role in OF_INCUMBENT:
        book.restore_start()
        book.go_back_to(trial)  # what it gains is restored in the end
    if told.role == "start":
        search.reopen("A measurement of the best settings so far does not follow from those before it.", trial)
        search.state = MeasuringBaseline()
    elif told.role == "hold":
        search.state = WaitingForBudget(1) if told.stopped is None else Stopped(told.stopped)
    else:
        search.state = Exploring(told.trial) if told.role == "explore" and book.incumbent.samples else Choosing()
    if not isinstance(search.state, Choosing) and search.next() is not None:
        search.tell(told.outcome)
    elif told.role != "hold":
        _keep(search, trial, told)
    return False


def _keep(search: Search, trial: Trial, told: Told) -> None:
    """Keep what was measured, and decide nothing by it."""
    outcome = told.outcome
    if outcome.status == "measured":
        search.book.keep(trial, outcome)
    elif outcome.status == "aborted":
        search.book.abort(trial, outcome)
    elif outcome.status == "crashed" and told.role not in OF_INCUMBENT:  # else it says nothing against the setting
        search.book.crash(trial, outcome.reason)
    search.measurements += outcome.status in ("measured", "aborted")


def _agrees(search: Search, trials: Sequence[TrialRecord]) -> bool:
    """Whether the settings that it went on to by itself are those of the rows, which hold in any case."""
    others = [row for row in trials if search.book.trials[row.number].setting != Setting.from_knobs(row.knobs)]
    for row in others:
        search.book.replace(_trial(search, row))
        search.state = Choosing()
    return not others


def _restore(search: Search, decisions: Sequence[Decision]) -> None:
    """Take from the decisions what was adopted, and what is the best: measurements do not tell."""
    search.book.restore(decisions)
    if not (isinstance(search.state, Stopped) and search.book.incumbent.samples):
        search.state = Choosing()
