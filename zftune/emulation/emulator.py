"""The emulated accelerator: real work on the CPU, with the times that a rig says it takes.

Time on the emulated compute stream is a number that runs ahead of the clock, as a GPU's queue does: forward and
backward are done for real and their layers' times are added to it; the runtime's own device kernels are charged at a
rate. A copy starts when both its stream and the data are ready by that reckoning, and a link thread delivers it when a
link of the rig's rate would. So a wait is a wait of one thread for another, and its length follows from the rig.

Of a model that is sharded by FSDP2, simulated time has the collectives as well: each of torch's own calls, in its
bytes, at the rate of the rig's network, beside the compute that torch's streams let it go beside.

By a simulated clock nothing sleeps and nothing is late. By the machine's own, times are pads around the real work:
where that took longer the segment is late; the clock then wins and the run counts it.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from zenflow.clock import Clock, Queue
from zenflow.device import Collective, HostSpan, Mark, OnHost, Transfer, in_backward
from zenflow.errors import UnsupportedError, ZenFlowError
from zenflow.late_weights import gathered_by, units_of
from zenflow.ranks import latest
from zftune.emulation.clock import SimulatedClock
from zftune.emulation.rig import Rig


@dataclass(slots=True)
class Slack:
    """What the real work took; by the machine's clock also how far it stayed ahead of its pads."""

    segments: int = 0
    late: int = 0
    host_s: float = 0.0
    """Time that the rig's host takes for the work it was given."""
    late_host_s: float = 0.0
    """Time by which this machine's host was slower than the rig's."""
    margins_s: list[float] = field(default_factory=list)
    """Per segment: pad's end minus the moment when the real work was done; none in simulated time."""
    used: list[float] = field(default_factory=list)
    """Per segment: processor time of the training thread since the segment before, as a share of the pad."""
    worked_s: float = 0.0
    """The sum of these times."""
    steps: int = 0
    thread_s: float = 0.0
    """Time that the rig's training thread takes for the calls that were counted; only in simulated time."""
    thread_idle_s: float = 0.0
    """Time by which the compute stream had nothing to do until such a call was over."""

    def add(self, worked_s: float, pad_s: float, margin_s: float | None) -> None:
        """Count one segment."""
        self.segments += 1
        self.used.append(worked_s / pad_s)
        self.worked_s += worked_s
        if margin_s is not None:
            self.late += margin_s < 0
            self.margins_s.append(margin_s)


class _LinkTransfer(Transfer):
    def __init__(self, clock: Clock, nbytes: int, begin: float, end: float) -> None:
        self.nbytes = nbytes
        self.begin = begin
        self.end = end
        self._arrived = clock.event("a copy")
        self._error: Exception | None = None

    def wait(self) -> None:
        self._arrived.wait()
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return self._arrived.is_set()

    def deliver(self, error: Exception | None = None) -> None:
        self._error = error
        self._arrived.set()


_COPIES = 512  # of the past, enough for one host job


class _Link:
    """One direction of the link: copies one after the other at a set rate, or about it."""

    def __init__(self, clock: Clock, name: str, gbps: float, noise: float) -> None:
        self._clock = clock
        self._bytes_per_s = gbps * 1e9
        self._noise = noise
        self._random = random.Random(name)
        self._copies: deque[tuple[float, float]] = deque(maxlen=_COPIES)
        self._free_at = 0.0
        self._closed = False
        self._lock = threading.Lock()
        self._queue: Queue[tuple[_LinkTransfer, torch.Tensor, torch.Tensor] | None] = clock.queue(f"{name} copies")
        self._thread = clock.thread(self._run, f"zenflow-link-{name}")
        self._thread.start()

    def set_rate(self, gbps: float, noise: float) -> None:
        """For the copies that are asked for from now on."""
        with self._lock:
            self._bytes_per_s, self._noise = gbps * 1e9, noise

    def copy(self, source: torch.Tensor, target: torch.Tensor, ready_at: float) -> _LinkTransfer:
        with self._lock:
            if self._closed:
                raise ZenFlowError("a copy was requested after close()")
            begin = max(self._free_at, ready_at)
            self._free_at = begin + source.nbytes / self._bytes_per_s * self._random.lognormvariate(0.0, self._noise)
            self._copies.append((begin, self._free_at))
            transfer = _LinkTransfer(self._clock, source.nbytes, begin, self._free_at)
            self._queue.put((transfer, source, target))
        return transfer

    def busy_s(self, begin: float, end: float) -> float:
        """How much of a time it moves data, as far as that is known."""
        with self._lock:
            return sum(max(0.0, min(end, last) - max(begin, first)) for first, last in self._copies)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            transfer, source, target = item
            # Copied when it is due and not before: what changes a source too early then shows, as on a real link.
            self._clock.sleep_until(transfer.end)
            try:
                target.copy_(source)
            except Exception as error:  # noqa: BLE001 - raised again in the thread that waits for the copy
                transfer.deliver(error)
            else:
                transfer.deliver()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._queue.put(None)  # behind every copy that was asked for
        self._thread.join()


@dataclass(slots=True)
class EmulatedMemory:
    """The memory of an emulated accelerator: counted, not allocated."""

    total_bytes: int
    activation_bytes: int
    """That forward keeps for backward; may be changed between two steps, as where sequences get longer."""
    held: Callable[[], int]
    """Bytes of all that stays: weights, gradients, and the states that the runtime keeps on the device."""
    peak_bytes: int = 0

    def take(self) -> None:
        """Count what there is at the end of forward.

        Raises:
            torch.OutOfMemoryError: it does not fit.
        """
        needed = self.held() + self.activation_bytes
        if needed > self.total_bytes:
            raise torch.OutOfMemoryError(
                f"the emulated accelerator has {self.total_bytes} bytes of memory, a step needs {needed}"
            )
        self.peak_bytes = max(self.peak_bytes, needed)


class EmulatedAccelerator(OnHost):
    """A rig's accelerator on the CPU.

    Attach the model before training so that its layers take their times; every mark is a time in seconds of the clock.

    Args:
        memory: what it can hold; None: no limit.
        clock: by which it takes its times; None: simulated time of its own, in which the calling thread takes part.
    """

    has_streams = True

    def __init__(self, rig: Rig, memory: EmulatedMemory | None = None, clock: Clock | None = None) -> None:
        self.clock = SimulatedClock() if clock is None else clock
        self._own_clock = self.clock if clock is None else None
        self.rig = rig
        self.memory = memory
        self.slack = Slack()
        self.torch_device = torch.device("cpu")
        self._compute_t = self.clock.now()
        self._host_t = 0.0
        self._worked_s = time.thread_time()
        self._pads: _Pads | None = None
        self._network: _Network | None = None
        self._joined_t = 0.0
        """When the last rows from the host were there for the compute stream."""
        self._d2h = _Link(self.clock, "d2h", rig.link_d2h_gbps, rig.link_noise)
        self._h2d = _Link(self.clock, "h2d", rig.link_h2d_gbps, rig.link_noise)

    def attach(self, module: nn.Module) -> None:
        """Pad this module's forward and backward passes to the rig's times, spread over its layers.

        Of a module after `fully_shard` (FSDP2) the collectives take the time of the rig's network.

        Raises:
            UnsupportedError: FSDP2 keeps weights on the host, or is of a torch that does not show its collectives.
        """
        self._pads = _Pads(module, self.rig, self._segment)
        module.register_forward_hook(self._count_memory)
        units = _units(module)
        if units:
            self._network = _Network(self, module, units)

    def set_rig(self, rig: Rig) -> None:
        """Use another rig from the next step on; call it between `step()` and the next forward pass.

        Copies that are on their way keep their times, and so does host work that is being paced.
        """
        self.rig = rig
        self._d2h.set_rate(rig.link_d2h_gbps, rig.link_noise)
        self._h2d.set_rate(rig.link_h2d_gbps, rig.link_noise)
        if self._pads is not None:
            self._pads.set_times(rig)

    def _count_memory(self, *_: Any) -> None:
        if self.memory is not None and not in_backward():
            self.memory.take()

    def mark(self) -> Mark:
        return self._compute_t

    def passed(self, mark: Mark) -> bool:
        return self.clock.now() >= float(mark)

    def wait_for(self, mark: Mark) -> None:
        self.clock.sleep_until(mark)

    def d2h(self, source: torch.Tensor, target: torch.Tensor) -> Transfer:
        return self.observed("d2h", self._d2h.copy(source, target, self._ready_t()))

    def h2d(self, source: torch.Tensor, after: HostSpan, asked: Mark) -> tuple[Transfer, torch.Tensor]:
        tensor = torch.empty_like(source)
        return self.observed("h2d", self._h2d.copy(source, tensor, max(after.end_s, asked))), tensor

    def block_on(self, transfer: Transfer) -> None:
        transfer.wait()
        self._compute_t = max(self._compute_t, transfer.end - self._queued_s())

    def caught_up(self, span: HostSpan) -> None:
        self._compute_t = max(self._compute_t, span.end_s - self._queued_s())

    def _queued_s(self) -> float:
        """Work that goes on while the training thread waits in backward: half a layer's, on average."""
        return self._ahead_s() / 2

    def _ready_t(self) -> float:
        """When a gradient that there is now is whole."""
        reduced_t = 0.0 if self._network is None else self._network.reduced_t
        return max(self._compute_t + self._ahead_s(), reduced_t)

    def _ahead_s(self) -> float:
        """Work that the compute stream was given in backward and that is not in its time yet.

        A sharded gradient is there when the backward of its unit is over.
        """
        ahead = self._pads is not None and self._network is None and in_backward()
        return self._pads.backward_ahead_s() if self._pads is not None and ahead else 0.0

    def join(self, transfer: Transfer, tensor: torch.Tensor) -> None:
        transfer.wait()
        self._compute_t = self._joined_t = max(self._compute_t, transfer.end)

    def host_work(
        self, finish: Callable[[], HostSpan], nbytes: int, inputs: Sequence[Transfer], submitted: Mark
    ) -> HostSpan:
        done_s = None if self.clock.simulated else finish().end_s
        begin = max([self._host_t, submitted, *(transfer.end for transfer in inputs)])
        seconds = nbytes / (self.rig.host_gbps * 1e9) / self.rig.slow_core
        if self.rig.link_contention:
            self.clock.sleep_until(begin + seconds)  # only then is it known what the link had to move
            busy_s = sum(link.busy_s(begin, begin + seconds) for link in (self._d2h, self._h2d))
            seconds += self.rig.link_contention * busy_s
        late_s = 0.0 if done_s is None else max(0.0, done_s - (begin + seconds))
        slack = self.slack  # the training thread may replace it
        slack.host_s += seconds
        slack.late_host_s += late_s
        self._host_t = begin + seconds + late_s
        self.clock.sleep_until(self._host_t)
        if done_s is None:
            finish()  # it went on beside the simulation
        return HostSpan(begin, self._host_t)

    def begin_step(self) -> None:
        if self._pads is not None:
            self._pads.finish_backward()
        if self._network is not None:
            self._network.wait_until(self._network.reduced_t, "reduce_scatter")

    def comm_s(self) -> Mapping[Collective, float]:
        return {} if self._network is None else self._network.taken_s()

    def charge(self, nbytes: int) -> None:
        if self.rig.device_gbps is not None:
            self._compute_t += nbytes / (self.rig.device_gbps * 1e9)

    def charge_thread(self, weights: int = 0, buckets: int = 0, jobs: int = 0, launches: int = 0) -> None:
        rig = self.rig
        self.slack.steps += weights > 0  # the runtime looks at its weights once a step
        counted = weights * rig.thread_weight_us + buckets * rig.thread_bucket_us + jobs * rig.thread_job_us
        seconds = (counted + launches * rig.thread_launch_us) / 1e6
        if not seconds or not self.clock.simulated:  # a real thread takes the time that it takes
            return
        ends = self.clock.now() + seconds
        self.clock.sleep_until(ends)
        idle_s = max(0.0, ends - self._queued_s() - self._compute_t)  # what is launched next begins later than that
        self._compute_t += idle_s
        self.slack.thread_s += seconds
        self.slack.thread_idle_s += idle_s

    def meet(self, nbytes: int, ranks: int, latest: Callable[[float], float]) -> None:
        if not self.clock.simulated:
            return  # the processes really wait for each other
        if not nbytes:
            self.clock.sleep_until(latest(self.clock.now()))
            return
        replicas = self._network is not None and self._network.replicas > 1
        sending_s = max(self._sending_s(_added_up(nbytes, ranks), replicas=there) for there in (False, replicas))
        self._compute_t = latest(self._compute_t) + sending_s

    def _sending_s(self, nbytes: float, *, replicas: bool = False) -> float:
        """Of a collective in which a rank sends so much to the others, or to those that have the same rows."""
        rate = self.rig.comm_gbps
        if replicas and self.rig.network_gbps is not None:
            rate = self.rig.network_gbps
        return self.rig.comm_latency_us / 1e6 + (0.0 if rate is None else nbytes / (rate * 1e9))

    def peak_bytes(self) -> int | None:
        return None if self.memory is None else self.memory.peak_bytes

    def total_bytes(self) -> int | None:
        return None if self.memory is None else self.memory.total_bytes

    def reset_peak_bytes(self) -> None:
        if self.memory is not None:
            self.memory.peak_bytes = 0

    def reset_peaks(self) -> None:
        self.slack = Slack()
        self.reset_peak_bytes()

    def close(self) -> None:
        self._d2h.close()
        self._h2d.close()
        if isinstance(self._own_clock, SimulatedClock):
            self._own_clock.close()

    def _segment(self, pad_s: float) -> None:
        self._compute_t += pad_s
        margin_s = self._compute_t - self.clock.now()
        worked_s, self._worked_s = time.thread_time() - self._worked_s, time.thread_time()
        self.slack.add(worked_s, pad_s, None if self.clock.simulated else margin_s)
        if margin_s < 0:
            self._compute_t -= margin_s


_DISTRIBUTED: Any = torch.distributed  # whose newest names its stubs do not have
_SHARING: tuple[Collective, ...] = ("gather", "reduce_scatter")


class _Network:
    """FSDP2's collectives in simulated time: one after the other, in the order in which they are asked for.

    What they lie beside is what torch's streams allow. In forward a unit (what `fully_shard` was called on) is gathered
    from when the unit before the last one had its weights; in backward from when the last one had; a reduce-scatter
    lies beside the backward of the next unit, at whose end the compute stream waits for it. The root's all-gather and
    the last reduce-scatter lie beside nothing. With replicas (HSDP) what was reduced is then added up over them, on a
    network of its own, which no reduce-scatter waits for.
    """

    def __init__(self, device: EmulatedAccelerator, module: nn.Module, units: Sequence[Any]) -> None:
        self._device = device
        self._free_t = self._replicas_free_t = self._scattered_t = 0.0
        self._waited_s: dict[Collective, float] = dict.fromkeys(_SHARING, 0.0)
        self.reduced_t = 0.0
        """When the last gradients that were asked for are whole."""
        self.replicas = _replicas_of(module)
        """How many ranks have the same rows."""
        self._gathered: dict[Any, float] = {}
        """Units that nobody has needed since, and when they are there."""
        self._needed: Any = None
        """The last unit whose compute began, or begins."""
        self._shown: deque[float] = deque([0.0, 0.0], maxlen=2)
        """When the last two units had their weights."""
        self._in_order: Any = None
        """The last unit that was gathered on the compute stream, since its rows were late."""
        if not device.clock.simulated:
            return  # the processes really wait for each other
        module.register_forward_pre_hook(self._begin_forward, prepend=True)
        for unit in units:
            unit.set_custom_all_gather(_Gather(self, unit))
            unit.set_custom_reduce_scatter(_Scatter(self))
            if self.replicas > 1:
                unit.set_all_reduce_hook(self._add_up)
            # Before FSDP2's own hooks, which ask for what is not there, and for the unit after it.
            unit.register_forward_pre_hook(self._need_forward, prepend=True)
            unit.register_forward_hook(self._need_backward, prepend=True)

    def gather(self, unit: Any, nbytes: int, ranks: int) -> None:
        """Begin with an all-gather of so many bytes in all."""
        ready_t = self._shown[-1 if in_backward() else 0]
        if self._device._joined_t > ready_t:
            ready_t, self._in_order = self._device._compute_t, unit
        self._gathered[unit] = self._take(ready_t, nbytes, ranks)
        if unit is self._needed:
            self._wait(unit)

    def scatter(self, nbytes: int, ranks: int) -> None:
        """Begin with a reduce-scatter of so many bytes on each rank."""
        self.wait_until(self._scattered_t, "reduce_scatter")  # the last one's buffers are free then
        self.reduced_t = self._scattered_t = self._take(self._device._compute_t, nbytes, ranks)

    def wait_until(self, moment_s: float, collective: Collective) -> None:
        """Let the compute stream wait for a collective."""
        device = self._device
        self._waited_s[collective] += max(0.0, moment_s - device._compute_t)
        device._compute_t = max(device._compute_t, moment_s)

    def taken_s(self) -> dict[Collective, float]:
        """What was waited since this was called last."""
        taken, self._waited_s = self._waited_s, dict.fromkeys(_SHARING, 0.0)
        return taken

    def _add_up(self, reduced: torch.Tensor) -> None:
        """Add up over the replicas what was reduced last; torch calls it when it has done so."""
        begin = latest(max(self._replicas_free_t, self._scattered_t))
        sent = _added_up(reduced.nbytes, self.replicas)
        self.reduced_t = self._replicas_free_t = begin + self._device._sending_s(sent, replicas=True)

    def _take(self, ready_t: float, nbytes: int, ranks: int) -> float:
        begin = latest(max(self._free_t, ready_t))
        self._free_t = begin + self._device._sending_s(nbytes * (ranks - 1) / ranks)
        return self._free_t

    def _begin_forward(self, *_: Any) -> None:
        if not in_backward():
            self._shown.extend([self._device._compute_t] * 2)

    def _need_forward(self, unit: Any, _: Any) -> None:
        self._need(unit)

    def _need_backward(self, unit: Any, _: Any, output: Any) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self._need(unit))

    def _need(self, unit: Any) -> None:
        self._needed = unit
        if unit in self._gathered:
            self._wait(unit)

    def _wait(self, unit: Any) -> None:
        self.wait_until(self._gathered.pop(unit), "gather")
        self._shown.append(self._device._compute_t)
        if unit is self._in_order:  # then FSDP2's streams wait for the compute stream
            self._shown.append(self._device._compute_t)


class _Collective:
    """What FSDP2 asks of one that is not its own."""

    def __init__(self, network: _Network) -> None:
        self._network = network

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Collective):
    def __init__(self, network: _Network, unit: Any) -> None:
        super().__init__(network)
        self._unit = unit

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool) -> Any:
        self._network.gather(self._unit, output_tensor.nbytes, group.size())
        gather = getattr(_DISTRIBUTED, "all_gather_single", _DISTRIBUTED.all_gather_into_tensor)  # its newer name
        return gather(output_tensor, input_tensor, group=group, async_op=async_op)


class _Scatter(_Collective):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        self._network.scatter(input_tensor.nbytes, group.size())
        scatter = getattr(_DISTRIBUTED, "reduce_scatter_single", _DISTRIBUTED.reduce_scatter_tensor)
        return scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def _units(module: nn.Module) -> list[Any]:
    """What `fully_shard` was called on, whose collectives can be followed."""
    units = units_of(module)
    if units and not hasattr(units[0], "set_custom_reduce_scatter"):
        raise UnsupportedError(
            f"fully_shard on a rig needs a torch that has "
            f"FSDPModule.set_custom_reduce_scatter, which {torch.__version__} has not"
        )
    if any(getattr(one, "offload_to_cpu", False) for unit in units for one in gathered_by(unit).values()):
        raise UnsupportedError(
            "the model's weights are on the host (CPUOffloadPolicy); on a rig they must be on the device: it "
            "has no times for FSDP2's copies"
        )
    return units


def _replicas_of(module: nn.Module) -> int:
    """How many ranks have the same rows of the module's weights."""
    meshes = (parameter.device_mesh for parameter in module.parameters() if hasattr(parameter, "device_mesh"))
    return next((int(mesh.size(0)) for mesh in meshes if mesh.ndim > 1), 1)


def _added_up(nbytes: float, ranks: int) -> float:
    """What a rank sends in an all-reduce: in a reduce-scatter, then in an all-gather."""
    return 2 * nbytes * (ranks - 1) / ranks


class _Pads:
    """Hooks that add each layer's share of the forward and backward time."""

    def __init__(self, module: nn.Module, rig: Rig, segment: Callable[[float], None]) -> None:
        self._segment = segment
        layers = _layers(module)
        self._layered = layers != [module]
        self.set_times(rig)
        self._share = 1 / len(layers)
        self._forward_left = 0.0
        self._backward_left = 0.0
        self._backward_due = False  # only without layers
        module.register_forward_pre_hook(self._begin_forward)
        for layer in layers:
            layer.register_forward_hook(self._end_layer_forward)
            if self._layered:  # a whole model's inputs need no gradient, so its hook would not fire in time
                layer.register_full_backward_hook(self._end_layer_backward)
        module.register_forward_hook(self._end_forward)

    def set_times(self, rig: Rig) -> None:
        """Pad the next step to a rig's times."""
        self._forward_s = rig.forward_ms / 1e3
        self._backward_s = rig.backward_ms / 1e3

    def _begin_forward(self, *_: Any) -> None:
        if in_backward():  # recomputation under gradient checkpointing is part of backward's pad
            return
        self.finish_backward()
        self._forward_left = self._forward_s
        self._backward_left = self._backward_s

    def _end_layer_forward(self, *_: Any) -> None:
        if not in_backward():
            self._forward_left = self._take(self._forward_left, self._forward_s * self._share)

    def _end_forward(self, module: nn.Module, *_: Any) -> None:
        if in_backward():
            return
        self._take(self._forward_left, self._forward_left)
        self._forward_left = 0.0
        # Without layers no hook sees backward itself: then training mode stands for it.
        self._backward_due = not self._layered and torch.is_grad_enabled() and module.training

    def _end_layer_backward(self, *_: Any) -> None:
        self._backward_left -= self._backward_s * self._share
        self._segment(self._backward_s * self._share)

    def backward_ahead_s(self) -> float:
        """How much of the pad is still to come for a gradient that backward has just produced.

        A layer's pad follows its gradients. Without layers the pad of all of backward does.
        """
        return max(0.0, min(self._backward_left, self._backward_s * (self._share if self._layered else 1.0)))

    def finish_backward(self) -> None:
        """Add the backward pass of a module without layers."""
        if self._backward_due and not in_backward():
            self._backward_due = False
            self._segment(self._backward_s)

    def _take(self, left: float, share: float) -> float:
        pad = min(left, share)
        if pad > 1e-9:
            self._segment(pad)
        return left - pad


def _layers(module: nn.Module) -> list[nn.Module]:
    """The modules that the pads are spread over: the list of layers with the most parameters, else the module."""
    lists = [list(part) for part in module.modules() if isinstance(part, nn.ModuleList) and len(part) > 0]
    return max(lists, key=lambda layers: sum(_elements(layer) for layer in layers), default=[module])


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
