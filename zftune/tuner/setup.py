"""From an optimizer that trains to a search over its knobs: the model, the machine, the space, and earlier runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from zenflow import ConfigError, ZenFlowConfig
from zenflow.optimizer import ZenFlowOptimizer
from zftune.errors import BadInputError
from zftune.planner.model import Job
from zftune.quality import assumed_coverage
from zftune.store.types import Match, Ratios, RunRecord
from zftune.tuner import messages
from zftune.tuner.forecast import PlannerForecast, forecast_for
from zftune.tuner.pace import Pace, changed, ratios_of
from zftune.tuner.recorder import StoreRecorder
from zftune.tuner.recording import Recording, search_settings
from zftune.tuner.search import Search, SearchOptions
from zftune.tuner.space import TRAJECTORY_KNOBS, Forecast, Forecaster, Setting, Space, space_for, unsearched
from zftune.tuner.states import LEARNING_RATE
from zftune.tuner.training_info import SINGLE_RANK, Reader, TrainingFacts, TuneRequest, WarmupStats, WorldInfo
from zftune.words import shares

if TYPE_CHECKING:
    from zftune.store.store import Store


Make = Callable[[Setting, SearchOptions], Search]
"""Makes the search that begins from a setting."""
_KEPT = ("select_interval", "deferred_update")  # no search changes them: they stay as the user has them


_LOWER_RATIOS = (0.4, 0.6, 0.8, 0.9)
_FEW_CORES = 4  # fewer usable cores leave no choice of threads


@dataclass(frozen=True, slots=True)
class Prepared:
    """A search that can begin, or go on."""

    search: Search
    recording: Recording | None
    """None: nothing is remembered."""
    sentence: str = ""
    """Where it begins from; "": the user's own knobs."""
    resumed: bool = False
    """Whether it goes on with an earlier run, whose best settings so far hold."""
    paused: bool = False
    """Whether somebody paused it in an earlier life."""

    @property
    def recorder(self) -> StoreRecorder | None:
        """What writes it down; None: nothing does."""
        return None if self.recording is None else self.recording.recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """The request for a search.

    Args:
        ratios: for presets of other machines; None: none of these.
        least_ratio: offload ratio at least: a lower one takes more GPU memory.
        fresh: neither preset nor earlier run.
        run_id: of the training that asks: where the store has it, its search was ended, and goes on whatever else is
            wanted; else a run that begins is called so.
        learning_rate: of the training, at its highest; None: not known.
        begins_anew: whether the training goes on from no saved state.
        unsearched: what the user's knobs set besides.
    """

    own: Setting
    space: Space
    options: SearchOptions
    ratios: Ratios | None = None
    least_ratio: float = 0.0
    fresh: bool = False
    run_id: str | None = None
    learning_rate: float | None = None
    begins_anew: bool = False
    unsearched: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Choice:
    """What a preset is good for."""

    sentence: str
    start: Setting | None = None
    """To begin from."""
    candidate: Setting | None = None
    """To be compared before it is trusted."""


def begin(recording: Recording | None, wanted: SearchRequest, make: Make) -> Prepared:
    """Begin a search, or resume an unfinished one; `make` is called again if an earlier one cannot be resumed.

    `recording` is None if there is no store.
    """
    own = wanted.own if wanted.space.violation(wanted.own) is None else wanted.space.base
    if recording is None:
        return Prepared(make(own, wanted.options), None)
    recording.ratios = wanted.ratios
    again = None if wanted.run_id is None else recording.known(wanted.run_id)
    wanted = replace(wanted, options=replace(wanted.options, barred=recording.barred()))
    resumed = _resumed(again, recording, wanted, make)
    if resumed is not None:
        return resumed
    others = "" if wanted.fresh else recording.why_new()
    match = None if wanted.fresh else recording.preset()
    choice = _Choice("") if match is None else _choice(match, wanted)
    search = make(choice.start or own, wanted.options)
    if choice.candidate is not None:
        search.suggest(choice.candidate, "preset")
    setting = choice.start or choice.candidate
    stake = None if match is None or setting is None or match.distance else (match.preset.name, setting)
    recording.begin(
        search, wanted.own.knobs(), stake=stake, learning_rate=wanted.learning_rate, run_id=wanted.run_id,
        unsearched=wanted.unsearched,
    )  # fmt: skip
    return Prepared(search, recording, f"{others} {choice.sentence}".strip())


def _resumed(again: RunRecord | None, recording: Recording, wanted: SearchRequest, make: Make) -> Prepared | None:
    """The run that lives, else the newest of the same search, if it was not finished."""
    run = again
    if run is None and not wanted.fresh:
        run = recording.unfinished(wanted.own.knobs(), search_settings(wanted.options, wanted.space))
    start = None if run is None else recording.began_from(run)
    if run is None or start is None:
        return None
    search = make(start, wanted.options)
    is_another = again is None and wanted.begins_anew
    recorder = recording.resume(run, search, wanted.learning_rate, is_another=is_another)
    if recorder is None:
        return None
    new = search.notes[recorder.earlier_notes :]
    rate = next((note.reason for note in reversed(new) if LEARNING_RATE in note.details), "")
    earlier = ""
    if again is None:
        own = wanted.own if wanted.begins_anew or rate else None
        earlier = recording.bound(search, wanted.space, own)
    made = search.measurements
    kept = f": {made} measurement{' is' if made == 1 else 's are'} kept" if made else ""
    anew = " (--fresh, or fresh=True of zftune.attach, begins anew)"
    more = anew if again is None else ""  # the training itself goes on
    told = (f"Goes on with run {run.run_id[:8]}{kept}{more}.", rate, earlier)
    return Prepared(search, recording, " ".join(filter(None, told)), resumed=True)


def _choice(match: Match, wanted: SearchRequest) -> _Choice:
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
        reason = match.reason if match.provisional else f"preset {preset.name} was measured with other fixed settings"
        return _Choice(f"Looks at a preset first: {reason}.", candidate=setting)
    gain, noise = preset.evidence.gain, preset.evidence.gain_error
    known = f"about {100 * gain:.2g}%" if noise is None else shares(gain, noise)
    saved = f"where it saved {known}" if gain > 0 else "as the best there"
    return _Choice(f"Begins from preset {preset.name}, measured for this model on this hardware, {saved}.", setting)


def _whole(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """A preset's knobs; where a window is given without its lag, the lag is the whole window."""
    return {**({"apply_lag": None} if "update_interval" in knobs else {}), **knobs}


def _refusal(setting: Setting, wanted: SearchRequest) -> str | None:
    """Why a preset's setting must not run here, or None."""
    space = wanted.space
    violation = space.violation(setting)
    fixed = space.fixed_because if space.quality != "exact" else ""
    barred = next((one.kind for one in wanted.options.barred if one.setting == setting), None)
    if barred is not None:
        return messages.BARRED[barred]
    if violation is not None:
        return violation.reason
    if fixed and any(getattr(setting, name) != getattr(wanted.own, name) for name in TRAJECTORY_KNOBS):
        return fixed
    if setting.offload_ratio < wanted.least_ratio:
        return (
            f"its offload_ratio {setting.offload_ratio:g} takes GPU memory: --tune-memory (tune_memory=True) allows it"
        )
    return None


@dataclass(frozen=True, slots=True)
class NoForecast:
    """Replaces the planner if nothing can be predicted: every setting takes `step_ms` until it is measured.

    Args:
        has_memory: whether there is device memory that others may need more of.
    """

    step_ms: float
    start: Setting
    has_memory: bool

    def __call__(self, setting: Setting) -> Forecast:
        """The prediction for a setting."""
        more = setting.topk_ratio > self.start.topk_ratio or setting.offload_ratio < self.start.offload_ratio
        if self.has_memory and more:
            return Forecast(self.step_ms, excess=1.0, reason="it needs more GPU memory, by an unknown amount")
        return Forecast(self.step_ms)


class Preparation:
    """Makes a search in the process that trains; made before training begins (see `zftune.tuner.training_info.Reader`).

    Args:
        store: gives the open store, in the thread that prepares; None: nothing is remembered.
        name: of the model; None: that of its class.
    """

    def __init__(
        self,
        optimizer: ZenFlowOptimizer,
        wishes: TuneRequest,
        store: Callable[[], Store] | None,
        company: WorldInfo = SINGLE_RANK,
        name: str | None = None,
    ) -> None:
        self.reader = Reader(optimizer, wishes, remembered=store is not None, company=company, name=name)
        self._store = store

    @property
    def notices(self) -> list[str]:
        """Sentences: what could not be had."""
        return self.reader.notices

    def prepare(self, seen: WarmupStats) -> Prepared:
        """Make the search from the warm-up; may be called from any thread."""
        store = None if self._store is None else self._store()
        return prepare(self.reader.facts(seen), store, self.notices)


def prepare(
    facts: TrainingFacts,
    store: Store | None,
    notices: list[str],
    run_id: str | None = None,
) -> Prepared:
    """Make the search of a training, in its process or in the daemon.

    `notices` takes sentences about what is missing; `run_id` names a training that may have been tuned before; None: a
    new run gets some name.
    """
    wishes, base = facts.wishes, Setting.of(facts.config)
    space = space_for(
        base, wishes.quality, coverage=facts.coverage or assumed_coverage, has_loss=facts.has_loss,
        threads=thread_choices(_usable_cores() if facts.here is None else facts.here.usable_cores),
        offload_ratios=ratio_choices(base, tune_memory=wishes.tune_memory),
        zenflow_section=not base.synchronous,  # else nothing could come late in "published"
        movement_percent=facts.movement_percent, movement_rate=facts.movement_rate,
    )  # fmt: skip
    forecast = _forecast(facts, base, notices)
    rates = forecast.rates if isinstance(forecast, PlannerForecast) else None

    def make(start: Setting, options: SearchOptions) -> Search:
        least = 0.0 if wishes.tune_memory else start.offload_ratio
        planning = None
        if isinstance(forecast, PlannerForecast):
            planning = Planning(forecast, space, least)
        planned = () if planning is None else planning.planned()[:1]
        search = Search(space, start, forecast, planned, options, planning)
        search.book.device_limit_bytes = facts.device_limit_bytes
        return search

    recording = None
    if store is not None and facts.run is not None:
        recording = Recording(store, facts.run, wishes.quality, facts.here)
    wanted = SearchRequest(
        own=base, space=space, options=wishes.search, fresh=wishes.fresh,
        least_ratio=0.0 if wishes.tune_memory else base.offload_ratio,
        ratios=None if rates is None else ratios_of(facts.load, rates), run_id=run_id,
        learning_rate=facts.learning_rate, begins_anew=facts.begins_anew, unsearched=unsearched(facts.config),
    )  # fmt: skip
    prepared = begin(recording, wanted, make)
    notices.extend(_of_lateness(space, base, prepared))
    return prepared


def _of_lateness(space: Space, base: Setting, prepared: Prepared) -> Iterator[str]:
    """What is to be told of the bound on lateness, and of what the search begins from because of it."""
    if space.quality == "exact":
        return
    if space.fixed_because:
        yield f"Settings that change the trajectory stay: {space.fixed_because}."
        return
    if space.movement_percent is None:
        yield (
            "How far the weights move in a step is not known yet: until a measurement tells it, late updates are "
            "bounded by their lateness, not by the loss that they may cost."
        )
        return
    begins_earlier = not prepared.resumed and prepared.search.book.incumbent.setting == space.base
    if begins_earlier and (violation := space.violation(base)) is not None:
        yield f"Begins from {space.base} instead of {base.differences(space.base)}: {violation.reason}."


@dataclass(slots=True)
class Planning:
    """The planner, to be asked again; the forecast is of the machine at the beginning."""

    forecast: PlannerForecast
    space: Space
    least_ratio: float

    def learn(self, before: Pace | None, now: Pace) -> None:
        """Take in by how much the machine's rates have changed."""
        self.forecast = replace(self.forecast, rates=changed(self.forecast.rates, before, now))

    def planned(self) -> Sequence[Setting]:
        """The planner's own choices, best first."""
        return self.forecast.planned(self.space, least_ratio=self.least_ratio)


def _forecast(facts: TrainingFacts, start: Setting, notices: list[str]) -> Forecaster:
    model, machine, wishes = facts.model, facts.machine, facts.wishes
    if machine is None:
        notices.append(messages.NOT_PREDICTED)
        return NoForecast(facts.step_ms or 1.0, start, facts.has_memory)
    measured_ms = facts.compute_ms if facts.rig is None else 0.0
    job = Job(seq=wishes.sequence or 1, micro_batch=wishes.micro_batch or 1, compute_ms=measured_ms or None)
    return forecast_for(model, machine, job, facts.config, company=facts.company, rig=facts.rig)


def _usable_cores() -> float | None:
    """Of this process."""
    from zftune.telemetry import hardware

    cores: float | None = hardware()["usable_cores"]
    return cores


def thread_choices(usable_cores: float | None) -> tuple[int, ...]:
    """Choices for the host engine's threads; none: they stay."""
    cores = int(usable_cores or 1)
    return tuple(sorted({cores // 4, cores // 2, 3 * cores // 4})) if cores >= _FEW_CORES else ()


def ratio_choices(base: Setting, *, tune_memory: bool) -> list[float]:
    """Choices for `offload_ratio`: a lower one takes more GPU memory, and needs `tune_memory`."""
    lower = _LOWER_RATIOS if tune_memory else ()
    return sorted({*(ratio for ratio in (*lower, 1.0) if ratio > base.offload_ratio or lower), base.offload_ratio})
