"""What a step cost: stall by cause, bytes on the link, host work. Resolved later, without synchronising."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from zenflow.device import Collective, Device, Mark, Transfer
from zenflow.layout import selected_columns

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class CoverageCurve:
    """What an ideal selection of a step would have covered, for every `topk_ratio`."""

    cumulative: tuple[FloatArray, ...] = field(repr=False)
    """Of each weight, [offloaded columns] fp64: energy of its 1, 2, ... most important columns together."""

    @classmethod
    def of(cls, joined: torch.Tensor, columns: Sequence[int]) -> CoverageCurve:
        """From the weights' energies behind each other, [sum of `columns`] fp32 on the CPU, the greatest first."""
        # Not on the device: the order of its running sums is not defined, and with deterministic algorithms they fail.
        of_weights = joined.split(list(columns))
        return cls(tuple(np.cumsum(energies.numpy(), dtype=np.float64) for energies in of_weights))

    def at(self, topk_ratio: float) -> float | None:
        """Share of the energy that is in the top columns of each weight, 0 to 1; None where there is no energy."""
        total = sum(float(sums[-1]) for sums in self.cumulative)
        if not total > 0:
            return None
        counts = [selected_columns(len(sums), topk_ratio) for sums in self.cumulative]
        covered = sum(float(sums[count - 1]) for sums, count in zip(self.cumulative, counts, strict=True) if count)
        return covered / total


Cause = Literal["host", "h2d", "d2h", "select", "comm"]
CAUSES: tuple[Cause, ...] = ("host", "h2d", "d2h", "select")


@dataclass(slots=True)
class Traffic:
    """Bytes on the link since the last step, by purpose."""

    d2h_bytes: int = 0  # deferred gradients
    h2d_bytes: int = 0  # updated weights
    index_bytes: int = 0  # column indices, device scalars
    migrated_bytes: int = 0  # state that moved between the tiers, masters that were read


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait of the compute stream, between two marks with no work between them."""

    begin: Mark
    end: Mark
    cpu_s: float
    """Time that the training thread was blocked."""
    d2h_end: Mark | None = None
    """When the last gradient that the awaited work needed had arrived."""
    h2d_begin: Mark | None = None
    """When the copy back began."""
    cause: Cause | None = None
    """Set where the whole wait has one cause."""

    def by_cause(self, device: Device) -> dict[Cause, float]:
        """Seconds of device idle time by cause: D2H until the gradients were there, then host, then H2D."""
        total = max(0.0, device.elapsed_s(self.begin, self.end))
        if self.cause is not None:
            return {self.cause: total}
        d2h = 0.0 if self.d2h_end is None else min(total, max(0.0, device.elapsed_s(self.begin, self.d2h_end)))
        h2d = 0.0
        if self.h2d_begin is not None:
            h2d = min(total - d2h, max(0.0, device.elapsed_s(self.h2d_begin, self.end)))
        return {"d2h": d2h, "host": total - d2h - h2d, "h2d": h2d}


@dataclass(slots=True)
class Applied:
    """Deferred gradients that became visible, for their staleness."""

    elements: int = 0
    element_steps: int = 0
    max_steps: int = 0

    def add(self, elements: int, steps: Sequence[int]) -> None:
        """Count gradients of so many elements, each applied so many steps after it was produced."""
        self.elements += elements * len(steps)
        self.element_steps += elements * sum(steps)
        self.max_steps = max([self.max_steps, *steps])


@dataclass(slots=True)
class Moved:
    """How far the deferred weights that became visible moved in a step, by a sample of them."""

    change_squares: float = 0.0
    weight_squares: float = 0.0

    def add(self, change: float, weights: float, share: float) -> None:
        """Count a part of the weights by a sample, its `share`: L2 norms of a step's change and of the weights."""
        self.change_squares += change**2 / share
        self.weight_squares += weights**2 / share

    def join(self, other: Moved) -> None:
        """Count what another one has counted."""
        self.change_squares += other.change_squares
        self.weight_squares += other.weight_squares


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step of an optimizer, from the end of the previous `step()` to the end of this one."""

    step: int
    step_ms: float | None
    """Time between the two ends on the device's timeline; None for the first step."""
    stall_ms: Mapping[Cause, float] | None
    """Time that the compute stream waited because of offloading, and where there are several ranks ("comm") in their
    collectives; None where there is no such stream."""
    hidden_ms: float | None
    """Time that the training thread was blocked beyond the stall; None where there is no stall."""
    cpu_wait_ms: float
    """Time that the training thread was blocked."""
    closed: bool
    """Whether a window closed in this step."""
    d2h_bytes: int
    h2d_bytes: int
    index_bytes: int
    migrated_bytes: int
    host_ms: float
    """Host update time of what became visible in this step."""
    host_bytes: int
    """Memory traffic of that host work."""
    host_elements: int
    """Deferred elements whose windows became visible in this step."""
    staleness_mean_steps: float | None
    """Mean over the deferred gradient elements that became visible; None where none did."""
    staleness_max_steps: int | None
    coverage: float | None
    """Share of the offloaded gradient energy in the selected columns; None where nothing can be selected."""
    coverage_curve: CoverageCurve | None
    """The same for the best selection of every `topk_ratio`; None but in steps that looked for a new selection."""
    churn: float | None
    """Share of the selected columns that were exchanged at this step's close; None where no selection was due."""
    comm_ms: Mapping[Collective, float] | None = None
    """Of the stall, that in collectives: the runtime's own all-reduces, and on an emulated accelerator FSDP2's, which
    nobody else can time. None where there is one rank, or no stall is known."""
    pin_ms: float = 0.0
    """Time of this step in which host memory was allocated and pinned beside it, which slows it down."""
    change_norm: float | None = None
    """L2 norm of what one step changed in the deferred weights that became visible, on all ranks together: a window's
    change over its steps, by a sample of their columns. None where none did, or for the first time; and where ranks
    share out the state, for the last two steps, whose sums the next ones bring."""
    weight_norm: float | None = None
    """L2 norm of these weights."""

    @property
    def movement_percent(self) -> float | None:
        """How far the weights moved in one step: `change_norm` over `weight_norm`, in percent."""
        return None if self.change_norm is None or not self.weight_norm else 100 * self.change_norm / self.weight_norm


@dataclass(slots=True)
class StepRecord:
    """A step's raw material until its marks have been passed."""

    step: int
    begin: Mark | None = None
    end: Mark | None = None
    closed: bool = False
    waits: list[Wait] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)
    applied: Applied = field(default_factory=Applied)
    moved: Moved | None = None
    host_s: float = 0.0
    host_bytes: int = 0
    host_elements: int = 0
    energy: tuple[torch.Tensor, Transfer] | None = None
    """[2] fp32 in host memory: energy of the selected and of all offloaded columns."""
    ranked: tuple[torch.Tensor, Transfer] | None = None
    """Energy of each weight's columns, the most important one's first, weight after weight, in host memory."""
    ranked_columns: list[int] = field(default_factory=list)  # how many of these each weight has
    moved_columns: int = 0
    selected_columns: int = 0
    """Columns of the selections that were due at this step's close."""
    comm_s: Mapping[Collective, float] = field(default_factory=dict)
    """Waits in FSDP2's collectives, as the device knows them."""
    pin_s: float = 0.0  # in which host memory was pinned beside the step

    @contextmanager
    def timed(self, device: Device, cause: Cause) -> Iterator[None]:
        """Record what is done inside as a wait of one cause."""
        begin, cpu_begin = device.mark(), device.clock.now()
        yield
        self.waits.append(Wait(begin, device.mark(), device.clock.now() - cpu_begin, cause=cause))

    def ready(self, device: Device) -> bool:
        """Whether everything that `resolve` needs is there."""
        arrived = all(fetched is None or fetched[1].done() for fetched in (self.energy, self.ranked))
        return arrived and self.end is not None and device.passed(self.end)

    def wait(self, device: Device) -> None:
        device.wait_for(self.end)
        for fetched in (self.energy, self.ranked):
            if fetched is not None:
                fetched[1].wait()

    def resolve(self, device: Device) -> StepStats:
        """Turn marks into milliseconds; only after `ready`."""
        stall: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)
        hidden_ms = 0.0
        for wait in self.waits:
            by_cause = wait.by_cause(device)
            for cause, seconds in by_cause.items():
                stall[cause] = stall.get(cause, 0.0) + 1e3 * seconds
            hidden_ms += 1e3 * max(0.0, wait.cpu_s - sum(by_cause.values()))
        cpu_wait_ms = 1e3 * sum(wait.cpu_s for wait in self.waits)
        timed = device.has_streams
        comm: dict[Collective, float] | None = None
        if "comm" in stall and timed:
            comm = {**{kind: 1e3 * seconds for kind, seconds in self.comm_s.items()}, "all_reduce": stall["comm"]}
            stall["comm"] = sum(comm.values())
        return StepStats(
            step=self.step,
            step_ms=None if self.begin is None else 1e3 * device.elapsed_s(self.begin, self.end),
            stall_ms=stall if timed else None,
            hidden_ms=hidden_ms if timed else None,
            cpu_wait_ms=cpu_wait_ms,
            closed=self.closed,
            d2h_bytes=self.traffic.d2h_bytes,
            h2d_bytes=self.traffic.h2d_bytes,
            index_bytes=self.traffic.index_bytes,
            migrated_bytes=self.traffic.migrated_bytes,
            host_ms=1e3 * self.host_s,
            host_bytes=self.host_bytes,
            host_elements=self.host_elements,
            staleness_mean_steps=self.applied.element_steps / self.applied.elements if self.applied.elements else None,
            staleness_max_steps=self.applied.max_steps if self.applied.elements else None,
            coverage=self._coverage(),
            coverage_curve=self._curve(),
            churn=self.moved_columns / self.selected_columns if self.selected_columns else None,
            comm_ms=comm,
            pin_ms=1e3 * self.pin_s,
            change_norm=None if self.moved is None else math.sqrt(self.moved.change_squares),
            weight_norm=None if self.moved is None else math.sqrt(self.moved.weight_squares),
        )

    def _curve(self) -> CoverageCurve | None:
        if self.ranked is None:
            return None
        self.ranked[1].wait()  # has arrived; raises if the copy failed
        return CoverageCurve.of(self.ranked[0], self.ranked_columns)

    def _coverage(self) -> float | None:
        if self.energy is None:
            return None
        self.energy[1].wait()  # has arrived; raises if the copy failed
        selected, offloaded = self.energy[0].tolist()
        share = selected / offloaded if offloaded > 0 else None
        # Both are fp32 sums, so that of all columns may come out a little below that of some.
        return min(1.0, share) if share is not None and share >= 0 else None
