"""A search from the store's rows alone, and its rows: our tables are the truth."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

from zftune.errors import ZftuneError
from zftune.store.types import Measurement, TrialRecord, TrialState
from zftune.tuner.drift import Pace
from zftune.tuner.scores import Sample, describe
from zftune.tuner.search import Search
from zftune.tuner.settings import Setting
from zftune.tuner.states import Between, Choosing, Outcome, Request, Trial


@dataclass(frozen=True, slots=True)
class Told:
    """One thing that a search was told."""

    trial: int
    role: str
    outcome: Outcome
    life: int = 0
    """How often its run had been resumed before."""


def measurement_row(
    request: Request, outcome: Outcome, sequence: int, *, began_unix_s: float, life: int = 0
) -> Measurement:
    """What the store keeps of an outcome, all of it.

    Args:
        request: what was asked for.
        outcome: what came of it.
        sequence: how many outcomes of the search came before.
        began_unix_s: wall clock.
        life: how often the run was resumed before.
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
            **({"called_off": True} if outcome.called_off else {}),
            **({} if outcome.pace is None else {"pace": asdict(outcome.pace)}),
        },
    )


def rebuild(
    search: Search, trials: Sequence[TrialRecord], measurements: Mapping[int, Sequence[Measurement]]
) -> list[Told]:
    """Bring a new search to where the rows say it was; it then asks what the old one would have asked.

    Where training was ended and went on, the incumbent was measured again (see `Search.begin_again`), here as there.

    Args:
        search: new, with the arguments of the one that wrote the rows.
        trials: of its run, in order.
        measurements: by the trials' ids.

    Returns:
        Crashes that no measurement tells of: trials that were in flight when the run ended without goodbye.

    Raises:
        ZftuneError: the rows are not those of such a search.
    """
    if not trials:
        return []
    book = search.book
    if Setting.from_knobs(trials[0].knobs) != book.incumbent.setting:
        raise ZftuneError("the run in the store began with another setting than this one: it cannot go on from it")
    life = 0
    for told in _in_order(trials, measurements):
        if told.life > life:
            life = told.life
            search.begin_again()
        _take_in(search, trials[: told.trial + 1])
        _tell(search, told)
    _take_in(search, trials)
    crashes = []
    for row in trials:
        trial = book.trials[row.number]
        if row.state is TrialState.CRASHED and trial.state is not TrialState.CRASHED:
            crashes.append(Told(row.number, _role(search, row.number), Outcome("crashed", reason=row.reason or "")))
            _tell(search, crashes[-1])
        elif row.number and row.state is TrialState.VOID and trial.state is TrialState.PLANNED:
            if book.find(trial.setting) is trial:
                search.agenda.repeat(trial)
            else:
                trial.state = TrialState.VOID  # it was repeated
    return crashes


def lives(measurements: Mapping[int, Sequence[Measurement]]) -> int:
    """In how many lives of a run something was measured.

    Args:
        measurements: of its trials.
    """
    return 1 + max((int(one.aggregates.get("life", 0)) for rows in measurements.values() for one in rows), default=-1)


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
        (int(one.aggregates["sequence"]), Told(row.number, one.role, _outcome(one), int(one.aggregates.get("life", 0))))
        for row in trials
        for one in measurements.get(row.trial_id, ())
    ]
    return [told for _, told in sorted(found, key=lambda pair: pair[0])]


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
        between=Between(*about.get("between", ())),
        called_off=about.get("called_off", False),
        pace=Pace(**about["pace"]) if "pace" in about else None,
    )


def _role(search: Search, trial: int) -> str:
    """What a trial was in flight for when it crashed."""
    if isinstance(search.state, Choosing):
        return "explore"
    request = search.next()
    return request.role if request is not None and request.trial == trial else "explore"


def _tell(search: Search, told: Told) -> None:
    """Put the question that the rows answer, without asking Optuna again."""
    if isinstance(search.state, Choosing):
        search.resume_choice(told.trial, told.role)
    request = search.next()
    if request is None or (request.trial, request.role) != (told.trial, told.role):
        raise ZftuneError(f"the rows of trial {told.trial} in the store do not follow from those before them")
    search.tell(told.outcome)
