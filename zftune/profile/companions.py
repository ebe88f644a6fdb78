"""What is measured beside our optimizer: other ranks, torch's AdamW, and the GPU's idle time by torch's profiler."""

from __future__ import annotations

import multiprocessing
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C._autograd import DeviceType

from zenflow import Device, StepStats
from zenflow.device import Mark
from zenflow.history import History
from zenflow.sharded import local_rows
from zenflow.stats import Traffic
from zftune.errors import ProfileError, ZftuneError

_PART_ELEMENTS = 1 << 26
"""Elements whose gradients are in fp32 at a time: few launches, and little memory beside masters and moments."""
_STATE_BYTES = 24
"""Of each element, read and written by an update: master and moments. On a rig it moves as much as our own, which casts
on its way: what casting apart costs, a GPU says."""


@dataclass(frozen=True, slots=True)
class TorchAdamW:
    """The system, with the clipping of the run that is compared with it."""

    max_grad_norm: float | None
    skip_nonfinite: bool

    NAME = "torch.optim.AdamW(fused=True)"


class FusedAdamW:
    """`torch.optim.AdamW(fused=True)` on fp32 masters, which are the weights themselves where these are fp32.

    Sharded parameters are updated in their rows.
    """

    config = None
    host_engine = ("none", 0)
    """Name and threads."""

    def __init__(self, parameters: Iterator[nn.Parameter], *, lr: float, system: TorchAdamW, device: Device) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._system = system
        self._device = device
        self._history = History(device)
        self._step = 0
        self._parts = [_Part(part, lr) for part in _parts(self._parameters)]

    @property
    def last_end(self) -> Mark | None:
        return self._history.last_end

    def history(self, *, wait: bool = False, after: int = 0) -> list[StepStats]:
        return self._history.steps(wait=wait, after=after)

    def record_timeline(self) -> None:
        """There is no update window to record."""

    def timeline(self) -> None:
        """There is none."""

    def host_bytes(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        """Nothing is pending."""

    abandon = close

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        self._history.begin_step()
        skip = self._clip()
        for part in self._parts:
            self._device.charge(part.step(skip))
        self._step += 1
        self._history.end_step(self._step, Traffic())

    def _clip(self) -> torch.Tensor | None:
        """0-dim fp32: not 0 where the step is to be skipped; None where none is."""
        system = self._system
        if system.max_grad_norm is None and not system.skip_nonfinite:
            return None
        if system.max_grad_norm is None:
            norm = torch.nn.utils.get_total_norm([one.grad for one in self._parameters if one.grad is not None])
        else:
            norm = torch.nn.utils.clip_grad_norm_(self._parameters, system.max_grad_norm)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of sharded gradients, a DTensor
        return (~norm.isfinite()).float() if system.skip_nonfinite else None


class _Part:
    def __init__(self, parameters: Sequence[nn.Parameter], lr: float) -> None:
        self._parameters = parameters
        self._weights = [local_rows(parameter.detach()) for parameter in parameters]
        self._masters = [nn.Parameter(weights.float()) for weights in self._weights]
        self._optimizer = torch.optim.AdamW(self._masters, lr=lr, fused=True)

    def step(self, skip: torch.Tensor | None) -> int:
        nbytes = 0
        written: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        for parameter, weights, master in zip(self._parameters, self._weights, self._masters, strict=True):
            master.grad = None if parameter.grad is None else local_rows(parameter.grad).float()
            if master.grad is None:
                continue
            nbytes += (_STATE_BYTES + 2 * weights.itemsize) * weights.numel()
            if weights.dtype != torch.float32:
                written[0].append(weights)
                written[1].append(master.detach())
        if skip is not None:
            self._optimizer.found_inf = skip  # type: ignore[attr-defined]  # GradScaler's protocol; read on the device
        self._optimizer.step()
        if written[0]:
            torch._foreach_copy_(*written)
        self._optimizer.zero_grad()
        return nbytes


def _parts(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    part: list[nn.Parameter] = []
    elements = 0
    for parameter in parameters:
        if part and elements + parameter.numel() > _PART_ELEMENTS:
            yield part
            part, elements = [], 0
        part.append(parameter)
        elements += parameter.numel()
    if part:
        yield part


_PATIENCE = timedelta(minutes=5)
"""After which a rank gives up the others."""

Work = Callable[[int], None]
"""What a rank does; told its number. Of a module, since the others are other processes."""


@contextmanager
def several_ranks(ranks: int, work: Work) -> Iterator[None]:
    """Be the first of several ranks, which meet over gloo, for as long as the block lasts; one needs nothing.

    Args:
        work: of the others, each in a process of its own; meets this one in the same collectives.

    Raises:
        ProfileError: another rank could not go on, with what it said.
    """
    if ranks == 1:
        yield
        return
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        begun, ears = [], []
        for rank in range(1, ranks):
            ear, mouth = context.Pipe(duplex=False)
            process = context.Process(target=_companion, args=(rank, ranks, folder, work, mouth), daemon=True)
            process.start()
            mouth.close()
            begun.append(process)
            ears.append(ear)
        try:
            _meet(0, ranks, folder)
            yield
        except RuntimeError as error:  # torch's, where another rank has left a collective
            _part()
            for said in filter(None, map(_heard, ears)):
                raise ProfileError(said) from error
            raise
        except BaseException:  # of this rank alone: the others would fail in the next collective, and say so
            for process in begun:
                process.terminate()
            raise
        finally:
            _part()
            for process in begun:
                process.join(_PATIENCE.total_seconds())


def _meet(rank: int, ranks: int, folder: str) -> None:
    store = f"file://{Path(folder) / 'ranks'}"
    torch.distributed.init_process_group("gloo", store, rank=rank, world_size=ranks, timeout=_PATIENCE)


def _part() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _companion(rank: int, ranks: int, folder: str, work: Work, mouth: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the first rank hears it, and ends this one
    try:
        _meet(rank, ranks, folder)
        work(rank)
    except ZftuneError as error:
        mouth.send(str(error))
    finally:
        mouth.close()
        _part()


def _heard(ear: Connection) -> str | None:
    try:
        return str(ear.recv()) if ear.poll(_PATIENCE.total_seconds()) else None
    except EOFError:
        return None


_NOT_KERNELS = ("Memcpy", "Memset")

_LAUNCH_CALLS = "Launch"
"""In the name of every call that launches: cudaLaunchKernel, cuLaunchKernelEx, cudaGraphLaunch."""


_LEAST_STEPS, _MOST_STEPS = 3, 5


def calibration_steps(window: int) -> int:
    """Steps to profile: whole windows where these are not too long."""
    return min(_MOST_STEPS, -(-_LEAST_STEPS // window) * window)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that ran on the device. Times in nanoseconds, on the profiler's clock."""

    begin_ns: int
    end_ns: int
    launched_ns: int | None
    """When the call that launched it returned; None: not seen."""


@dataclass(frozen=True, slots=True)
class Idle:
    """Milliseconds that the device ran no kernel, from the first of some steps' kernels to the last."""

    steps: int
    total_ms: float
    unlaunched_ms: float
    """Of these, before the kernel that ends a gap was launched."""

    def document(self, stats: Sequence[StepStats]) -> dict[str, Any]:
        """The "idle" of a profile.

        Returns:
            Mean milliseconds of a step, in all and by cause. "stall": covered by events around waits; "launch": the
            training thread had launched nothing, and was not blocked in one of these waits; "other": what is left.
        """
        stall = min(self.total_ms, sum(sum((one.stall_ms or {}).values()) for one in stats))
        # Where the thread is blocked for the host or the link and the device idles, nothing is launched either.
        blocked = sum(max(0.0, one.cpu_wait_ms - (one.hidden_ms or 0.0)) for one in stats)
        launch = min(max(0.0, self.unlaunched_ms - blocked), self.total_ms - stall)
        causes = {"stall": stall, "launch": launch, "other": self.total_ms - stall - launch}
        return {
            "steps": self.steps,
            "ms_per_step": self.total_ms / self.steps,
            "by_cause": {cause: max(0.0, value) / self.steps for cause, value in causes.items()},
        }


def idle_of(kernels: Iterable[Kernel], steps: int) -> Idle | None:
    """The gaps between kernels; None where there are none."""
    ordered = sorted(kernels, key=lambda kernel: kernel.begin_ns)
    if not ordered:
        return None
    total = unlaunched = 0
    reached = ordered[0].begin_ns
    for kernel in ordered:
        if kernel.begin_ns > reached:
            total += kernel.begin_ns - reached
            launched = reached if kernel.launched_ns is None else min(kernel.launched_ns, kernel.begin_ns)
            unlaunched += max(0, launched - reached)
        reached = max(reached, kernel.end_ns)
    return Idle(steps, total / 1e6, unlaunched / 1e6)


def kernels_in(events: Iterable[Any]) -> list[Kernel]:
    """The kernels among a profiler's events.

    Args:
        events: of Kineto; copies and fills are no kernels, they run beside them.
    """
    launches: dict[int, int] = {}
    found = []
    for event in events:
        if event.device_type() == DeviceType.CPU:
            if _LAUNCH_CALLS in event.name():
                launches[event.correlation_id()] = event.end_ns()
        elif not event.is_user_annotation() and not event.name().startswith(_NOT_KERNELS):
            found.append(event)
    return [Kernel(one.start_ns(), one.end_ns(), launches.get(one.correlation_id())) for one in found]


class IdleProfiler:
    """Records what the device runs in the steps that are taken within `recording`."""

    def __init__(self) -> None:
        self.events: Sequence[Any] = ()

    @contextmanager
    def recording(self, device: torch.device) -> Iterator[None]:
        """Profile what happens inside; of a GPU its kernels and launches alone, so that steps are hardly slower."""
        activity = torch.profiler.ProfilerActivity
        what = activity.CUDA if device.type == "cuda" else activity.CPU
        with torch.profiler.profile(activities=[what]) as profiler:
            yield
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        results = profiler.profiler.kineto_results if profiler.profiler is not None else None
        self.events = () if results is None else results.events()

    def idle(self, steps: int) -> Idle | None:
        """What the device idled in so many steps; None where no kernel was seen."""
        return idle_of(kernels_in(self.events), steps)
