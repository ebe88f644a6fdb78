"""From an optimizer that trains to a search over its knobs: the model, the machine, the space, and earlier runs.

`TrainingFacts` are all that a search is made from, by value; `Reader` reads them in the process that trains, `prepare`
makes the search there or in the daemon.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zenflow import ConfigError, StepStats, ZenFlowConfig
from zenflow.optimizer import ZenFlowOptimizer
from zenflow.sharded import ranks_with_rows
from zftune import quality
from zftune.emulation import EmulatedAccelerator, Rig
from zftune.errors import BadInputError, ZftuneError, noting
from zftune.planner.choosing import HEADROOM, LEAST_HEADROOM_BYTES, choose, limits
from zftune.planner.closed_form import predict
from zftune.planner.machine import rig_machine
from zftune.planner.memory import state_bytes
from zftune.planner.model import Job, Machine, ModelFacts
from zftune.planner.rates import Rates
from zftune.quality import MeasuredCoverage, assumed_coverage
from zftune.store.types import Key, Match, Model, Quality, Ratios, RunRecord
from zftune.tuner import messages
from zftune.tuner.pace import Pace, busy_ms, changed, ratios_of
from zftune.tuner.record import MachineInfo, Recording, StoreRecorder, search_settings, trained_model
from zftune.tuner.search import Search, SearchOptions
from zftune.tuner.space import (
    OFFLOAD_RATIOS,
    TOPK_RATIOS,
    TRAJECTORY_KNOBS,
    Forecast,
    Forecaster,
    Setting,
    Space,
    space_for,
    unsearched,
)
from zftune.tuner.states import LEARNING_RATE
from zftune.words import shares

if TYPE_CHECKING:
    from zftune.store.store import Store

Make = Callable[[Setting, SearchOptions], Search]
_KEPT = ("select_interval", "deferred_update")  # no search changes them: they stay as the user has them
_KNOTS = (0.005, 0.015, 0.03, 0.075, 0.25, 0.5, 0.6, 0.75, 1.0)
_FEW_CORES = 4  # fewer usable cores leave no choice of threads
_logger = logging.getLogger("zftune")


@dataclass(frozen=True, slots=True)
class WorldInfo:
    """The ranks that train one model; those that are `here` share one machine's cores."""

    ranks: int = 1
    here: int = 1
    nodes: int = 1
    shards: int = 1
    """Ranks that share out the state of each weight by rows; 1: each has all of it."""
    keeps_whole: bool = False
    """Whether these have all of the weights all the same (`zenflow.Partition`)."""


SINGLE_RANK = WorldInfo()


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneRequest:
    """What the user asks for."""

    quality: Quality
    micro_batch: int = 0
    """Sequences of a rank's pass; 0: not known, as of `sequence`."""
    sequence: int = 0
    zero_stage: int = 0
    tune_memory: bool = False
    fresh: bool = False
    search: SearchOptions = field(default_factory=SearchOptions)


@dataclass(frozen=True, slots=True)
class WarmupStats:
    """What the warm-up showed."""

    config: ZenFlowConfig
    steps: tuple[StepStats, ...]
    has_loss: bool
    asked: ZenFlowConfig | None = None
    """By the user, where the training resumes from a saved state that had others; None: those in force."""
    begins_anew: bool = False

    @property
    def step_ms(self) -> float:
        """Of a step; 0: not known."""
        return statistics.median([one.step_ms for one in self.steps if one.step_ms] or [0.0])

    @property
    def compute_ms(self) -> float:
        """Of a step, without its waits because of offloading."""
        return statistics.median([busy_ms(one) for one in self.steps if one.step_ms] or [0.0])

    @property
    def coverage(self) -> MeasuredCoverage | None:
        """By the live model's selections, exact at its own ratio; None: none of them could be measured."""
        curves = [one.coverage_curve for one in self.steps]
        known = [curve for curve in curves if curve is not None and curve.at(1.0) is not None]
        if not known:
            return None
        knots = tuple(sorted({*TOPK_RATIOS, *_KNOTS, self.config.topk_ratio}))
        return MeasuredCoverage(knots, tuple(statistics.fmean(one.at(knot) or 0.0 for one in known) for knot in knots))

    @property
    def movement_percent(self) -> float | None:
        """How far a step moves the deferred weights, by the second half of it: an optimizer begins with long steps."""
        return quality.movement_percent(self.steps[len(self.steps) // 2 :])


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingFacts:
    """A training that warmed up."""

    wishes: TuneRequest
    key: Key | None
    """What runs and presets are kept by; None, as `trained` and `here`: nothing is remembered of it."""
    trained: Model | None
    here: MachineInfo | None
    config: ZenFlowConfig
    has_loss: bool
    step_ms: float
    """This and the next six as of `WarmupStats` and `Outcome`."""
    compute_ms: float
    coverage: MeasuredCoverage | None
    pace: Pace | None
    movement_percent: float | None = None
    movement_rate: float | None = None
    begins_anew: bool = False
    model: ModelFacts
    company: WorldInfo = SINGLE_RANK
    rig: Rig | None = None
    """None: no emulated accelerator."""
    machine: Machine | None = None
    """None: nothing can be predicted."""
    device_limit_bytes: int | None = None
    """Most that a live trial may take at the peak; None: there is no such memory."""
    learning_rate: float | None = None


class Reader:
    """Knows the model and the machine; made before training begins, since on a GPU it measures the machine.

    `remembered`: whether to read what a store keeps runs and presets by; `name` of the model: None is its class's.
    """

    def __init__(
        self,
        optimizer: ZenFlowOptimizer,
        wishes: TuneRequest,
        *,
        remembered: bool = True,
        company: WorldInfo = SINGLE_RANK,
        name: str | None = None,
    ) -> None:
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        self.module = optimizer.module or nn.ParameterList(parameters)
        self._groups = optimizer.param_groups
        self._rates = quality.rates(self._groups)
        self._name = name
        self.notices: list[str] = []
        self._dtype = parameters[0].dtype
        self._wishes, self._remembered, self._company = wishes, remembered, company
        device, self._partitioned = optimizer.device, optimizer.is_partitioned
        self._rig = device.rig if isinstance(device, EmulatedAccelerator) else None
        self._device_limit_bytes, self._machine = device_limit(optimizer), None
        if self._rig is not None:
            self._machine = rig_machine(self._rig)
        elif self._device_limit_bytes is not None:
            _logger.info("zftune measures this machine's links and memory; that takes some seconds.")
            try:
                with torch.cuda.device(device.torch_device):
                    self._machine = Machine.here()
            except (ZftuneError, RuntimeError, MemoryError) as error:
                self.notices.append(f"This machine could not be measured: {error}.")

    def facts(self, seen: WarmupStats) -> TrainingFacts:
        """Read them from the warm-up; may be called from any thread."""
        from zftune.telemetry.fingerprint import recomputes

        rig, wishes = self._rig, self._wishes
        # Only now: a model may be sharded, and its parameters be others, after its optimizer was made.
        shards = self._company.ranks if self._partitioned else ranks_with_rows(self._groups[0]["params"][0])
        company = replace(self._company, shards=shards, keeps_whole=self._partitioned)
        own, above, *others = (kind.__name__ for kind in type(self.module).__mro__)  # FSDP2 made another class of it
        name, key, trained, here = self._name or (others[0] if above == "FSDPModule" else own), None, None, None
        if self._remembered:
            here = MachineInfo.now(None if rig is None else rig.name)
            trained = trained_model(self.module, self._dtype, name)
            if company.here > 1 and here.usable_cores is not None:  # those that are this rank's
                here = replace(here, usable_cores=max(1.0, here.usable_cores // company.here))
            key = Key(
                model_id=trained.model_id, hw_id=here.hardware.hw_id, backend="zenflow", stage=wishes.zero_stage,
                dtype=trained.dtype or "unknown", world_size=company.ranks, nodes=company.nodes, shards=shards,
                micro_batch=wishes.micro_batch, sequence=wishes.sequence, checkpointing=recomputes(self.module),
                quality=wishes.quality,
            )  # fmt: skip
        return TrainingFacts(
            wishes=wishes,
            key=key,
            trained=trained,
            here=here,
            config=seen.asked or seen.config,
            has_loss=seen.has_loss,
            step_ms=seen.step_ms,
            compute_ms=seen.compute_ms,
            coverage=seen.coverage,
            pace=Pace.of(seen.steps),
            model=ModelFacts.from_module(name, self.module),
            company=company,
            rig=rig,
            machine=self._machine,
            device_limit_bytes=self._device_limit_bytes,
            movement_percent=quality.at_full_rate(seen.movement_percent, self._groups, self._rates),
            movement_rate=quality.rate_at_full(self._groups, self._rates),
            learning_rate=quality.highest_rate(self._groups),
            begins_anew=seen.begins_anew,
        )


def device_limit(optimizer: ZenFlowOptimizer) -> int | None:
    """Bytes of device memory that a live trial may reach; None where there is no such memory."""
    total = optimizer.device.total_bytes()
    return None if total is None else round(total - max(HEADROOM * total, LEAST_HEADROOM_BYTES))


@dataclass(frozen=True, slots=True)
class Prepared:
    """A search that can begin, or be resumed."""

    search: Search
    recording: Recording | None
    """None: nothing is remembered."""
    sentence: str = ""
    """Where it begins from; "": the user's own knobs."""
    resumed: bool = False
    """Whether it resumes an earlier run, whose best settings so far hold."""
    paused: bool = False
    """Whether somebody paused it in an earlier life."""

    @property
    def recorder(self) -> StoreRecorder | None:
        return None if self.recording is None else self.recording.recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """The request for a search; `ratios` are for presets of other machines, and an offload ratio below `least_ratio`
    takes more GPU memory.
    """

    own: Setting
    space: Space
    options: SearchOptions
    ratios: Ratios | None = None
    least_ratio: float = 0.0
    fresh: bool = False
    run_id: str | None = None
    """Of the training: where the store has it, its search is resumed; else a new run is called so."""
    learning_rate: float | None = None
    begins_anew: bool = False
    unsearched: Mapping[str, Any] = field(default_factory=dict)


def begin(recording: Recording | None, wanted: SearchRequest, make: Make) -> Prepared:
    """Begin a search, or resume an unfinished one; `recording` is None if there is no store."""
    own = wanted.own if wanted.space.violation(wanted.own) is None else wanted.space.base
    if recording is None:
        return Prepared(make(own, wanted.options), None)
    recording.ratios = wanted.ratios
    living = None if wanted.run_id is None else recording.living(wanted.run_id)
    wanted = replace(wanted, options=replace(wanted.options, barred=recording.barred()))
    resumed = _resumed(living, recording, wanted, make)
    if resumed is not None:
        return resumed
    match = None if wanted.fresh else recording.preset()
    setting, is_proven, sentence = (None, False, "") if match is None else _choice(match, wanted)
    search = make(setting if setting is not None and is_proven else own, wanted.options)
    if setting is not None and not is_proven:
        search.suggest(setting, "preset")
    stake = None if match is None or setting is None or match.distance else (match.preset.name, setting)
    recording.begin(
        search, wanted.own.knobs(), stake=stake, learning_rate=wanted.learning_rate, run_id=wanted.run_id,
        unsearched=wanted.unsearched,
    )  # fmt: skip
    return Prepared(search, recording, sentence)


def _resumed(living: RunRecord | None, recording: Recording, wanted: SearchRequest, make: Make) -> Prepared | None:
    """The run that lives, else the newest of the same search, if it was not finished."""
    run, is_another = living, living is None and wanted.begins_anew
    if run is None and not wanted.fresh:
        run = recording.unfinished(wanted.own.knobs(), search_settings(wanted.options, wanted.space))
    if run is None:
        return None
    search = recording.resume(
        run, lambda start: make(start, wanted.options), wanted.learning_rate, is_another=is_another
    )
    if search is None or recording.recorder is None:
        return None
    new = search.notes[recording.recorder.earlier_notes :]
    rate = next((messages.sentence(note) for note in reversed(new) if LEARNING_RATE in note.details), "")
    earlier = ""
    if living is None:
        _come_earlier(search, wanted, is_same_course=not (wanted.begins_anew or rate))
        with noting(recording.notices):
            recording.recorder.write(search)
        movements = (note for note in search.notes[recording.recorder.earlier_notes :] if note.kind == "movement")
        earlier = next(map(messages.sentence, movements), "")
    kept = f" with {messages.count(search.measurements, 'measurement')}" if search.measurements else ""
    more = " (--fresh, or fresh=True of zftune.attach, begins anew)" if living is None else ""
    told = (f"Resumes run {run.run_id[:8]}{kept}{more}.", rate, earlier)
    return Prepared(search, recording, " ".join(filter(None, told)), resumed=True)


def _come_earlier(search: Search, wanted: SearchRequest, *, is_same_course: bool) -> None:
    """Before a training continues with the best settings: its weights may move further than where they were found."""
    here, space, late, own = wanted.space, search.space, search.book.incumbent.setting, wanted.own
    if here.movement_percent is not None:
        search.space = space.moving(here.movement_percent, here.movement_rate)
        search.bound()
    elif not is_same_course and not space.fixed_because and space.cost(own) < space.cost(late):
        search.make_earlier(own, messages.NOT_KNOWN_YET)
        search.suggest(late, "planner")


def _choice(match: Match, wanted: SearchRequest) -> tuple[Setting | None, bool, str]:
    """The setting of a preset (None: it is not used), whether to begin from it rather than look at it, and why."""
    preset, own = match.preset, wanted.own
    # Where a window is given without its lag, the lag is the whole window.
    knobs = {**({"apply_lag": None} if "update_interval" in match.knobs else {}), **match.knobs}
    try:
        measured = Setting.of(replace(own.config(ZenFlowConfig()), **knobs))
    except (BadInputError, ConfigError, TypeError) as error:
        return None, False, f"Preset {preset.name} is not used: {error}."
    setting = replace(measured, **{name: getattr(own, name) for name in _KEPT})
    refused = _refusal(setting, wanted)
    if refused is not None:
        return None, False, f"Preset {preset.name} is not used: {refused}."
    if match.provisional or setting != measured:
        reason = match.reason if match.provisional else f"preset {preset.name} was measured with other fixed settings"
        return setting, False, f"Looks at a preset first: {reason}."
    gain, noise = preset.evidence.gain, preset.evidence.gain_error
    size = f"about {100 * gain:.2g}%" if noise is None else shares(gain, noise)
    saved = f"where it saved {size}" if gain > 0 else "as the best there"
    return setting, True, f"Begins from preset {preset.name}, measured for this model on this hardware, {saved}."


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
    memory = f"its offload_ratio {setting.offload_ratio:g} takes GPU memory: --tune-memory (tune_memory=True) allows it"
    return memory if setting.offload_ratio < wanted.least_ratio else None


@dataclass(frozen=True, slots=True)
class PlannerForecast:
    """Predictions for one model, machine and job; `counted`: device memory is only counted, as on an emulated
    accelerator, so that no allocator rounds it.
    """

    model: ModelFacts
    machine: Machine
    job: Job
    rates: Rates
    base: ZenFlowConfig
    counted: bool = False

    def __call__(self, setting: Setting) -> Forecast:
        config = setting.config(self.base)
        found = predict(self.model, self.machine, self.job, config, rates=self.rates)
        (device, host), memory = limits(self.machine), found.memory
        needs = memory.device_bytes / device, (memory.host_bytes + memory.migration_bytes) / host
        excess, place = max(zip(needs, ("GPU", "host"), strict=True))
        on_device = state_bytes(self.model, config, ranks=self.job.ranks) if self.counted else memory.device_bytes
        reason = f"it needs {excess:.2f} times the usable {place} memory" if excess > 1 else ""
        of_rank = memory.host_bytes // self.job.gpus
        return Forecast(found.step_ms, on_device, of_rank, max(0.0, excess - 1), reason)

    def planned(self, space: Space, *, least_ratio: float) -> list[Setting]:
        """The planner's choices within a space, best first; a lower offload ratio would take more GPU memory."""
        choices = choose(
            self.model, self.machine, self.job, budget=space.budget, coverage=space.coverage, rates=self.rates
        )
        own = {name: getattr(space.base, name) for name in (*_KEPT, "host_threads")}
        settings = (replace(Setting.of(config), **own) for config, _ in choices if config.offload_ratio >= least_ratio)
        return [setting for setting in dict.fromkeys(settings) if space.violation(setting) is None]


def forecast_for(
    model: ModelFacts, machine: Machine, job: Job, base: ZenFlowConfig, *, company: WorldInfo, rig: Rig | None = None
) -> PlannerForecast:
    """The planner for a training on one rank or several; each has a `rig` of its own, if any.

    Ranks that share weights by rows, or their state alone, are one job of the planner's, and have their part of what
    all ranks of a machine share. Where they share nothing, each is a job.
    """
    gpus = min(company.shards, company.here)
    job = replace(job, gpus=gpus, nodes=-(-company.shards // gpus), stage=2 if company.keeps_whole else 3)
    share = gpus / company.here
    machine = replace(
        machine,
        gpus=gpus,
        host_gbps=machine.host_gbps * share,
        host_update_gelements_s=machine.host_update_gelements_s * share,
        host_memory_bytes=int(machine.host_memory_bytes * share),
    )
    if rig is not None:
        replicas = company.ranks // company.shards if company.shards > 1 else 1
        rates = Rates.of_rig(rig, model.element_bytes, ranks=job.ranks, replicas=replicas, keeps_whole=job.keeps_whole)
        return PlannerForecast(model, machine, job, rates, base, counted=True)
    rates = Rates.of(model, machine, job)
    if job.compute_ms is not None:  # what was measured has the ranks' collectives in it
        rates = replace(rates, comm_gbps=None)
    return PlannerForecast(model, machine, job, rates, base)


@dataclass(frozen=True, slots=True)
class NoForecast:
    """Replaces the planner if nothing can be predicted: every setting takes `step_ms` until it is measured."""

    step_ms: float
    start: Setting
    has_memory: bool
    """Whether there is device memory that others may need more of."""

    def __call__(self, setting: Setting) -> Forecast:
        more = setting.topk_ratio > self.start.topk_ratio or setting.offload_ratio < self.start.offload_ratio
        why = "it needs more GPU memory, by an unknown amount" if self.has_memory and more else ""
        return Forecast(self.step_ms, excess=float(bool(why)), reason=why)


def prepare(facts: TrainingFacts, store: Store | None, run_id: str | None = None) -> Prepared:
    """Make the search of a training, in its process or in the daemon; `run_id`: as of `SearchRequest`."""
    from zftune.telemetry import hardware

    wishes, base = facts.wishes, Setting.of(facts.config)
    cores = int((hardware()["usable_cores"] if facts.here is None else facts.here.usable_cores) or 1)
    lower = OFFLOAD_RATIOS if wishes.tune_memory else ()  # they take more GPU memory
    space = space_for(
        base, wishes.quality, coverage=facts.coverage or assumed_coverage, has_loss=facts.has_loss,
        threads=sorted({cores // 4, cores // 2, 3 * cores // 4}) if cores >= _FEW_CORES else (),
        offload_ratios=sorted({*lower, 1.0, base.offload_ratio}),
        zenflow_section=not base.synchronous,  # else nothing could come late in "published"
        movement_percent=facts.movement_percent, movement_rate=facts.movement_rate, staggered=facts.config.staggers,
        guesses=facts.config.guesses,
    )  # fmt: skip
    forecast = _forecast(facts, base)
    planner = forecast if isinstance(forecast, PlannerForecast) else None

    def make(start: Setting, options: SearchOptions) -> Search:
        least = 0.0 if wishes.tune_memory else start.offload_ratio
        now_planner = planner

        def replan(before: Pace | None, now: Pace) -> tuple[Forecaster, Sequence[Setting]]:
            nonlocal now_planner
            assert now_planner is not None
            now_planner = replace(now_planner, rates=changed(now_planner.rates, before, now))
            return now_planner, now_planner.planned(space, least_ratio=least)

        planned = () if planner is None else planner.planned(space, least_ratio=least)[:1]
        search = Search(space, start, forecast, planned, options, None if planner is None else replan)
        search.device_limit_bytes = facts.device_limit_bytes
        return search

    recording = None
    if store is not None and facts.key is not None and facts.trained is not None and facts.here is not None:
        recording = Recording(store, facts.key, facts.trained, facts.here)
    wanted = SearchRequest(
        own=base, space=space, options=wishes.search, fresh=wishes.fresh,
        least_ratio=0.0 if wishes.tune_memory else base.offload_ratio,
        ratios=None if planner is None else ratios_of(facts.model, facts.pace, planner.rates), run_id=run_id,
        learning_rate=facts.learning_rate, begins_anew=facts.begins_anew, unsearched=unsearched(facts.config),
    )  # fmt: skip
    prepared = begin(recording, wanted, make)
    for text in ("" if planner is not None else messages.NOT_PREDICTED, "" if prepared.resumed else prepared.sentence):
        if text:
            prepared.search.remark(text)
    return prepared


def _forecast(facts: TrainingFacts, start: Setting) -> Forecaster:
    machine, wishes = facts.machine, facts.wishes
    if machine is None:
        return NoForecast(facts.step_ms or 1.0, start, facts.device_limit_bytes is not None)
    measured_ms = facts.compute_ms if facts.rig is None else 0.0
    job = Job(seq=wishes.sequence or 1, micro_batch=wishes.micro_batch or 1, compute_ms=measured_ms or None)
    return forecast_for(facts.model, machine, job, facts.config, company=facts.company, rig=facts.rig)
