"""From an optimizer that trains to a search over its knobs: the model, the machine, the space, and earlier runs."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from zenflow import EmulatedAccelerator, StepStats, ZenFlowConfig
from zenflow.optimizer import ZenFlowOptimizer
from zftune.errors import ZftuneError
from zftune.planner import Job, Machine, ModelFacts, Rates
from zftune.store.types import Quality
from zftune.tuner.beginning import Wanted, begin
from zftune.tuner.forecast import PlannerForecast, measured_coverage, rig_machine
from zftune.tuner.ratios import measured_ratios
from zftune.tuner.recording import Recording, RunFacts
from zftune.tuner.search import Search, SearchOptions
from zftune.tuner.settings import Setting
from zftune.tuner.space import Forecast, Forecaster, Space, space_for
from zftune.tuner.thinker import Thinker, ThinkerError

if TYPE_CHECKING:
    from zftune.store.store import Store
    from zftune.tuner.thinking import Recorder

_LOWER_RATIOS = (0.4, 0.6, 0.8, 0.9)
_FEW_CORES = 4  # fewer usable cores leave no choice of threads
_logger = logging.getLogger("zftune")


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """What the user asks for."""

    quality: Quality
    micro_batch: int = 1
    sequence: int = 1
    tune_memory: bool = False
    fresh: bool = False
    search: SearchOptions = field(default_factory=SearchOptions)


@dataclass(frozen=True, slots=True)
class Seen:
    """What the warm-up showed."""

    config: ZenFlowConfig
    steps: tuple[StepStats, ...]
    """The last ones."""
    has_loss: bool

    @property
    def step_ms(self) -> float:
        """Of a step."""
        return _median(one.step_ms for one in self.steps if one.step_ms)

    @property
    def compute_ms(self) -> float:
        """Of a step, without what it waited because of offloading."""
        return _median(one.step_ms - sum((one.stall_ms or {}).values()) for one in self.steps if one.step_ms)


@dataclass(frozen=True, slots=True)
class NoForecast:
    """Stands for the planner where nothing can be predicted: every setting takes as long as the first, until measured.

    Args:
        step_ms: of the first.
        start: the first.
        has_memory: whether there is device memory that others may need more of.
    """

    step_ms: float
    start: Setting
    has_memory: bool

    def __call__(self, setting: Setting) -> Forecast:
        """The prediction for a setting."""
        more = setting.topk_ratio > self.start.topk_ratio or setting.offload_ratio < self.start.offload_ratio
        if self.has_memory and more:
            return Forecast(self.step_ms, excess=1.0, reason="it needs more GPU memory, and nobody knows how much")
        return Forecast(self.step_ms)


@dataclass(slots=True)
class Prepared:
    """A search that can begin."""

    search: Search
    recording: Recording | None
    recorder: Recorder | None
    sentence: str
    """Where it begins from; "": the knobs that there are."""


class Preparation:
    """Knows the model and the machine; made before training begins, since on a GPU it measures the machine.

    Args:
        optimizer: that trains.
        wishes: of the user.
        store: open; None: nothing is remembered.
        thinker: where the planner works.
    """

    def __init__(self, optimizer: ZenFlowOptimizer, wishes: Wishes, store: Store | None, thinker: Thinker) -> None:
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        self.module = optimizer.module or nn.ParameterList(parameters)
        self.notices: list[str] = []
        self._dtype = parameters[0].dtype
        self._wishes, self._store, self._thinker = wishes, store, thinker
        device = optimizer.device
        self._rig = device.rig if isinstance(device, EmulatedAccelerator) else None
        self._has_memory = device.total_bytes() is not None
        self._machine = self._measured(device.torch_device) if self._has_memory else None

    def prepare(self, seen: Seen) -> Prepared:
        """Make the search; may be called from any thread.

        Args:
            seen: in the warm-up.
        """
        wishes, base = self._wishes, Setting.of(seen.config)
        curves = [one.coverage_curve for one in seen.steps if one.coverage_curve is not None]
        coverage, _ = measured_coverage(curves, (base.topk_ratio,))
        ratios = ratio_choices(base, tune_memory=wishes.tune_memory)
        space = space_for(
            base, wishes.quality, coverage=coverage, has_loss=seen.has_loss, threads=thread_choices(),
            offload_ratios=ratios,
        )  # fmt: skip
        forecast = self._forecast(seen, base)
        rates = forecast.rates if isinstance(forecast, PlannerForecast) else None

        def make(start: Setting, options: SearchOptions) -> Search:
            return Search(space, start, forecast, self._planned(forecast, space, start), options)

        recording = None if self._store is None else Recording(self._store, self._facts(), wishes.quality)
        wanted = Wanted(
            own=base, space=space, options=wishes.search, fresh=wishes.fresh,
            least_ratio=0.0 if wishes.tune_memory else base.offload_ratio,
            ratios=None if rates is None else measured_ratios(seen.steps, self.module, rates),
        )  # fmt: skip
        begun = begin(recording, wanted, make)
        return Prepared(begun.search, recording, begun.recorder, _in_python(begun.sentence))

    def _planned(self, forecast: Forecaster, space: Space, start: Setting) -> Sequence[Setting]:
        """The planner's own choice."""
        if not isinstance(forecast, PlannerForecast):
            return ()
        least = 0.0 if self._wishes.tune_memory else start.offload_ratio
        try:
            found: list[Setting] = self._thinker.ask(forecast.planned, space, least_ratio=least)
        except ThinkerError as error:
            self.notices.append(f"The planner was not asked for its own choice: {error}.")
            return ()
        return found[:1]

    def _forecast(self, seen: Seen, start: Setting) -> Forecaster:
        model = ModelFacts.from_module(type(self.module).__name__, self.module)
        wishes = self._wishes
        if self._rig is not None:
            job = Job(seq=wishes.sequence, micro_batch=wishes.micro_batch)
            rates = Rates.of_rig(self._rig, model.element_bytes)
            return PlannerForecast(model, rig_machine(self._rig), job, rates, seen.config)
        if self._machine is not None:
            job = Job(seq=wishes.sequence, micro_batch=wishes.micro_batch, compute_ms=seen.compute_ms or None)
            return PlannerForecast(model, self._machine, job, Rates.of(model, self._machine, job), seen.config)
        self.notices.append("Nothing is predicted here: settings are only measured.")
        return NoForecast(seen.step_ms or 1.0, start, self._has_memory)

    def _facts(self) -> RunFacts:
        wishes, rig = self._wishes, self._rig
        return RunFacts.of(
            self.module, self._dtype, micro_batch=wishes.micro_batch, sequence=wishes.sequence,
            name=type(self.module).__name__, rig=None if rig is None else rig.name,
        )  # fmt: skip

    def _measured(self, device: torch.device) -> Machine | None:
        _logger.info("zftune measures this machine's links and memory; that takes some seconds.")
        try:
            with torch.cuda.device(device):
                return Machine.here()
        except (ZftuneError, RuntimeError, MemoryError) as error:
            self.notices.append(f"This machine could not be measured: {error}.")
            return None


def thread_choices() -> tuple[int, ...]:
    """Choices for the host engine's threads on this machine; none: they stay."""
    from zftune.telemetry import hardware

    cores = int(hardware()["usable_cores"] or 1)
    return tuple(sorted({cores // 4, cores // 2, 3 * cores // 4})) if cores >= _FEW_CORES else ()


def ratio_choices(base: Setting, *, tune_memory: bool) -> list[float]:
    """Choices for `offload_ratio`: a lower one takes more GPU memory.

    Args:
        base: what the user has.
        tune_memory: whether the user allows to lower it.
    """
    lower = _LOWER_RATIOS if tune_memory else ()
    return sorted({*(ratio for ratio in (*lower, 1.0) if ratio > base.offload_ratio or lower), base.offload_ratio})


def _median(values: Iterable[float]) -> float:
    """0 where there are none."""
    found = list(values)
    return statistics.median(found) if found else 0.0


def _in_python(sentence: str) -> str:
    """With the command line's options as `attach` has them."""
    return sentence.replace("--fresh", "fresh=True").replace("--tune-memory", "tune_memory=True")
