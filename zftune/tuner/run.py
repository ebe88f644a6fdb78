"""`zftune tune` on the built-in workload: train it, search while it trains, and say what was found."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zenflow import ZenFlowConfig, ZenFlowError
from zftune.errors import BadInputError, ProfileError
from zftune.planner.directory import facts_of_module
from zftune.planner.facts import Job, Machine
from zftune.planner.rates import Rates
from zftune.profile.measure import Task
from zftune.profile.run import DTYPES, ProfileOptions, read_config, task_of
from zftune.store.types import Quality
from zftune.tuner.builtin import Training
from zftune.tuner.document import build_document
from zftune.tuner.forecast import PlannerForecast, measured_coverage, rig_machine
from zftune.tuner.guard import LossGuard
from zftune.tuner.live import LiveSearch
from zftune.tuner.recording import Recording
from zftune.tuner.search import Search, SearchOptions
from zftune.tuner.settings import Setting
from zftune.tuner.space import QUALITIES, Coverage, Space, space_for

if TYPE_CHECKING:
    from zftune.store.store import Store

_WINDOW = 4  # S where the configuration leaves it to the runtime
_WARM_UP_STEPS = 8
_LONGEST_WARM_UP = 32
_WHOLE_NUMBERS = 4  # usable cores below which threads are no choice

OnStep = Callable[[int, "Search | None"], None]
"""Told after each step: steps done, and the search once it has begun."""


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
    seed: int = 0
    dtype: str = "bf16"
    micro_batch: int | None = None
    sequence: int | None = None
    search: SearchOptions = field(default_factory=SearchOptions)
    tune_memory: bool = False
    """Whether `offload_ratio` may be lowered, which takes GPU memory."""


def tune(options: TuneOptions, on_step: OnStep, store: Store | None = None) -> dict[str, Any]:
    """Train, search, and return the document.

    Ctrl-C ends it early: the document then holds what was found so far and says so.

    Args:
        options: what was asked for.
        on_step: told after each step.
        store: where it is written down; None: nowhere.

    Raises:
        BadInputError: an option is not allowed; before any training.
        ProfileError: the runtime failed, or refused the model.
    """
    quality, config, sectioned = _start(options)
    if options.steps < 1:
        raise BadInputError(f"--steps {options.steps}: allowed is an integer >= 1")
    task, device_name = task_of(
        ProfileOptions(
            config=config, model=options.model, text=options.text, dtype=options.dtype, seed=options.seed,
            micro_batch=options.micro_batch, sequence=options.sequence, rig=options.rig,
        )
    )  # fmt: skip
    if task.rig is None and task.torch_device.type == "cpu":
        raise BadInputError("--rig 'none': allowed only with a GPU, without one there is nothing to offload from")
    run = TunedRun(options, task, config, quality, sectioned)
    try:
        with Training(task, config) as training:
            run.train(training, on_step, store)
            return build_document(run, training, device_name)
    except ZenFlowError as error:
        raise ProfileError(str(error)) from error


class TunedRun:
    """One tuned training; what the document is made from."""

    def __init__(
        self, options: TuneOptions, task: Task, config: ZenFlowConfig, quality: Quality, sectioned: bool
    ) -> None:
        self.options, self.task, self.config, self.quality = options, task, config, quality
        self.coverage_source = ""
        self.search: Search | None = None
        self.steps = 0
        self.interrupted = False
        self.overhead_s = 0.0
        self.notices: list[str] = []
        self._sectioned = sectioned

    def train(self, training: Training, on_step: OnStep, store: Store | None) -> None:
        """Take steps until the search is over, the steps are used up, or the user has had enough."""
        recording = None if store is None else Recording(store, training, self.quality)
        try:
            self._warm_up(training, on_step)
            self.search = self._make_search(training, () if recording is None else recording.crashed())
            live = LiveSearch(
                training.optimizer,
                self.search,
                tokens=training.tokens,
                recorder=None if recording is None else recording.begin(self.search, self.config),
                disturbance=training.disturbance(),
                guard=LossGuard(),
            )
            self._tune(training, live, on_step)
        except KeyboardInterrupt:
            self.interrupted = True
            if self.search is not None:
                self.search.stop("Interrupted.")
        if recording is not None:
            if self.search is not None:
                recording.finish(self.search)
            self.notices += recording.notices

    def _tune(self, training: Training, live: LiveSearch, on_step: OnStep) -> None:
        going = True
        while going and self.steps < self.options.steps:
            loss = training.step()
            self.steps += 1
            going = live.on_step(loss)
            self.overhead_s = live.overhead_s
            on_step(self.steps, self.search)
        if going:
            live.search.stop(f"All {self.options.steps} steps are done.")

    def _warm_up(self, training: Training, on_step: OnStep) -> None:
        """First steps are slow, and coverage is not known before the first selection."""
        every = self.config.select_interval
        second = 0 if every == "auto" else min(every + 1, _LONGEST_WARM_UP)  # the first one sees untrained weights
        steps = min(max(_WARM_UP_STEPS, 2 * self.config.longest_window, second), self.options.steps)
        while self.steps < steps:
            training.step()
            self.steps += 1
            on_step(self.steps, None)

    def _make_search(self, training: Training, crashed: tuple[Setting, ...]) -> Search:
        curves = [one.coverage_curve for one in training.optimizer.history() if one.coverage_curve is not None]
        coverage, self.coverage_source = measured_coverage(curves)
        space = self._space(coverage)
        start = Setting.of(self.config)
        if space.violation(start) is not None:
            start = space.base
        forecast = _forecast(training, self.config)
        least = 0.0 if self.options.tune_memory else start.offload_ratio
        planned = forecast.planned(space, least_ratio=least)[:1]
        options, notes = with_sampler(self.options.search)
        self.notices += notes
        return Search(space, start, forecast, planned, replace(options, crashed=crashed))

    def _space(self, coverage: Coverage) -> Space:
        base = Setting.of(self.config)
        lower = () if not self.options.tune_memory else (0.4, 0.6, 0.8, 0.9)
        ratios = sorted(
            {*(ratio for ratio in (*lower, 1.0) if ratio > base.offload_ratio or lower), base.offload_ratio}
        )
        return space_for(
            base,
            self.quality,
            coverage=coverage,
            threads=_threads(),
            offload_ratios=ratios,
            zenflow_section=self._sectioned,
        )


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
    if config.update_interval == "auto":
        config = replace(config, update_interval=_WINDOW, apply_lag=None)
    if config.full_warm_up_rounds:
        config = replace(config, full_warm_up_rounds=0)  # a search begins with steps that are like all others
    return quality, config, sectioned


def _has_section(path: Path) -> bool:
    zero = json.loads(path.read_text(encoding="utf-8")).get("zero_optimization") or {}
    return bool(zero.get("zenflow"))


def _threads() -> tuple[int, ...]:
    """Choices for the host engine's threads."""
    from zftune.telemetry import hardware

    cores = int(hardware()["usable_cores"] or 1)
    return tuple(sorted({cores // 4, cores // 2, 3 * cores // 4})) if cores >= _WHOLE_NUMBERS else ()


def _forecast(training: Training, config: ZenFlowConfig) -> PlannerForecast:
    """The planner for this training; on a GPU the machine is measured first."""
    task, rig = training.task, training.rig
    model = facts_of_module(training.workload.name, training.workload.module, _dtype_name(task.dtype))
    job = Job(seq=task.sequence, micro_batch=task.micro_batch)
    if rig is not None:
        return PlannerForecast(model, rig_machine(rig), job, Rates.of_rig(rig, model.element_bytes), config)
    machine = Machine.here()
    return PlannerForecast(model, machine, job, Rates.of(model, machine, job), config)


def _dtype_name(dtype: torch.dtype) -> str:
    return next(name for name, known in DTYPES.items() if known is dtype)
