"""`zftune tune` on the built-in workload: train it, search while it trains, and say what was found."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zenflow import ZenFlowConfig, ZenFlowError
from zftune.errors import BadInputError, ProfileError
from zftune.planner.directory import facts_of_module
from zftune.planner.facts import Job, Machine
from zftune.profile.companions import several_ranks
from zftune.profile.measure import Task
from zftune.profile.run import DTYPES, ProfileOptions, read_config, task_of
from zftune.store.types import Quality
from zftune.tuner.beginning import Wanted, begin
from zftune.tuner.builtin import Training
from zftune.tuner.disturbances import disturbance_of
from zftune.tuner.document import build_document
from zftune.tuner.forecast import PlannerForecast, forecast_for, measured_coverage, rig_machine
from zftune.tuner.guard import LossGuard
from zftune.tuner.live import LiveSearch, Recorder
from zftune.tuner.preparing import ratio_choices, thread_choices
from zftune.tuner.ranks.follower import Follower
from zftune.tuner.ratios import measured_ratios
from zftune.tuner.recording import Recording, RunFacts
from zftune.tuner.search import Search, SearchOptions
from zftune.tuner.settings import Setting
from zftune.tuner.space import QUALITIES, QUALITY_WORDS, Coverage, Space, space_for
from zftune.tuner.thinker import Thinker, ThinkerError
from zftune.tuner.thinking import ThreadDesk
from zftune.tuner.windows import counted, warm_up_steps

if TYPE_CHECKING:
    from zftune.store.store import Store

OnStep = Callable[[int, "Search | None"], None]
"""Told after each step: steps done, and the search once it has begun."""
Say = Callable[[str], None]
"""Told sentences for the user, before and while it trains."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneOptions:
    """What the command line asks for; None means that it follows from the device or the configuration."""

    config: str | None = None
    """Path of a ds_config."""
    quality: str | None = None
    steps: int = 2000
    """Training steps at most."""
    model: str | None = None
    text: str | None = None
    rig: str | None = None
    ranks: int = 1
    """Each on a rig of its own, with its rows of the model (FSDP2)."""
    real_time: bool = False
    """Whether a rig pads real work by the machine's clock, and does not simulate time."""
    seed: int = 0
    dtype: str = "bf16"
    micro_batch: int | None = None
    sequence: int | None = None
    search: SearchOptions = field(default_factory=SearchOptions)
    tune_memory: bool = False
    """Whether `offload_ratio` may be lowered, which takes GPU memory."""
    fresh: bool = False
    """Neither a preset nor an earlier run."""


def tune(options: TuneOptions, on_step: OnStep, store: Store | None = None, say: Say | None = None) -> dict[str, Any]:
    """Train, search, and return the document.

    Ctrl-C ends it early: the document then holds what was found so far and says so.

    Args:
        options: what was asked for.
        on_step: told after each step.
        store: where it is written down; None: nowhere.
        say: told where the search begins from.

    Raises:
        BadInputError: an option is not allowed; before any training.
        ProfileError: the runtime failed, or refused the model.
    """
    quality, config, sectioned = _start(options)
    if options.steps < 1:
        raise BadInputError(f"--steps {options.steps}: allowed is an integer >= 1")
    task, device_name = _task_of(options, config)
    if task.rig is None and task.torch_device.type == "cpu":
        raise BadInputError("--rig 'none': allowed only with a GPU, without one there is nothing to offload from")
    run = TunedRun(options, task, config, quality, sectioned)
    try:
        with (
            several_ranks(options.ranks, partial(_train_beside, options, config)),
            Training(task, config) as training,
        ):
            run.train(training, on_step, say or _silent, store)
            return build_document(run, training, device_name)
    except ZenFlowError as error:
        raise ProfileError(str(error)) from error


def _task_of(options: TuneOptions, config: ZenFlowConfig) -> tuple[Task, str]:
    return task_of(
        ProfileOptions(
            config=config, model=options.model, text=options.text, dtype=options.dtype, seed=options.seed,
            micro_batch=options.micro_batch, sequence=options.sequence, rig=options.rig, ranks=options.ranks,
            real_time=options.real_time,
        )
    )  # fmt: skip


def _train_beside(options: TuneOptions, config: ZenFlowConfig, rank: int) -> None:
    """What another rank than the first does: train until that one needs it no more."""
    task = replace(_task_of(options, config)[0], rank=rank)
    with Training(task, config) as training:
        assert training.accord is not None
        with Follower(training.optimizer, training.accord) as follower:
            while not training.accord.over:
                follower.log_loss(training.step())


class TunedRun:
    """One tuned training; what the document is made from."""

    def __init__(
        self, options: TuneOptions, task: Task, config: ZenFlowConfig, quality: Quality, sectioned: bool
    ) -> None:
        self.options, self.task, self.config, self.quality = options, task, config, quality
        self.coverage_source = ""
        self.origin = ""
        """Where the search begins from, in a sentence; "": the user's own knobs."""
        self.search: Search | None = None
        self.steps = 0
        self.interrupted = False
        self.overhead_s = 0.0
        self.notices: list[str] = []
        self.run_id: str | None = None
        """In the store."""
        self._sectioned = sectioned

    def train(self, training: Training, on_step: OnStep, say: Say, store: Store | None) -> None:
        """Take steps until the search is over, the steps are used up, or the user has had enough."""
        recording = None if store is None else Recording(store, facts_of(training), self.quality)
        over = False
        self._thinker = Thinker(gives_way=not training.device.clock.simulated)
        say(f"Quality {QUALITY_WORDS[self.quality]}.")
        try:
            self._start_thinker()  # it loads while the warm-up lasts
            self._warm_up(training, on_step)
            recorder = self._begin(training, recording, say)
            over = self._tune(training, recorder, on_step)
        except KeyboardInterrupt:
            self.interrupted = True
            if self.search is not None:
                self.search.stop("Interrupted.")
        finally:
            self._thinker.close()
        if recording is not None:
            if self.search is not None:
                recording.finish(self.search, unfinished=not over)
            self.notices += recording.notices

    def _tune(self, training: Training, recorder: Recorder | None, on_step: OnStep) -> bool:
        """Search while it trains; whether the search came to its end."""
        assert self.search is not None
        disturbance = disturbance_of(training.device)
        live = LiveSearch(
            training.optimizer, self.search, tokens=training.tokens, recorder=recorder, disturbance=disturbance,
            guard=LossGuard(), desk=partial(ThreadDesk, thinker=self._thinker, clock=training.device.clock),
            changes=training.accord,
        )  # fmt: skip
        going = True
        try:
            while going and self.steps < self.options.steps:
                loss = training.step()
                self.steps += 1
                going = live.on_step(loss)
                self.overhead_s = live.overhead_s
                on_step(self.steps, self.search)
        finally:
            live.close()
            disturbance.close()
        if going:
            live.stop(f"All {self.options.steps} steps are done.")
        return not going

    def _warm_up(self, training: Training, on_step: OnStep) -> None:
        steps = min(warm_up_steps(self.config), self.options.steps)
        while self.steps < steps:
            training.step()
            self.steps += 1
            on_step(self.steps, None)

    def _begin(self, training: Training, recording: Recording | None, say: Say) -> Recorder | None:
        """Make the search, from what is known of earlier ones."""
        history, own = training.optimizer.history(), Setting.of(self.config)
        curves = [one.coverage_curve for one in history if one.coverage_curve is not None]
        coverage, self.coverage_source = measured_coverage(curves, (self.config.topk_ratio,))
        space = self._space(coverage)
        forecast = _forecast(training, self.config)
        options, notes = with_sampler(self.options.search)
        self.notices += notes
        wanted = Wanted(
            own=own, space=space, options=options, fresh=self.options.fresh,
            ratios=measured_ratios(history, training.workload.module, forecast.rates),
            least_ratio=0.0 if self.options.tune_memory else own.offload_ratio,
        )  # fmt: skip

        def make(start: Setting, options: SearchOptions) -> Search:
            planned = forecast.planned(space, least_ratio=0.0 if self.options.tune_memory else start.offload_ratio)
            return Search(space, start, forecast, planned[:1], options)

        begun = begin(recording, wanted, make)
        self.search, self.origin = begun.search, begun.sentence
        if begun.sentence:
            say(begun.sentence)
        if recording is not None and recording.recorder is not None:
            self.run_id = recording.recorder.run_id
        return begun.recorder

    def _start_thinker(self) -> None:
        if self.options.search.sampler in ("gp", "tpe"):
            try:
                self._thinker.start()
            except ThinkerError as error:
                self.notices.append(f"{error}.")

    def _space(self, coverage: Coverage) -> Space:
        from zftune.telemetry import hardware

        base = Setting.of(self.config)
        return space_for(
            base,
            self.quality,
            coverage=coverage,
            threads=thread_choices(hardware()["usable_cores"]),
            offload_ratios=ratio_choices(base, tune_memory=self.options.tune_memory),
            zenflow_section=self._sectioned,
        )


def _silent(_: str) -> None:
    """Nobody listens."""


def with_sampler(search: SearchOptions) -> tuple[SearchOptions, list[str]]:
    """A search's options, with TPE where GP is wanted and its dependency is missing; and what to say about it."""
    if search.sampler != "gp" or importlib.util.find_spec("scipy") is not None:
        return search, []
    return replace(search, sampler="tpe"), ["scipy is not installed, which the sampler gp needs: tpe takes its place."]


def _start(options: TuneOptions) -> tuple[Quality, ZenFlowConfig, bool]:
    """The quality, the knobs to begin with, and whether these have a `zenflow` section of the user's."""
    config = read_config(options.config, {})
    sectioned = options.config is not None and _has_section(Path(options.config))
    asked = options.quality or ("published" if options.config is None or sectioned else "exact")
    if asked not in QUALITIES:
        raise BadInputError(f"--quality '{asked}': allowed are {', '.join(QUALITIES)}")
    quality: Quality = next(one for one in QUALITIES if one == asked)
    config = counted(config)
    if config.full_warm_up_rounds:
        config = replace(config, full_warm_up_rounds=0)  # a search begins with steps that are like all others
    return quality, config, sectioned


def _has_section(path: Path) -> bool:
    zero = json.loads(path.read_text(encoding="utf-8")).get("zero_optimization") or {}
    return bool(zero.get("zenflow"))


def _forecast(training: Training, config: ZenFlowConfig) -> PlannerForecast:
    """The planner for this training; on a GPU the machine is measured first."""
    task, rig = training.task, training.rig
    model = facts_of_module(training.workload.name, training.workload.module, _dtype_name(task.dtype))
    job = Job(seq=task.sequence, micro_batch=task.micro_batch)
    machine = Machine.here() if rig is None else rig_machine(rig)
    return forecast_for(model, machine, job, config, company=training.company, rig=rig)


def facts_of(training: Training) -> RunFacts:
    """What the store is told of a built-in training."""
    task, workload, rig = training.task, training.workload, training.rig
    return RunFacts.of(
        workload.module, workload.dtype, micro_batch=task.micro_batch, sequence=task.sequence, name=workload.name,
        rig=None if rig is None else rig.name, world_size=training.company.ranks, shards=training.company.shards,
    )  # fmt: skip


def _dtype_name(dtype: torch.dtype) -> str:
    return next(name for name, known in DTYPES.items() if known is dtype)
