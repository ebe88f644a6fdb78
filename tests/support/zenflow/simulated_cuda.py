"""A CUDA device that is simulated on the CPU: as asynchronous as CUDA allows, and a checker of what relies on less.

The runtime's own `CudaDevice` runs on it. Device tensors are wrappers on torch's PrivateUse1 backend, so autograd calls
hooks in its device thread as on a GPU; `torch.cuda`'s streams, events and registration of memory are replaced while a
simulation lasts. A kernel runs when it is launched. A copy between host and device runs as late as the order of streams
and what the host has waited for allow, and its target holds poison (0xFF) until then. A vector clock for each stream
says what is ordered; what is not, and what would hurt on a GPU, is a `Problem`:

- "race": memory of the device is used by two streams without order, and written by one of them
- "freed": a block of the allocator goes back to its stream while another one may still use it
- "host": host memory is used by the host, or by another copy, while a copy may still use it
- "pageable": a copy that was to be asynchronous is of memory that no single registration holds
- "temporary": a copy for which torch would make another tensor first
- "unregistered": memory is unregistered while a copy may use it, or was not registered
- "mixed": a kernel is given host memory

What a GPU would be given is counted by the part of the step (`SimulatedCuda.part`): launches, one for each operation of
torch that launches and one for each launch of Triton (in its interpreter, with TRITON_INTERPRET=1), copies, events,
and what made the host wait for the device.

Not simulated: kernels that run later than their launch (the host sees device memory through copies alone), more than
one device's memory, graph capture, and a stream for each node of autograd: backward runs on the stream that is current
where it is called. torch calls a Python backend experimental: the pinned torch has it, and what raises in a hook ends
the process.

A process can have the backend or none of its tests: see `tests.support.zenflow.simulated_process`, which gives a test
marked `simulated_cuda` its `gpu: SimulatedCuda`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import sys
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch
from torch.utils import backend_registration

import zenflow.device
from tests.support.zenflow import simulated_order
from tests.support.zenflow.simulated_order import (
    DEVICE,
    Block,
    Clock,
    Counts,
    Event,
    Flight,
    Kind,
    Problem,
    Span,
    Stream,
    lies_in,
    meet,
    merge,
    poison,
    running,
    runtime_lines,
    span_of,
    spans_of,
    unowned,
)
from tests.support.zenflow.simulated_tensor import (
    WAIT,
    SimulatedTensor,
    inner_of,
    launches_nothing,
    launches_of,
    leaves,
    outcome_of,
    restored,
    same_bytes,
    written_by,
)
from zenflow.host.native import NativeBackend
from zenflow.host.tasks import Task

_CURRENT = "simulated_cuda_stream"
_MEMORY_ALLOCATION, _ALREADY_REGISTERED, _NOT_REGISTERED = 2, 712, 713


# --- the device -----------------------------------------------------------------------------------------------------


class SimulatedCuda:
    """One device, from `simulated_cuda`.

    Args:
        arrival: how probable it is that `Event.query` finds passed what nobody has waited for.
        seed: of these chances.
    """

    def __init__(self, arrival: float, seed: int) -> None:
        self.device = DEVICE
        """Where to move a model to."""
        self.arrival = arrival
        self.chance = random.Random(seed)
        self.problems: list[Problem] = []
        """A test that leaves some fails; one that looks for them takes them with `taken_problems`."""
        self.counted: defaultdict[str, Counts] = defaultdict(Counts)
        """By the part of the step that was running; "" outside of any."""
        self.registered: list[Span] = []
        self.most_registered_bytes = sys.maxsize
        """What the driver pins. cudaHostRegister leaves its failure to the next launch of its thread, as on a GPU."""
        self.contexts: set[int] = set()
        """Devices that have been given something to do."""
        self.allocated_bytes = self.peak_bytes = 0
        """Of the device's memory."""
        self.lock = threading.RLock()
        self.reached: Sequence[Any] = ()
        """What the next kernel of Triton reaches by addresses."""
        self.streams: list[Stream] = []
        self.seen: Clock = {}
        """What the host knows to be over."""
        self.sync_mode = "default"
        self.capturing = False
        """Whether a stream is being captured into a graph."""
        self._part = ""
        self._thread = threading.local()
        self._flights: list[Flight] = []
        self._tasks: dict[int, tuple[list[Span], list[Span]]] = {}
        self._blocks: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()
        self._pinned: dict[int, Span] = {}  # by torch's own allocator
        self._numbers = itertools.count()

    # What a test asks for.

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[Counts]:
        """Count what is given to the device within, by any thread, as a part of the step; parts do not nest."""
        self._part = name
        try:
            yield self.counted[name]
        finally:
            self._part = ""

    def taken_problems(self) -> Counter[str]:
        """How many of each kind there were; afterwards there are none."""
        found = Counter[str](problem.kind for problem in self.problems)
        self.problems.clear()
        return found

    def require_clean(self) -> None:
        """AssertionError: there were problems."""
        lines = [f"{kind}: {text} @ {where}" for kind, text, where in dict.fromkeys(self.problems)]
        assert not lines, "\n".join([f"{len(self.problems)} problems", *lines[:5]])

    # What torch.cuda's stand-ins and tensors ask for.

    def counts(self) -> Counts:
        return self.counted[self._part]

    def report(self, kind: Kind, text: str) -> None:
        self.problems.append(Problem(kind, text, runtime_lines()))

    def use_context(self) -> None:
        self.contexts.add(getattr(self._thread, "device", 0))

    def set_device(self, device: torch.device | int | None) -> int:
        """The device that was current in this thread."""
        before = int(getattr(self._thread, "device", 0))
        self._thread.device = device if isinstance(device, int) else 0 if device is None else device.index or 0
        return before

    def current_stream(self, device: object = None) -> Stream:
        # torch takes it along from the thread that calls backward to the one that runs it.
        known = torch._C._get_obj_in_tls(_CURRENT) if torch._C._is_key_in_tls(_CURRENT) else None
        return self.streams[0] if known is None else known

    @contextlib.contextmanager
    def on_stream(self, stream: Stream | None) -> Iterator[None]:
        """Stands for `torch.cuda.stream`."""
        before = self.current_stream()
        torch._C._stash_obj_in_tls(_CURRENT, stream or before)
        try:
            yield
        finally:
            torch._C._stash_obj_in_tls(_CURRENT, before)

    def fail(self, code: int) -> int:
        self._thread.last_error = code
        return code

    def raise_last_error(self) -> None:
        """As a launch does, which finds what an earlier call has left."""
        code, self._thread.last_error = getattr(self._thread, "last_error", 0), 0
        if code:
            raise RuntimeError(f"CUDA error {code} of an earlier call")

    def let_host_see(self, clock: Clock) -> None:
        """The host waits for operations."""
        self.settle(clock)
        merge(self.seen, clock)

    def settle(self, clock: Clock) -> None:
        for stream, number in list(clock.items()):
            self.streams[stream].settle(number)

    def wait_for(self, stream: Stream, what: str) -> None:
        """The host waits for all of a stream, which is no event: counted, and refused where that was asked for."""
        if self.sync_mode == "error":
            raise RuntimeError(f"called a synchronizing CUDA operation: {what}")
        with self.lock:
            self.counts().waits[f"{what} @ {runtime_lines()}"] += 1
            self.let_host_see(stream.reached())

    def synchronize(self) -> None:
        """Stands for `torch.cuda.synchronize`."""
        for stream in self.streams:
            self.wait_for(stream, "synchronize")

    def block_of(self, inner: torch.Tensor) -> Block:
        storage = inner.untyped_storage()
        block = self._blocks.get(storage._cdata)
        if block is None:
            block = self._blocks[storage._cdata] = Block(self, storage.nbytes())
        return block

    def flights(self) -> list[Flight]:
        self._flights = [one for one in self._flights if one.number > self.seen.get(one.stream, 0)]
        return self._flights

    # Operations.

    def run(self, operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """An operation of torch on tensors of the device, or that makes one."""
        name = operation._schema.name.removeprefix("aten::")
        with self.lock:
            if name == "copy_":
                return self._copy(
                    args[0], args[1], bool(args[2]) if len(args) > 2 else kwargs.get("non_blocking", False)
                )
            stream = self.current_stream()
            self.settle(stream.clock)
            ours = [one for one in leaves((args, kwargs)) if isinstance(one, SimulatedTensor)]
            to_host = name == "_to_copy" and ours and torch.device(kwargs.get("device") or DEVICE).type == "cpu"
            if to_host or name in WAIT:
                self.wait_for(stream, name)
            if to_host:
                return operation(*inner_of(args), **inner_of(kwargs))
            self._require_one_device(name, ours, args, kwargs, stream)
            outcome = outcome_of(operation, name, inner_of(args), inner_of(kwargs))
            launched = None if launches_nothing(operation, name) else stream.launch()
            if launched is not None:
                self.counts().launches[name] += launches_of(name, args)
                written = written_by(operation, args, kwargs)
                for one in ours:
                    one.block.used(stream, launched, name, writes=id(one.block) in written)
            return self._wrapped(outcome, {id(one.held): one for one in ours}, stream, launched)

    def _require_one_device(
        self, name: str, ours: list[SimulatedTensor], args: Sequence[Any], kwargs: dict[str, Any], stream: Stream
    ) -> None:
        others = [one for one in leaves((args, kwargs)) if not isinstance(one, SimulatedTensor) and one.dim()]
        if not ours or not others or name in ("set_", "_to_copy"):
            return
        if name in ("index", "index_put_"):  # torch sends indices, and waits
            self.wait_for(stream, f"{name} by an index in host memory")
        else:
            self.report("mixed", f"{name} is given host memory of {[tuple(one.shape) for one in others]}")

    def _wrapped(self, value: Any, known: dict[int, SimulatedTensor], stream: Stream, launched: int | None) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self._wrapped(one, known, stream, launched) for one in value)
        if not isinstance(value, torch.Tensor) or isinstance(value, SimulatedTensor):
            return value
        if id(value) in known:
            return known[id(value)]
        made = SimulatedTensor(value)
        if launched is not None:
            made.block.filled(stream, launched)
        return made

    def launch_triton(self, plain: Callable[..., None], executor: Any, *args: Any, **kwargs: Any) -> None:
        """Stands for a launch in Triton's interpreter: what it wrote is found by comparing."""
        with self.lock:
            ours = [one for one in leaves((args, kwargs, self.reached)) if isinstance(one, SimulatedTensor)]
            if not ours:
                return plain(executor, *args, **kwargs)
            stream = self.current_stream()
            self.settle(stream.clock)
            launched = stream.launch()
            before = [one.held.clone() for one in ours]
            plain(executor, *inner_of(args), **inner_of(kwargs))
            self.counts().launches[executor.fn.__name__] += 1
            wrote = {id(one.block) for one, old in zip(ours, before, strict=True) if not same_bytes(one.held, old)}
            for one in ours:
                one.block.used(stream, launched, executor.fn.__name__, writes=id(one.block) in wrote)
        return None

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        stream = self.current_stream()
        if isinstance(target, SimulatedTensor) and isinstance(source, SimulatedTensor):
            self.settle(stream.clock)
            number = stream.launch()
            self.counts().launches["copy_"] += 1
            source.block.used(stream, number, "copy_", writes=False)
            target.block.used(stream, number, "copy_", writes=True)
            target.held.copy_(source.held)
            return target
        sends = isinstance(target, SimulatedTensor)
        host, device = (source, target) if sends else (target, source)
        assert isinstance(device, SimulatedTensor)
        if host.numel():
            self._cross(stream, host, device, "h2d" if sends else "d2h", non_blocking)
        return target

    def _cross(
        self,
        stream: Stream,
        host: torch.Tensor,
        device: SimulatedTensor,
        direction: Literal["d2h", "h2d"],
        non_blocking: bool,
    ) -> None:
        """Queue a copy over the link, which runs when something has waited for it."""
        inner, sends, span = device.held, direction == "h2d", span_of(host)
        plain = host.is_contiguous() and inner.is_contiguous() and host.dtype == inner.dtype
        if non_blocking and not plain:
            self.report("temporary", f"{direction} of {host.dtype} {host.stride()}, {inner.dtype} {inner.stride()}")
        number = stream.launch()
        self.counts().copies[direction] += 1
        device.block.used(stream, number, direction, writes=sends)
        self._check_host(stream, span, direction)
        pinned, registered = (lies_in(span, spans) for spans in (list(self._pinned.values()), self.registered))
        self._flights.append(Flight(stream.number, number, span, not sends, runtime_lines(), host if pinned else None))
        there = unowned(host) if registered and host.is_contiguous() else host
        to, source = (inner, there) if sends else (there, inner)
        if to.is_contiguous():
            poison(to)
        stream.postpone(number, lambda: to.copy_(source))
        if not non_blocking:
            self.wait_for(stream, f"a blocking {direction}")
        elif not pinned and not registered:
            self.report("pageable", f"{direction} of {host.nbytes} bytes")
            self.let_host_see(stream.reached())

    def _check_host(self, stream: Stream, span: Span, direction: str) -> None:
        for reads, writes in self._tasks.values():
            if any(meet(one, span) for one in (writes if direction == "h2d" else reads + writes)):
                self.report("host", f"{direction} is queued for memory that the host is using")
        for other in self.flights():
            ordered = other.number <= stream.clock.get(other.stream, 0)
            if meet(other.span, span) and (other.writes or direction == "d2h") and not ordered:
                self.report("host", f"{direction} meets a copy without order, queued at {other.where}")

    def pinned_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """As torch's allocator of pinned memory gives it, which keeps a block until the copies of it are over."""
        made = torch.zeros(tuple(shape), dtype=dtype, device="cpu")
        if made.nbytes > self.most_registered_bytes:
            raise RuntimeError(f"CUDA error {_MEMORY_ALLOCATION}: {made.nbytes} bytes of pinned memory")
        if made.numel():
            poison(made)
            number = next(self._numbers)
            self._pinned[number] = span_of(made)
            weakref.finalize(made.untyped_storage(), self._pinned.pop, number)
        return made

    # Work of the host engine.

    def started(self, plain: Callable[..., int], backend: NativeBackend, task: Task) -> int:
        """Stands for `NativeBackend.start`."""
        reads, writes = spans_of(task)
        with self.lock:
            for flight in self.flights():
                if flight.writes and any(meet(one, flight.span) for one in reads):
                    self.report("host", f"the host reads what a copy may still write, queued at {flight.where}")
                if any(meet(one, flight.span) for one in writes):
                    self.report("host", f"the host writes what a copy may still use, queued at {flight.where}")
            ticket = plain(backend, task)
            self._tasks[ticket] = reads, writes
        return ticket

    def finished(self, plain: Callable[..., Any], backend: NativeBackend, ticket: int) -> Any:
        """Stands for `NativeBackend.finish`."""
        try:
            return plain(backend, ticket)
        finally:
            with self.lock:
                self._tasks.pop(ticket, None)


class _Cudart:
    """Stands for what `torch.cuda.cudart()` gives."""

    def __init__(self, gpu: SimulatedCuda) -> None:
        self._gpu = gpu

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        gpu = self._gpu
        with gpu.lock:
            gpu.use_context()
            span = address, address + nbytes
            if any(meet(span, other) for other in gpu.registered):
                return gpu.fail(_ALREADY_REGISTERED)
            if sum(high - low for low, high in gpu.registered) + nbytes > gpu.most_registered_bytes:
                return gpu.fail(_MEMORY_ALLOCATION)
            gpu.registered.append(span)
            return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        gpu = self._gpu
        with gpu.lock:
            gpu.use_context()
            found = [span for span in gpu.registered if span[0] == address]
            if not found:
                gpu.report("unregistered", "memory that is not registered is unregistered")
                return gpu.fail(_NOT_REGISTERED)
            gpu.registered.remove(found[0])
            for flight in gpu.flights():
                if meet(flight.span, found[0]):
                    verb = "writes" if flight.writes else "reads"
                    text = (
                        f"memory is unregistered while a copy that {verb} it may run; it was queued at {flight.where}"
                    )
                    gpu.report("unregistered", text)
                    gpu.settle({flight.stream: flight.number})  # or it would be of memory that is not there
            return 0


@contextlib.contextmanager
def simulated_cuda(*, arrival: float = 0.3, seed: int = 0, kernels: str = "eager") -> Iterator[SimulatedCuda]:
    """Let the runtime find a CUDA device at `SimulatedCuda.device`, until the end of the block.

    Args:
        arrival: how probable it is that a copy is over which nobody has waited for, each time it is asked.
        seed: of these chances.
        kernels: "eager", or "triton" in a process with TRITON_INTERPRET=1.
    """
    _register_backend()
    gpu = SimulatedCuda(arrival, seed)
    simulated_order.run(gpu)
    Stream()
    gpu.contexts.clear()
    try:
        with contextlib.ExitStack() as replaced, torch.serialization.safe_globals([restored]):
            for owner, name, stand_in in _stand_ins(gpu):
                replaced.enter_context(mock.patch.object(owner, name, stand_in))
            if kernels == "triton":
                from triton.runtime.interpreter import GridExecutor

                from zenflow.kernels import launcher

                launch = functools.partialmethod(_launched, GridExecutor.__call__)
                replaced.enter_context(mock.patch.object(GridExecutor, "__call__", launch))
                reaching = functools.partial(_reaching, launcher.plain_launch)
                replaced.enter_context(mock.patch.object(launcher, "plain_launch", reaching))
            replaced.enter_context(mock.patch.dict(os.environ, ZENFLOW_KERNELS=kernels))
            yield gpu
    finally:
        simulated_order.run(None)
        torch._C._stash_obj_in_tls(_CURRENT, None)


def _launched(executor: Any, plain: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    running().launch_triton(plain, executor, *args, **kwargs)


def _reaching(
    plain: Callable[..., None], kernel: Any, programs: int, args: Sequence[Any], options: Any, reaches: Sequence[Any]
) -> None:
    """Launch what reaches memory by addresses, too."""
    gpu = running()
    with gpu.lock:
        gpu.reached = reaches
        try:
            plain(kernel, programs, args, options, reaches)
        finally:
            gpu.reached = ()


def _stand_ins(gpu: SimulatedCuda) -> Iterator[tuple[Any, str, Any]]:
    """What is replaced while a simulation lasts: where, its name, and by what."""
    properties = SimpleNamespace(total_memory=80 << 30, pci_bus_id=None)
    for name, stand_in in {
        "Stream": Stream,
        "Event": Event,
        "current_stream": gpu.current_stream,
        "stream": gpu.on_stream,
        "cudart": functools.partial(_Cudart, gpu),
        "check_error": _check_error,
        "set_device": gpu.set_device,
        "device": functools.partial(_on_device, gpu),
        "synchronize": lambda device=None: gpu.synchronize(),
        "is_current_stream_capturing": lambda: gpu.capturing,
        "get_device_properties": lambda device=None: properties,
        "max_memory_allocated": lambda device=None: gpu.peak_bytes,
        "reset_peak_memory_stats": lambda device=None: setattr(gpu, "peak_bytes", gpu.allocated_bytes),
        "set_sync_debug_mode": lambda mode: setattr(gpu, "sync_mode", mode),
    }.items():
        yield torch.cuda, name, stand_in
    empty, tensor_of, start, finish = torch.empty, torch.tensor, NativeBackend.start, NativeBackend.finish

    def pinned_or_not(*shape: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        return gpu.pinned_empty(shape[0], more["dtype"]) if pin_memory else empty(*shape, **more)

    shares: Any = torch._C._is_cow_tensor  # type: ignore[attr-defined]
    yield torch._C, "_is_cow_tensor", lambda tensor: shares(inner_of(tensor))

    def sent(data: Any, *, device: Any = None, **more: Any) -> torch.Tensor:
        """torch makes a tensor of data where no Python backend can tell the operation."""
        made = tensor_of(data, device="cpu", **more)
        return made if device is None else made.to(device)

    yield torch, "tensor", sent
    yield torch, "empty", pinned_or_not
    yield NativeBackend, "start", lambda backend, task: gpu.started(start, backend, task)
    yield NativeBackend, "finish", lambda backend, ticket: gpu.finished(finish, backend, ticket)
    plain = zenflow.device.device_for
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("device_for") is plain:
            yield module, "device_for", functools.partial(_device_for, plain)


def _device_for(plain: Callable[..., Any], torch_device: torch.device, computing: torch.device | None = None) -> Any:
    if torch_device.type == DEVICE.type:
        return zenflow.device.CudaDevice(torch_device)
    return plain(torch_device, computing)


@contextlib.contextmanager
def _on_device(gpu: SimulatedCuda, device: torch.device | int) -> Iterator[None]:
    before = gpu.set_device(device)
    try:
        yield
    finally:
        gpu.set_device(before)


def _check_error(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA error {code}")


@functools.cache
def _register_backend() -> torch.library.Library:
    """For good: autograd's device threads are made with the first backward of a process, for the backends there are."""

    class Module(backend_registration._DummyBackendModule):
        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.float16, torch.bfloat16]

        def get_rng_state(self, device: object = None) -> torch.Tensor:
            return torch.get_rng_state()

        def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
            torch.set_rng_state(state)

        def device(self, device: object) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

    backend_registration._setup_privateuseone_for_python_backend(rename="simulated", backend_module=Module())
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda operation, *args, **kwargs: running().run(operation, args, kwargs), "PrivateUse1")
    return library
