"""What is trained, where and how, by value: all that a search is made from, wherever that is done.

What needs the module, the optimizer or this process is read by `Reader`, in the process that trains.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from zenflow import StepStats, ZenFlowConfig
from zenflow.optimizer import ZenFlowOptimizer
from zenflow.sharded import ranks_with_rows
from zftune.emulation import EmulatedAccelerator, Rig
from zftune.errors import ZftuneError
from zftune.planner.choosing import HEADROOM, LEAST_HEADROOM_BYTES
from zftune.planner.model import Machine, ModelFacts
from zftune.quality import at_full_rate, highest_rate, movement_percent, rate_at_full, rates
from zftune.store.types import Quality
from zftune.tuner.forecast import MeasuredCoverage, measured_coverage, rig_machine
from zftune.tuner.pace import Load, busy_ms
from zftune.tuner.recording import MachineInfo, RunFacts
from zftune.tuner.search import SearchOptions

_logger = logging.getLogger("zftune")


@dataclass(frozen=True, slots=True)
class WorldInfo:
    """The ranks that train one model."""

    ranks: int = 1
    here: int = 1
    """On this machine: they share its cores."""
    nodes: int = 1
    """Machines."""
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
    """In force."""
    steps: tuple[StepStats, ...]
    """The last ones."""
    has_loss: bool
    asked: ZenFlowConfig | None = None
    """By the user, where the training goes on from a saved state that had others; None: those in force."""
    begins_anew: bool = False
    """Whether the optimizer's first step was one of them: it goes on from no saved state."""

    @property
    def step_ms(self) -> float:
        """Of a step."""
        return _median(one.step_ms for one in self.steps if one.step_ms)

    @property
    def compute_ms(self) -> float:
        """Of a step, without what it waited because of offloading."""
        return _median(busy_ms(one) for one in self.steps if one.step_ms)

    @property
    def coverage(self) -> MeasuredCoverage | None:
        """For every k; None: nothing was selected that could be measured."""
        curves = [one.coverage_curve for one in self.steps if one.coverage_curve is not None]
        found, _ = measured_coverage(curves, (self.config.topk_ratio,))
        return found if isinstance(found, MeasuredCoverage) else None

    @property
    def movement_percent(self) -> float | None:
        """How far a step moves the deferred weights, by the second half of it: an optimizer begins with long steps."""
        return movement_percent(self.steps[len(self.steps) // 2 :])


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingFacts:
    """A training that warmed up."""

    wishes: TuneRequest
    run: RunFacts | None
    """None, as `here`: nothing is remembered of it."""
    here: MachineInfo | None
    config: ZenFlowConfig
    """The user's, as it is after the warm-up, with windows of a known length."""
    has_loss: bool
    step_ms: float
    """0: not known."""
    compute_ms: float
    coverage: MeasuredCoverage | None
    """None: to be assumed."""
    load: Load
    model: ModelFacts
    company: WorldInfo = SINGLE_RANK
    rig: Rig | None = None
    """None: no emulated accelerator."""
    machine: Machine | None = None
    """None: nothing can be predicted."""
    has_memory: bool = False
    """Whether there is device memory that others may need more of."""
    device_limit_bytes: int | None = None
    """Most that a live trial may take at the peak; None: there is no such limit."""
    movement_percent: float | None = None
    """How far a step moves the deferred weights, at the schedule's highest learning rate; None: not measured."""
    movement_rate: float | None = None
    """As of `Outcome`."""
    learning_rate: float | None = None
    """That highest one; None: not known."""
    begins_anew: bool = False
    """Whether it goes on from no saved state."""


class Reader:
    """Knows the model and the machine; made before training begins, since on a GPU it measures the machine.

    Args:
        remembered: whether it is looked at what a store keeps runs and presets by.
        name: of the model; None: that of its class.
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
        self._rates = rates(self._groups)
        self._name = name
        self.notices: list[str] = []
        """Sentences: what could not be had."""
        self._dtype = parameters[0].dtype
        self._wishes, self._remembered, self._company = wishes, remembered, company
        device, self._partitioned = optimizer.device, optimizer.is_partitioned
        self._rig = device.rig if isinstance(device, EmulatedAccelerator) else None
        self._device_limit_bytes = device_limit(optimizer)
        self._has_memory = device.total_bytes() is not None
        self._machine = self._measured(device.torch_device) if self._has_memory and self._rig is None else None

    def facts(self, seen: WarmupStats) -> TrainingFacts:
        """Read them from the warm-up; may be called from any thread."""
        rig = self._rig
        # Only now: a model may be sharded, and its parameters be others, after its optimizer was made.
        shards = self._company.ranks if self._partitioned else ranks_with_rows(self._groups[0]["params"][0])
        company = replace(self._company, shards=shards, keeps_whole=self._partitioned)
        return TrainingFacts(
            wishes=self._wishes,
            run=self._run_facts(company) if self._remembered else None,
            here=self._here() if self._remembered else None,
            config=seen.asked or seen.config,
            has_loss=seen.has_loss,
            step_ms=seen.step_ms,
            compute_ms=seen.compute_ms,
            coverage=seen.coverage,
            load=Load.of(seen.steps, self.module),
            model=ModelFacts.from_module(self._called, self.module),
            company=company,
            rig=rig,
            machine=self._machine if rig is None else rig_machine(rig),
            has_memory=self._has_memory,
            device_limit_bytes=self._device_limit_bytes,
            movement_percent=at_full_rate(seen.movement_percent, self._groups, self._rates),
            movement_rate=rate_at_full(self._groups, self._rates),
            learning_rate=highest_rate(self._groups),
            begins_anew=seen.begins_anew,
        )

    def _run_facts(self, company: WorldInfo) -> RunFacts:
        wishes, rig = self._wishes, self._rig
        return RunFacts.of(
            self.module, self._dtype, micro_batch=wishes.micro_batch, sequence=wishes.sequence,
            name=self._called, rig=None if rig is None else rig.name, stage=wishes.zero_stage,
            world_size=company.ranks, nodes=company.nodes, shards=company.shards,
        )  # fmt: skip

    @property
    def _called(self) -> str:
        """The model; its class has another name once FSDP2 has sharded it."""
        return self._name or _name_of(self.module)

    def _here(self) -> MachineInfo:
        """With the cores that are this rank's."""
        found = MachineInfo.now(None if self._rig is None else self._rig.name)
        if self._company.here == 1 or found.usable_cores is None:
            return found
        return replace(found, usable_cores=max(1.0, found.usable_cores // self._company.here))

    def _measured(self, device: torch.device) -> Machine | None:
        _logger.info("zftune measures this machine's links and memory; that takes some seconds.")
        try:
            with torch.cuda.device(device):
                return Machine.here()
        except (ZftuneError, RuntimeError, MemoryError) as error:
            self.notices.append(f"This machine could not be measured: {error}.")
            return None


def _name_of(module: nn.Module) -> str:
    """Of its class, as it was before FSDP2 made another of it."""
    own, above, *others = (kind.__name__ for kind in type(module).__mro__)
    return others[0] if above == "FSDPModule" else own


def device_limit(optimizer: ZenFlowOptimizer) -> int | None:
    """Bytes of device memory that a live trial may reach; None where there is no such memory."""
    total = optimizer.device.total_bytes()
    return None if total is None else round(total - max(HEADROOM * total, LEAST_HEADROOM_BYTES))


def _median(values: Iterable[float]) -> float:
    """0 where there are none."""
    found = list(values)
    return statistics.median(found) if found else 0.0
