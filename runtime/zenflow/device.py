"""Accelerators as the runtime sees them: a compute stream, a copy stream each way, and marks to time them.

This module is the only one that knows CUDA. zftune's emulated accelerator is the second implementation with streams;
`CpuDevice` has none, and its waits are not called stalls.
"""

from __future__ import annotations

import threading
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from zenflow.clock import REAL_CLOCK, Clock
from zenflow.errors import UnsupportedError
from zenflow.host.cores import gpu_numa_node
from zenflow.host.places import finalize

Mark = Any
"""A point on a device's timeline; only its own device can compare two of them."""

Collective = Literal["gather", "reduce_scatter", "all_reduce"]
Direction = Literal["d2h", "h2d"]


class Transfer(ABC):
    """A copy over the link that was queued; any thread may wait for it."""

    begin: Mark
    end: Mark
    nbytes: int

    @abstractmethod
    def wait(self) -> None:
        """Block the calling thread until the bytes are there."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the bytes are there."""


@dataclass(slots=True)
class HostSpan:
    """One piece of work on the host: when it began and ended, in seconds of the device's host clock."""

    begin_s: float = 0.0
    end_s: float = 0.0

    @property
    def seconds(self) -> float:
        """How long the work took (on a rig: how long the rig's host takes for it)."""
        return self.end_s - self.begin_s


class Observer(Protocol):
    """Told of what goes on beside the compute stream; `zenflow.history` has the one that there is."""

    def transferred(self, direction: Direction, transfer: Transfer) -> None:
        """A copy was queued; any thread may call it."""

    def worked(self, name: str, span: HostSpan) -> None:
        """Host work was done; a thread of the host engine calls it."""


_T = TypeVar("_T", bound=Transfer)


class Device(ABC):
    """One accelerator. Methods are called by the training thread, except those that say otherwise."""

    torch_device: torch.device
    has_streams: bool
    """Whether `mark` times a device stream, so that a wait on it is a stall."""
    in_host_memory: bool = False
    """Whether its memory is the host's, so that what goes to the host can be written there at once."""
    takes_host_cores: bool = False
    """Whether steps are computed by the host's cores, so that host work beside them slows them down."""
    clock: Clock = REAL_CLOCK
    """Whoever works with this device waits and measures by it."""
    observer: Observer | None = None
    """Told of copies and host work while a timeline is recorded."""
    pin_bytes: int | None = None
    """Most bytes that `pin` is given at a time, which takes so long that it is left to other threads; None: it does
    nothing."""

    def observed(self, direction: Direction, transfer: _T) -> _T:
        """Tell the observer, if there is one, of a copy that was queued."""
        observer = self.observer  # another thread may take it away
        if observer is not None:
            observer.transferred(direction, transfer)
        return transfer

    @abstractmethod
    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised host memory that the copy streams can reach (pinned where that exists)."""

    @abstractmethod
    def mark(self) -> Mark:
        """Record the point that the compute stream has been given work up to."""

    def asked(self) -> Mark:
        """Where the compute stream is, for host work or a copy up that is asked for now; None: that does not matter."""
        return self.mark()

    def current_stream(self) -> int:
        """Which stream the calling thread's work goes to, and `mark` records on; 0 where there is only one."""
        return 0

    def in_order(self) -> AbstractContextManager[None]:
        """Queue work in the order of the stream that the last step was on, whichever stream is current here."""
        return nullcontext()

    @abstractmethod
    def elapsed_s(self, begin: Mark, end: Mark) -> float:
        """Seconds between two marks that have both been passed; negative if `end` came first."""

    @abstractmethod
    def passed(self, mark: Mark) -> bool:
        """Whether the device has reached a mark."""

    @abstractmethod
    def wait_for(self, mark: Mark) -> None:
        """Block the calling thread until the device has reached a mark."""

    def host_time_s(self, mark: Mark) -> float | None:
        """When a mark was passed, by `clock`; None where the device has a clock of its own."""
        return None

    @abstractmethod
    def d2h(self, source: torch.Tensor, target: torch.Tensor) -> Transfer:
        """Queue a copy to host memory, after all work that the compute stream has so far."""

    @abstractmethod
    def h2d(self, source: torch.Tensor, after: HostSpan, asked: Mark) -> tuple[Transfer, torch.Tensor]:
        """Queue a copy of host memory into new device memory; any thread may call it.

        `source` must not change until the transfer is done; `after` is the finished host work that produced it, `asked`
        where the compute stream was when the copy was asked for.
        """

    @abstractmethod
    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a small host tensor, made in the order of the compute stream and without waiting for it."""

    @abstractmethod
    def join(self, transfer: Transfer, tensor: torch.Tensor) -> None:
        """Let the compute stream wait for a copy, before work that reads `tensor`."""

    def block_on(self, transfer: Transfer) -> None:
        """Block the training thread until a copy has arrived; what it queues next comes later than that."""
        transfer.wait()

    def caught_up(self, span: HostSpan) -> None:  # noqa: B027 - only an emulated accelerator has to be told
        """Say that the training thread has waited for host work; what it queues next comes later than that."""

    def pin(self, array: NDArray[np.uint8]) -> None:  # noqa: B027 - only where copy streams need it
        """Let the copy streams reach host memory that was allocated elsewhere, until it is freed.

        Any thread may call it. No copy crosses the border between two such arrays.
        """

    def numa_node(self) -> int | None:
        """The NUMA node that the device is attached to; None where that is not known or means nothing."""
        return None

    def host_work(
        self, finish: Callable[[], HostSpan], nbytes: int, inputs: Sequence[Transfer], submitted: Mark
    ) -> HostSpan:
        """Wait for a piece of host work that was begun; when it counts as done, by `clock`.

        The host engine calls it, job after job. `finish` blocks until the work is done, and returns when that was by
        the machine's clock; `nbytes` is its memory traffic, `submitted` where the compute stream was at its submission.
        """
        return finish()

    def begin_step(self) -> None:  # noqa: B027 - only an emulated accelerator has to be told
        """Say that backward is over and `step()` begins."""

    def let_go_of_weights(self) -> None:  # noqa: B027 - only where it computes with copies of them
        """Block the training thread until nothing reads the weights that was queued so far: they are to be written."""

    def charge(self, nbytes: int) -> None:  # noqa: B027 - only an emulated accelerator has to be told
        """Say that the compute stream was just given a kernel that moves `nbytes` of device memory."""

    def charge_thread(self, weights: int = 0, buckets: int = 0, jobs: int = 0, launches: int = 0) -> None:  # noqa: B027 - only in simulated time
        """Say how many weights the training thread just looked at, buckets it sent, jobs it submitted, and launches."""

    def meet(self, nbytes: int, ranks: int, latest: Callable[[float], float]) -> None:  # noqa: B027 - only in simulated time
        """Say that the compute stream waits for a collective of all ranks, each of which calls this.

        `nbytes` are averaged; 0: it is the training threads that wait for each other. `latest` gives the greatest of
        all ranks' values.
        """

    def comm_s(self) -> Mapping[Collective, float]:
        """Seconds that the compute stream waited in FSDP2's collectives since this was asked last; {}: not known."""
        return {}

    def enter_thread(self) -> None:  # noqa: B027
        """Prepare a new thread that will call this device."""

    def peak_bytes(self) -> int | None:
        """Peak of the device memory in use, or None where there is no such memory."""
        return None

    def total_bytes(self) -> int | None:
        """The device's memory, or None where there is no such memory."""
        return None

    def reset_peak_bytes(self) -> None:  # noqa: B027 - only where there is such memory
        """Forget the peak of the memory."""

    def reset_peaks(self) -> None:  # noqa: B027
        """Forget what was counted so far: the peak of the memory, on a rig the slack."""

    def close(self) -> None:  # noqa: B027
        """End the device's own threads."""


class Arrived(Transfer):
    """A copy that was over when it was asked for."""

    def __init__(self, mark: Mark, nbytes: int) -> None:
        self.begin = self.end = mark
        self.nbytes = nbytes

    def wait(self) -> None:
        return None

    def done(self) -> bool:
        return True


class OnHost(Device):
    """A device that works in the host's memory, and whose marks are times of its clock."""

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")

    def elapsed_s(self, begin: Mark, end: Mark) -> float:
        return float(end - begin)

    def host_time_s(self, mark: Mark) -> float | None:
        return float(mark)

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()


class CpuDevice(OnHost):
    """No accelerator: copies are made on the spot and marks are wall time."""

    has_streams = False
    in_host_memory = True
    takes_host_cores = True

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def mark(self) -> Mark:
        return self.clock.now()

    def passed(self, mark: Mark) -> bool:
        return True

    def wait_for(self, mark: Mark) -> None:
        return None

    def d2h(self, source: torch.Tensor, target: torch.Tensor) -> Transfer:
        target.copy_(source)
        return Arrived(self.mark(), source.nbytes)

    def h2d(self, source: torch.Tensor, after: HostSpan, asked: Mark) -> tuple[Transfer, torch.Tensor]:
        return Arrived(self.mark(), source.nbytes), source.clone()

    def join(self, transfer: Transfer, tensor: torch.Tensor) -> None:
        return None


class HostWeights(CpuDevice):
    """The host as the home of weights that an accelerator computes with copies of (FSDP2's `CPUOffloadPolicy`).

    FSDP2 copies each unit's rows to the accelerator and each gradient back, in its own streams and in pinned memory; it
    has waited for the gradients at the end of backward. What is done here is the host's work alone.
    """

    takes_host_cores = False

    def __init__(self, computing: torch.device) -> None:
        super().__init__()
        self._computing = computing

    def h2d(self, source: torch.Tensor, after: HostSpan, asked: Mark) -> tuple[Transfer, torch.Tensor]:
        return Arrived(self.mark(), source.nbytes), source  # from where it is written into the weights

    def let_go_of_weights(self) -> None:
        # A gather without a backward pass behind it, as in evaluation, may not have read its rows yet.
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def numa_node(self) -> int | None:
        there = self._computing.type == "cuda" and torch.cuda.is_available()
        return _numa_node_of(self._computing) if there else None


class _CudaMark:
    """An event that goes back to its device's with the last reference: CUDA's are dear to make and to destroy."""

    __slots__ = ("_others", "event")

    def __init__(self, event: torch.cuda.Event, others: deque[torch.cuda.Event]) -> None:
        self.event = event
        self._others = others

    def __del__(self) -> None:
        self._others.append(self.event)


class _CudaTransfer(Transfer):
    begin: _CudaMark
    end: _CudaMark

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def wait(self) -> None:
        self.end.event.synchronize()

    def done(self) -> bool:
        return bool(self.end.event.query())


class CudaDevice(Device):
    """An NVIDIA GPU through torch.cuda: two copy streams beside the current stream, pinned host memory."""

    has_streams = True
    pin_bytes = 1 << 30  # the driver has a lock while it pins, and may refuse very much at a time

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch.empty(0, dtype=torch.uint8, device=torch_device).device  # with its index
        self._d2h_stream = torch.cuda.Stream(self.torch_device)
        self._h2d_stream = torch.cuda.Stream(self.torch_device)
        self._h2d_lock = threading.Lock()  # the training thread and the host engine both queue copies
        self._step_stream: torch.cuda.Stream | None = None
        self._said_pageable = False
        self._events: deque[torch.cuda.Event] = deque()  # that nobody needs; threads take and give

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        try:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)
        except RuntimeError as error:
            pageable = torch.empty(tuple(shape), dtype=dtype, device="cpu")
            self._say_pageable(pageable.nbytes, error)
            return pageable

    def mark(self) -> _CudaMark:
        return self._mark_of(torch.cuda.current_stream(self.torch_device))

    def _mark_of(self, stream: torch.cuda.Stream) -> _CudaMark:
        try:
            event = self._events.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True, blocking=True)  # a spinning wait would take a host core
        event.record(stream)
        return _CudaMark(event, self._events)

    def asked(self) -> Mark:
        return None  # copies are queued where they are asked for

    def begin_step(self) -> None:
        self._refuse_capture()
        self._step_stream = torch.cuda.current_stream(self.torch_device)

    def _refuse_capture(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "a CUDA graph is being captured, which repeats neither host work nor what waits for it: call "
                "step() outside the graph; with ZenFlowConfig(stream=False) backward may be inside it"
            )

    @contextmanager
    def in_order(self) -> Iterator[None]:
        here = torch.cuda.current_stream(self.torch_device)
        with torch.cuda.stream(self._step_stream or here):
            yield
        here.wait_stream(self._step_stream or here)

    def current_stream(self) -> int:
        return int(torch.cuda.current_stream(self.torch_device).cuda_stream)

    def elapsed_s(self, begin: Mark, end: Mark) -> float:
        return float(begin.event.elapsed_time(end.event)) / 1e3

    def passed(self, mark: Mark) -> bool:
        return bool(mark.event.query())

    def wait_for(self, mark: Mark) -> None:
        mark.event.synchronize()

    def d2h(self, source: torch.Tensor, target: torch.Tensor) -> Transfer:
        self._refuse_capture()
        transfer = _CudaTransfer(source.nbytes)
        stream = self._d2h_stream
        written = self.mark()  # held until it is waited for: another thread would record the event anew
        stream.wait_event(written.event)
        with torch.cuda.stream(stream):
            transfer.begin = self._mark_of(stream)
            target.copy_(source, non_blocking=True)
            transfer.end = self._mark_of(stream)
        source.record_stream(stream)  # the caching allocator must not hand it out before the copy
        return self.observed("d2h", transfer)

    def h2d(self, source: torch.Tensor, after: HostSpan, asked: Mark) -> tuple[Transfer, torch.Tensor]:
        transfer = _CudaTransfer(source.nbytes)
        stream = self._h2d_stream
        with self._h2d_lock, torch.cuda.stream(stream):
            transfer.begin = self._mark_of(stream)
            tensor = source.to(self.torch_device, non_blocking=True)
            transfer.end = self._mark_of(stream)
        return self.observed("h2d", transfer), tensor

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        pinned = self.host_empty(tensor.shape, tensor.dtype).copy_(tensor)  # from pageable memory it would wait
        return pinned.to(self.torch_device, non_blocking=True)

    def join(self, transfer: Transfer, tensor: torch.Tensor) -> None:
        stream = torch.cuda.current_stream(self.torch_device)
        stream.wait_event(transfer.end.event)
        tensor.record_stream(stream)  # allocated on the copy stream, read on this one

    def pin(self, array: NDArray[np.uint8]) -> None:
        # Not through torch's pinned allocator, which gives out powers of two.
        runtime: Any = torch.cuda.cudart()
        address = array.ctypes.data
        try:
            with torch.cuda.device(self.torch_device):  # or the current one, be it another, is given a context
                torch.cuda.check_error(runtime.cudaHostRegister(address, array.nbytes, 0))
        except RuntimeError as error:
            _clear_error(self.torch_device)
            self._say_pageable(array.nbytes, error)
            return
        streams = self._d2h_stream, self._h2d_stream
        finalize(array, _unregister, runtime, self.torch_device, address, streams).atexit = False

    def _say_pageable(self, nbytes: int, error: RuntimeError) -> None:
        """Warn once that memory could not be pinned; copies of it are right all the same."""
        if not self._said_pageable:
            self._said_pageable = True
            reason = str(error).partition("\n")[0]
            what = f"the driver does not pin {nbytes} bytes of host memory ({reason})"
            warnings.warn(f"{what}: copies of them make training wait", stacklevel=2)

    def numa_node(self) -> int | None:
        return _numa_node_of(self.torch_device)

    def enter_thread(self) -> None:
        torch.cuda.set_device(self.torch_device)

    def peak_bytes(self) -> int | None:
        return int(torch.cuda.max_memory_allocated(self.torch_device))

    def total_bytes(self) -> int | None:
        return int(torch.cuda.get_device_properties(self.torch_device).total_memory)

    def reset_peak_bytes(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def reset_peaks(self) -> None:
        self.reset_peak_bytes()


def _unregister(runtime: Any, device: torch.device, address: int, streams: Iterable[torch.cuda.Stream]) -> None:
    """Take memory from the copy streams that is about to be unmapped; CUDA promises no wait of its own."""
    with torch.cuda.device(device):
        for stream in streams:
            copied = torch.cuda.Event(blocking=True)
            copied.record(stream)
            copied.synchronize()
        failed = int(runtime.cudaHostUnregister(address))
    if failed:
        _clear_error(device)


def _clear_error(device: torch.device) -> None:
    """Let a launch find the error that a call of the CUDA runtime has left in this thread, and not one of training."""
    with suppress(RuntimeError):
        torch.empty(1, dtype=torch.uint8, device=device).fill_(0)


def _numa_node_of(cuda: torch.device) -> int | None:
    properties = torch.cuda.get_device_properties(cuda)
    fields = ("pci_domain_id", "pci_bus_id", "pci_device_id")  # not in every torch release
    domain, bus, slot = (getattr(properties, name, None) for name in fields)
    return None if bus is None else gpu_numa_node(f"{domain or 0:04x}:{bus:02x}:{slot or 0:02x}.0")


def default_torch_device() -> torch.device:
    """The current GPU where there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def device_name(torch_device: torch.device) -> str:
    """What a report calls a device."""
    return torch.cuda.get_device_name(torch_device) if torch_device.type == "cuda" else "cpu"


def in_backward() -> bool:
    """Whether the calling thread is inside autograd's backward."""
    return bool(torch._C._current_graph_task_id() != -1)


def device_for(torch_device: torch.device, computing: torch.device | None = None) -> Device:
    """The device implementation for where the parameters are; `computing`, if any, computes with copies of them.

    Raises UnsupportedError for neither a CPU nor a CUDA device.
    """
    if torch_device.type == "cuda":
        return CudaDevice(torch_device)
    if torch_device.type == "cpu":
        return CpuDevice() if computing is None else HostWeights(computing)
    raise UnsupportedError(f"parameters are on {torch_device}; they must be on a CUDA device or the CPU")
