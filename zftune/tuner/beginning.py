"""What a search begins from: one that was not finished, a preset, or the knobs that the user has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from zenflow import ConfigError, ZenFlowConfig
from zftune.errors import BadInputError
from zftune.store import Match, Ratios, RunRecord
from zftune.tuner.recorder import StoreRecorder
from zftune.tuner.recording import Recording, search_settings
from zftune.tuner.search import Search, SearchOptions
from zftune.tuner.settings import TRAJECTORY_KNOBS, Setting
from zftune.tuner.space import Space

Make = Callable[[Setting, SearchOptions], Search]
"""Makes the search that begins from a setting."""
_KEPT = ("select_interval", "deferred_update")  # no search changes them: they stay as the user has them


@dataclass(frozen=True, slots=True)
class Begun:
    """A search that can go on."""

    search: Search
    recorder: StoreRecorder | None
    """None: nothing is written down."""
    sentence: str = ""
    """Where it begins from; "": the user's own knobs."""


@dataclass(frozen=True, slots=True)
class Again:
    """The run of a training that lives."""

    run_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a search is wanted for.

    Args:
        own: the knobs that the user has.
        space: what may be proposed.
        options: of the search.
        ratios: for presets of other machines; None: none of these.
        least_ratio: offload ratio at least: a lower one takes more GPU memory.
        fresh: neither preset nor earlier run.
        again: the training lives, and its search was ended: it goes on, whatever else is wanted.
    """

    own: Setting
    space: Space
    options: SearchOptions
    ratios: Ratios | None = None
    least_ratio: float = 0.0
    fresh: bool = False
    again: Again | None = None


@dataclass(frozen=True, slots=True)
class _Choice:
    """What a preset is good for."""

    sentence: str
    start: Setting | None = None
    """To begin from."""
    candidate: Setting | None = None
    """To be compared before it is trusted."""


def begin(recording: Recording | None, wanted: Wanted, make: Make) -> Begun:
    """Begin a search, or go on with one that was not finished.

    Args:
        recording: of the run; None: there is no store.
        wanted: what it is wanted for.
        make: makes it; more than once where an earlier one cannot be gone on with.
    """
    own = wanted.own if wanted.space.violation(wanted.own) is None else wanted.space.base
    if recording is None:
        return Begun(make(own, wanted.options), None)
    recording.ratios = wanted.ratios
    again = None if wanted.again is None else recording.known(wanted.again.run_id)
    wanted = replace(wanted, options=replace(wanted.options, crashed=recording.crashed()))
    resumed = _resumed(again, recording, wanted, make)
    if resumed is not None:
        return resumed
    match = None if wanted.fresh else recording.preset()
    choice = _Choice("") if match is None else _choice(match, wanted)
    search = make(choice.start or own, wanted.options)
    if choice.candidate is not None:
        search.agenda.suggest(choice.candidate, "preset")
    setting = choice.start or choice.candidate
    stake = None if match is None or setting is None or match.distance else (match.preset.name, setting)
    recorder = recording.begin(search, wanted.own.knobs(), stake=stake)
    return Begun(search, recorder, choice.sentence)


def _resumed(again: RunRecord | None, recording: Recording, wanted: Wanted, make: Make) -> Begun | None:
    """The run that lives, else the newest of the same search, if it was not finished."""
    run = again
    if run is None and not wanted.fresh:
        run = recording.unfinished(wanted.own.knobs(), search_settings(wanted.options, wanted.space))
    start = None if run is None else recording.began_from(run)
    if run is None or start is None:
        return None
    search = make(start, wanted.options)
    recorder = recording.resume(run, search)
    if recorder is None:
        return None
    kept = f"{search.measurements} measurement{' is' if search.measurements == 1 else 's are'} kept"
    return Begun(search, recorder, f"Goes on with run {run.run_id[:8]}: {kept}; --fresh begins anew.")


def _choice(match: Match, wanted: Wanted) -> _Choice:
    """Whether to begin from a preset, to look at it first, or to leave it."""
    preset, own = match.preset, wanted.own
    try:
        measured = Setting.of(replace(own.config(ZenFlowConfig()), **_whole(match.knobs)))
    except (BadInputError, ConfigError, TypeError) as error:
        return _Choice(f"Preset {preset.name} is not used: {error}.")
    setting = replace(measured, **{name: getattr(own, name) for name in _KEPT})
    refused = _refusal(setting, wanted)
    if refused is not None:
        return _Choice(f"Preset {preset.name} is not used: {refused}.")
    if match.provisional or setting != measured:
        reason = match.reason if match.provisional else f"preset {preset.name} was measured with other fixed knobs"
        return _Choice(f"Looks at a preset first: {reason}.", candidate=setting)
    saved = f"where it saved {preset.evidence.gain:.1%}" if preset.evidence.gain > 0 else "as the best there"
    return _Choice(f"Begins from preset {preset.name}, measured for this model on this hardware, {saved}.", setting)


def _whole(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """A preset's knobs; where a window is given without its lag, the lag is the whole window."""
    return {**({"apply_lag": None} if "update_interval" in knobs else {}), **knobs}


def _refusal(setting: Setting, wanted: Wanted) -> str | None:
    """Why a preset's setting must not run here, or None."""
    space = wanted.space
    violation = space.violation(setting)
    fixed = space.fixed_because if space.quality != "exact" else ""
    if setting in wanted.options.crashed:
        return "a run crashed with it"
    if violation is not None:
        return violation.reason
    if fixed and any(getattr(setting, name) != getattr(wanted.own, name) for name in TRAJECTORY_KNOBS):
        return fixed
    if setting.offload_ratio < wanted.least_ratio:
        return f"its offload_ratio {setting.offload_ratio:g} takes GPU memory, which --tune-memory allows"
    return None
