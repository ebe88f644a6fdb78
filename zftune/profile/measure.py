"""Measuring one system: train the workload under its knobs and keep what every step cost."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, Self, TypeVar, overload

import torch
from torch import Tensor

from zenflow import Device, StepStats, ZenFlowAdamW, ZenFlowConfig, ZenFlowError
from zenflow.clock import REAL_CLOCK
from zenflow.device import device_for
from zenflow.history import TimelineRecorder
from zenflow.layout import BUCKETS_A_MODEL
from zftune.emulation import EmulatedAccelerator, Rig, RigSpec
from zftune.emulation.emulator import Slack
from zftune.emulation.machines import MAX_LATE_SHARE
from zftune.errors import BadInputError, ProfileError
from zftune.frames import FrameSampler, idle_question
from zftune.profile.companions import FusedAdamW, IdleProfiler, TorchAdamW, calibration_steps
from zftune.workload import Batch, TextCorpus, Workload, batches, build_model

_ATTEMPTS = 3
_PHASES = ("data", "forward", "backward", "optimizer")

OnStep = Callable[[int, int], None]
"""Told after each step: steps done and steps in all."""

System = ZenFlowConfig | TorchAdamW
"""What is measured: our optimizer under these knobs, or torch's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What is trained, and where."""

    model: str
    corpus: TextCorpus
    dtype: torch.dtype
    micro_batch: int
    sequence: int
    seed: int
    torch_device: torch.device
    rig: RigSpec | None
    """None: the device itself."""
    ranks: int = 1
    """How many have their rows of the model, each on a rig of its own."""
    rank: int = 0
    """Which of them this one is."""
    real_time: bool = False
    """Whether a rig pads real work by the machine's clock, and does not simulate time."""
    learning_rate: float = 1e-4

    @property
    def simulated(self) -> bool:
        return self.rig is not None and not self.real_time

    def build(self) -> Workload:
        """The model on its device; the same weights every time."""
        workload = build_model(self.model, dtype=self.dtype, seed=self.seed)
        if self.sequence > workload.max_sequence:
            raise BadInputError(
                f"--sequence is {self.sequence}; it must be an integer from 2 to the model's {workload.max_sequence}"
            )
        workload.module.to(self.torch_device)
        return workload

    def describe(self, workload: Workload) -> dict[str, Any]:
        """The "workload" of a profile document."""
        what = workload.describe(micro_batch=self.micro_batch, sequence=self.sequence, text=self.corpus.name)
        return {**what, "learning_rate": self.learning_rate}

    def feed(self, workload: Workload) -> Iterator[Batch]:
        """The text as batches for this model; the same ones every time, and each rank its own."""
        tokens = workload.encode(self.corpus)
        seed = (self.seed * self.ranks + self.rank) % (1 << 63)
        return batches(tokens, micro_batch=self.micro_batch, sequence=self.sequence, seed=seed)

    def rig_for(self, workload: Workload) -> Rig | None:
        """The rig with the rates that fit this model."""
        elements = sum(p.numel() for p in workload.module.parameters() if p.dim() >= 2 and p.requires_grad)
        return None if self.rig is None else self.rig.for_elements(elements)

    def scaled(self, config: ZenFlowConfig) -> ZenFlowConfig:
        """Knobs with which a rig's small model has as many buckets as the large one that it stands for."""
        if self.rig is None or config.bucket_bytes != ZenFlowConfig().bucket_bytes:
            return config
        weights = self.build().module.parameters()
        nbytes = sum(weight.nbytes for weight in weights if weight.dim() >= 2 and weight.requires_grad)
        return replace(config, bucket_bytes=max(1, nbytes // BUCKETS_A_MODEL))

    def device_for(self, workload: Workload) -> Device:
        """The device itself, or a rig's with the model attached; to be closed by the calling thread."""
        rig = self.rig_for(workload)
        if rig is None:
            return device_for(self.torch_device)
        device = EmulatedAccelerator(rig, clock=REAL_CLOCK if self.real_time else None)
        device.attach(workload.module)
        return device


@dataclass(frozen=True, slots=True)
class Measurement:
    """One system's measured steps."""

    config: ZenFlowConfig | None
    """The knobs, resolved; None: torch's optimizer has none."""
    stats: list[StepStats]
    discarded: int
    phases_ms: list[dict[str, float]]
    """Of each measured step: from the end of the one before, on the device's timeline."""
    timeline: dict[str, Any] | None
    """One update window; None where no whole one was measured."""
    span_ns: tuple[int, int]
    host_bytes: dict[str, int]
    """Peak host memory by use."""
    host_engine: str
    host_threads: int
    device_peak_bytes: int | None
    slack: Slack | None
    """None without a rig."""
    losses: list[float]
    idle: dict[str, Any] | None
    """What a GPU idled for in some more steps, under torch.profiler; None where there is none, or it saw no kernel."""
    lines: dict[str, Any] | None
    """What a `FrameSampler` saw; None in simulated time."""
    attempts: int
    """Times that the run was measured until it was accepted."""

    @property
    def step_ms(self) -> list[float]:
        """Duration of each measured step."""
        return [stats.step_ms for stats in self.stats if stats.step_ms is not None]


def step_counts(config: ZenFlowConfig | None, steps: int) -> tuple[int, int]:
    """Steps to discard and to measure: whole windows, and at least two of them before anything counts."""
    window = 1 if config is None else config.longest_window
    discarded = max(3, 2 * window) + (0 if config is None else config.full_warm_up_rounds)
    return discarded, -(-steps // window) * window


def measure(task: Task, system: System, steps: int, on_step: OnStep) -> Measurement:
    """Measure one system; on a rig in real time again, at most three times, while real work was late for its pads.

    Raises:
        BadInputError: the model or the text does not fit the options; before any training.
        ProfileError: this machine is too slow for the rig, or the runtime refused the model.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            result = _measure_once(task, system, steps, on_step, attempt)
        except ZenFlowError as error:
            raise ProfileError(str(error)) from error
        fault = None if result.slack is None else lateness(result.slack)
        if fault is None:
            return result
    raise ProfileError(
        f"rig '{task.rig.name if task.rig else ''}': {fault} in each of {_ATTEMPTS} runs, more than "
        f"{MAX_LATE_SHARE:.0%}; leave out --real-time, or use a rig with a larger scale, a smaller --model or "
        "--sequence, or a less busy machine"
    )


def lateness(slack: Slack) -> str | None:
    """Why a run on a rig cannot be accepted; None if it can."""
    if slack.host_s and slack.late_host_s > MAX_LATE_SHARE * slack.host_s:  # work without bytes has no rate
        return f"the host was {slack.late_host_s / slack.host_s:.1%} slower than the rig's"
    if slack.late > MAX_LATE_SHARE * slack.segments:
        return f"{slack.late} of {slack.segments} segments were late"
    return None


def _hopeless(device: Device, done: float) -> bool:
    """Whether so much was late already that the whole run will be refused; `done` is the share that was measured."""
    if not isinstance(device, EmulatedAccelerator):
        return False
    slack = device.slack
    late = slack.late > MAX_LATE_SHARE * slack.segments / done
    return late or slack.late_host_s > MAX_LATE_SHARE * slack.host_s / done > 0


def _measure_once(task: Task, system: System, steps: int, on_step: OnStep, attempt: int) -> Measurement:
    gc.collect()  # the last run's model, before the next one takes its place
    with Training(task, system, timed=True) as training:
        device, optimizer = training.device, training.optimizer
        discarded, measured = step_counts(optimizer.config, steps)
        begin_ns, lines = _train(training, discarded, measured, on_step)
        stats = optimizer.history(wait=True, after=discarded)
        peak_bytes = device.peak_bytes()
        slack = device.slack if isinstance(device, EmulatedAccelerator) else None
        phases_ms = training.phases_ms(discarded)
        losses = training.losses(discarded, measured)
        span_ns = (begin_ns, time.monotonic_ns())
        timeline = optimizer.timeline()
        idle = _idle(training, discarded + measured) if device.torch_device.type == "cuda" else None
        optimizer.close()  # what is pending comes back to the pools, which then are at their largest
        host_bytes, engine = optimizer.host_bytes(), optimizer.host_engine
    return Measurement(
        optimizer.config,
        stats,
        discarded,
        phases_ms,
        None if timeline is None else timeline.document(),
        span_ns,
        host_bytes,
        *engine,
        peak_bytes,
        slack,
        losses,
        idle,
        lines,
        attempt,
    )


def _idle(training: Training[Any], taken: int) -> dict[str, Any] | None:
    optimizer = training.optimizer
    steps = calibration_steps(1 if optimizer.config is None else optimizer.config.longest_window)
    profiler = IdleProfiler()
    with profiler.recording(training.device.torch_device):
        for _ in range(steps):
            training.step()
    found = profiler.idle(steps)
    return None if found is None else found.document(optimizer.history(wait=True, after=taken))


def _train(
    training: Training[Any], discarded: int, measured: int, on_step: OnStep
) -> tuple[int, dict[str, Any] | None]:
    """When measuring began, and what a `FrameSampler` saw; None in simulated time."""
    begin_ns, device = 0, training.device
    sampler = FrameSampler(idle_question(device) if device.has_streams else None)
    try:
        for step in range(discarded + measured):
            if step == discarded - 1:
                training.record_window()  # from its end on, where a window closes
            if step == discarded:
                device.reset_peaks()
                begin_ns = time.monotonic_ns()
                if not device.clock.simulated:
                    sampler.start()
            training.step()
            on_step(step + 1, discarded + measured)
            if step >= discarded and _hopeless(device, (step + 1 - discarded) / measured):
                break  # refused whatever comes: do not let a person wait for it
    finally:
        sampler.stop()
    return begin_ns, sampler.document()


Optimizer = TypeVar("Optimizer", bound=ZenFlowAdamW | FusedAdamW)


class Training(Generic[Optimizer]):
    """The built-in workload in training, from entering to leaving; nothing that is pending is applied at the end.

    Raises:
        BadInputError: the model or the text does not fit the options.
        ZenFlowError: the runtime refused the model.
    """

    optimizer: Optimizer

    @overload
    def __init__(self: Training[ZenFlowAdamW], task: Task, system: ZenFlowConfig, *, timed: bool = False) -> None: ...

    @overload
    def __init__(
        self: Training[ZenFlowAdamW | FusedAdamW], task: Task, system: System, *, timed: bool = False
    ) -> None: ...

    def __init__(self, task: Task, system: System, *, timed: bool = False) -> None:
        self.task = task
        self.workload = task.build()
        self._feed = task.feed(self.workload)
        if task.ranks > 1:
            self.workload.shard()
        self._timed = timed
        self._marks: list[tuple[object, object, object, object]] = []
        self._losses: list[Tensor] = []
        self._recorder: TimelineRecorder | None = None
        with ExitStack() as cleanup:
            self.device = task.device_for(self.workload)
            cleanup.callback(self.device.close)
            made = _optimizer(system, self.workload, self.device, task.learning_rate)
            self.optimizer = made  # type: ignore[assignment]
            cleanup.callback(self.optimizer.abandon)
            self._cleanup = cleanup.pop_all()

    def __enter__(self) -> Self:
        self._cleanup.enter_context(steady(self.task.rig is not None))
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    @property
    def tokens(self) -> int:
        """Of a step of this rank."""
        return self.task.micro_batch * self.task.sequence

    def record_window(self) -> None:
        """Record the timeline of the update window that begins next."""
        self._recorder = self.optimizer.record_timeline()

    def step(self) -> Tensor:
        """One training step; its loss, a scalar on the device."""
        device, clock = self.device, self.device.clock
        began_s = clock.now()
        batch = Batch(*(device.send(tensor) for tensor in next(self._feed)))
        loaded_s = clock.now()
        begin = device.mark()
        loss = self.workload.loss(batch)
        forward = device.mark()
        loss.backward()
        device.begin_step()
        backward = device.mark()
        recorder = self._recorder
        if recorder is not None:  # before the step's end, which may be the recording's
            recorder.wall("data", "batch", began_s, loaded_s)
            recorder.compute("forward", begin, forward)
            recorder.compute("backward", forward, backward)
        self.optimizer.step()
        end = self.optimizer.last_end  # where the statistics end the step, so that phases add up to it
        self.optimizer.zero_grad()
        if recorder is not None:
            recorder.compute("optimizer", backward, end)
        if self._timed:
            self._marks.append((begin, forward, backward, end))
            self._losses.append(loss.detach())
        return loss.detach()

    def losses(self, discarded: int, measured: int) -> list[float]:
        """Of the measured steps; waits for the device."""
        return [float(loss) for loss in self._losses[discarded : discarded + measured]]

    def phases_ms(self, discarded: int) -> list[dict[str, float]]:
        """Milliseconds of each phase of the measured steps; after the device has reached their marks.

        Args:
            discarded: first steps, which do not count; at least one.
        """
        device, marks = self.device, self._marks[discarded - 1 :]
        device.wait_for(marks[-1][-1])
        steps = []
        for (*_, last_end), step in itertools.pairwise(marks):
            points = (last_end, *step)
            steps.append({name: 1e3 * device.elapsed_s(*points[i : i + 2]) for i, name in enumerate(_PHASES)})
        return steps


def _optimizer(system: System, workload: Workload, device: Device, lr: float) -> ZenFlowAdamW | FusedAdamW:
    module = workload.module
    if isinstance(system, TorchAdamW):
        return FusedAdamW(module.parameters(), lr=lr, system=system, device=device)
    return ZenFlowAdamW(module.parameters(), lr=lr, config=system, module=module, device=device)


@contextmanager
def steady(emulated: bool) -> Iterator[None]:
    """Keep the garbage collector, and on a rig torch's own threads, from making single steps slow."""
    threads, frozen = torch.get_num_threads(), gc.get_freeze_count()
    gc.collect()
    if not frozen:  # else by somebody else, and who thaws thaws everything
        gc.freeze()
    if emulated:
        torch.set_num_threads(1)  # the host engine needs the other cores, and results repeat on any number of them
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if not frozen:
            gc.unfreeze()
