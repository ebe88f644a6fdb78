"""One system after the other on the same decoder: step, stall, memory and link, beside what the planner said."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu.bench import Bench, Size
from gpu.calls import ThreadTimes
from gpu.machine import machine_of, memory_bytes
from gpu.parts import KNOBS
from gpu.profiled import length, profiled, union
from gpu.record import Record, UnavailableError, figures_of
from gpu.training import Loop, Ours, Times, Trainee, config_of, timed, trainee_of
from torch.utils.data import DataLoader, Dataset

from zenflow.stats import StepStats
from zftune.planner.closed_form import predict
from zftune.planner.model import Job, Machine, ModelFacts
from zftune.telemetry.bandwidth import host_bandwidth

_PROFILED = 3
_KEPT_S = 8.0
"""Of a part's time, for what comes after the measured steps."""
_LEAST_STEPS = 4
_EPOCHS, _WORKERS = 2, 2

Part = Callable[[Record, Bench, Size], None]


def system(name: str) -> Part:
    """The part that measures a system."""

    def part(record: Record, bench: Bench, size: Size) -> None:
        try:
            trainee = trainee_of(name, bench, size)
        except UnavailableError as error:
            record.refuse(str(error))
            return
        parameters = sum(parameter.numel() for parameter in trainee.model.parameters())
        record.note("model", {**dataclasses.asdict(size), "parameters": parameters})
        loop = Loop(trainee)
        try:
            _measured(record, trainee, loop, name)
        finally:
            trainee.close()

    return part


def _measured(record: Record, trainee: Trainee, loop: Loop, name: str) -> None:
    bench, size = trainee.bench, trainee.size
    _first_step(record, trainee, loop)
    window = config_of(name).longest_window
    warm_s = timed(lambda: loop.steps(size.warm)) / size.warm
    bench.reset_peaks()
    count = max(_LEAST_STEPS, min(size.steps, int((record.remaining_s - _KEPT_S) / max(warm_s, 1e-6))))
    count = -(-count // window) * window
    before = loop.taken
    threads = ThreadTimes()
    threads.begin()
    with _Nvml(record, bench):
        times = loop.steps(count)
    record.note("threads_ms", threads.figures(count))
    step = loop.figures(times)
    record.note("step_ms", step)
    plain = figures_of(record.path.parent, "adamw").get("step_ms")
    if plain is not None:
        record.note("hooks_ms", step["thread_ms"]["backward"] - plain["thread_ms"]["backward"])
    record.note("peak_bytes", bench.peaks())
    stats = _stats(trainee, before)
    stall = record.measure("stall", lambda: _stall(stats))
    record.measure("link_bytes", lambda: _link_bytes(stats))
    record.measure("host", lambda: _host(trainee, stats), needs_s=2)
    record.measure("prediction", lambda: _prediction(record.path.parent, trainee, name, step), needs_s=3)
    profile = record.measure("profile", lambda: profiled(bench, loop.step, _PROFILED), needs_s=3)
    if stall and profile and profile.get("idle") is not None:
        record.note("stall_beside_idle", {"stall": stall["share"], "profiler_idle": profile["idle"]})
    record.measure("link", lambda: _link(trainee, loop, window), needs_s=2)


def _first_step(record: Record, trainee: Trainee, loop: Loop) -> None:
    """What a run pays once: memory that is registered, kernels that are compiled."""
    trainee.bench.reset_peaks()
    record.note("first_step_s", timed(lambda: loop.steps(1)))
    record.note("first_step_peak_bytes", trainee.bench.peaks())
    if isinstance(trainee, Ours):
        record.note("pinned_in_first_step", {"bytes": trainee.pins.nbytes, "seconds": trainee.pins.seconds})


def _stats(trainee: Trainee, after: int) -> list[StepStats]:
    optimizer = trainee.optimizer
    return [] if optimizer is None else optimizer.history(wait=True, after=after)


def _stall(stats: Sequence[StepStats]) -> dict[str, Any] | None:
    """Mean over the steps, by cause, and its share of their time."""
    stalls = [each.stall_ms for each in stats if each.stall_ms is not None]
    lasted = [each.step_ms for each in stats if each.step_ms is not None]
    if not stalls or not lasted:
        return None
    causes = {cause: statistics.fmean(stall[cause] for stall in stalls) for cause in stalls[0]}
    return {"ms": causes, "share": sum(causes.values()) / statistics.fmean(lasted)}


def _link_bytes(stats: Sequence[StepStats]) -> dict[str, float] | None:
    if not stats:
        return None
    directions = ("d2h_bytes", "h2d_bytes", "index_bytes", "migrated_bytes")
    return {name: statistics.fmean(getattr(each, name) for each in stats) for name in directions}


def _host(trainee: Trainee, stats: Sequence[StepStats]) -> dict[str, Any] | None:
    """Memory and rate of the host's updates, beside what its memory can carry."""
    optimizer = trainee.optimizer
    if optimizer is None:
        return None
    busy_ms = sum(each.host_ms for each in stats)
    found: dict[str, Any] = {
        "engine": list(optimizer.host_engine),
        "bytes": optimizer.host_bytes(),
        "gbps": sum(each.host_bytes for each in stats) / busy_ms / 1e6 if busy_ms else None,
    }
    if busy_ms:
        elements = {"elements": 1 << 18} if trainee.bench.simulated else {}
        ceiling = host_bandwidth(
            update_interval=optimizer.config.longest_window, threads=optimizer.host_engine[1], repeats=3, **elements
        )
        found["ceiling_gbps"] = ceiling.gbps
    return found


def _prediction(folder: Path, trainee: Trainee, name: str, step: dict[str, Any]) -> dict[str, Any]:
    """What the planner says of this model here, with forward and backward as plain training has them.

    Args:
        folder: where the other parts' results are.
        trainee: what is trained.
        name: of the system.
        step: its own times, where plain training was not measured.
    """
    measured = figures_of(folder, "link").get("machine")
    machine = Machine(**measured) if measured else machine_of(trainee.bench)
    plain = figures_of(folder, "adamw").get("step_ms", step)["device_ms"]
    size = trainee.size
    job = Job(seq=size.sequence, micro_batch=size.batch, forward_ms=plain["forward"], backward_ms=plain["backward"])
    said = predict(ModelFacts.from_module(name, trainee.model), machine, job, config_of(name))
    return {
        "step_ms": said.step_ms,
        "measured_over_predicted": step["p50"] / said.step_ms,
        "stall_ms": said.stall_ms,
        "s_min": said.s_min,
        "bound_by": said.bound_by,
        "device_bytes": said.memory.device_bytes,
        "device_by_use": dict(said.memory.device_by_use),
        "pinned_bytes": said.memory.pinned_bytes,
        "host_bytes": said.memory.host_bytes,
    }


def _link(trainee: Trainee, loop: Loop, window: int) -> dict[str, float] | None:
    """GB/s of the copies of one window, while they went on."""
    optimizer = trainee.optimizer
    if optimizer is None:
        return None
    optimizer.record_timeline()
    loop.steps(2 * window)
    timeline = optimizer.timeline()
    if timeline is None:
        raise UnavailableError("no whole window was recorded")
    found = {}
    for direction in ("d2h", "h2d"):
        spans = timeline.lanes.get(direction, ())
        busy_ms = length(union((span.begin_ms, span.end_ms) for span in spans))
        if busy_ms:
            found[f"{direction}_gbps"] = sum(span.nbytes or 0 for span in spans) / busy_ms / 1e6
    return found


class _Nvml:
    """Keeps what NVML says of the time within."""

    def __init__(self, record: Record, bench: Bench) -> None:
        self._record, self._uuid = record, bench.uuid()
        self._sampler: Any = None
        if bench.simulated:
            record.absent("nvml", "there is no GPU")
            return
        try:
            from zftune.telemetry import NvmlSampler
        except ImportError as error:
            record.absent("nvml", str(error))
            return
        self._sampler = NvmlSampler(rate_hz=10.0)

    def __enter__(self) -> None:
        if self._sampler is not None:
            self._sampler.start()
            self._begin_ns = time.monotonic_ns()

    def __exit__(self, *_: object) -> None:
        if self._sampler is None:
            return
        end_ns = time.monotonic_ns()
        self._sampler.stop()
        figures, missing = self._sampler.summary(self._begin_ns, end_ns, None if self._uuid is None else [self._uuid])
        if figures is None:
            self._record.absent("nvml", missing.get("", "it gave nothing"))
        else:
            self._record.note("nvml", figures)


# --- the same again, with what trainers do ---------------------------------------------------------------------------


def synchronised(record: Record, bench: Bench, size: Size) -> None:
    """Reading the loss after backward, as many trainers do: the launches of `step()` then keep the GPU waiting."""
    trainee = Ours(bench, size, KNOBS["zenflow"])
    try:
        found = {}
        for name, waits in (("free", False), ("loss.item()", True)):
            loop = Loop(trainee, wait_for_loss=waits)
            loop.steps(size.warm)
            found[name] = loop.figures(loop.steps(_steps_within(record, size)))
            record.note(name, found[name])
        record.note("exposed_ms", found["loss.item()"]["p50"] - found["free"]["p50"])
    finally:
        trainee.close()


def _steps_within(record: Record, size: Size) -> int:
    return size.steps if record.remaining_s > _KEPT_S else _LEAST_STEPS


class _Tokens(Dataset[torch.Tensor]):
    """Sequences that cost nothing."""

    def __init__(self, size: Size) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size.epoch * self._size.batch

    def __getitem__(self, index: int) -> torch.Tensor:
        return (torch.arange(self._size.sequence) * 31 + index) % self._size.vocabulary


def loader(record: Record, bench: Bench, size: Size) -> None:
    """Two epochs without and with workers, which fork a process that has registered memory."""
    trainee = Ours(bench, size, KNOBS["zenflow"])
    try:
        loop = Loop(trainee)
        loop.steps(size.warm)
        for workers in (0, _WORKERS):
            available = memory_bytes("MemAvailable")
            for epoch in range(_EPOCHS):
                times = _epoch(loop, bench, size, workers)
                taken = available - memory_bytes("MemAvailable")
                record.note(f"workers {workers}, epoch {epoch + 1}", {**times, "host_bytes_taken": taken})
    finally:
        trainee.close()


def _epoch(loop: Loop, bench: Bench, size: Size, workers: int) -> dict[str, Any]:
    times, device = Times(), bench.device()
    batches: Iterator[torch.Tensor] = iter(DataLoader(_Tokens(size), batch_size=size.batch, num_workers=workers))
    for batch in batches:
        loop.step(times, device.send(batch))
    bench.synchronize()
    return loop.figures(times)
