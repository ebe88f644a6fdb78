"""Facts about the driver that the runtime is built on: registering host memory, forks, events across streams."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from gpu.bench import Bench, Size
from gpu.machine import memory_bytes
from gpu.record import Record, UnavailableError

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_HUGEPAGE, _NO_HUGEPAGE, _DONTFORK = 14, 15, 10
_GIB = 1 << 30


class Block:
    """Host memory of whole pages that has been touched; unmapped with its last reference.

    Args:
        nbytes: how much.
        advice: for `madvise`, one after the other.
    """

    def __init__(self, nbytes: int, *advice: int) -> None:
        if memory_bytes("MemAvailable") < 2 * nbytes:
            raise UnavailableError(f"{nbytes} bytes and as many again are not free on the host")
        self.memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.tensor = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.address, self.nbytes = self.tensor.data_ptr(), nbytes
        for each in advice:
            if _LIBC.madvise(self.address, nbytes, each) != 0:
                raise UnavailableError(f"madvise({each}): {os.strerror(ctypes.get_errno())}")
        self.tensor.zero_()

    def register(self) -> float:
        """Let the GPU reach it; seconds that took."""
        began = time.perf_counter()
        _checked(_runtime().cudaHostRegister(self.address, self.nbytes, 0), "cudaHostRegister")
        return time.perf_counter() - began

    def unregister(self) -> float:
        """The opposite; seconds that took."""
        began = time.perf_counter()
        _checked(_runtime().cudaHostUnregister(self.address), "cudaHostUnregister")
        return time.perf_counter() - began


def driver(record: Record, bench: Bench, _: Size) -> None:
    """The harmless ones first: what may leave a broken context behind comes last."""
    scale = 1 << 10 if bench.simulated else 1
    for name, nbytes in (("32 MiB", 32 << 20), ("1 GiB", _GIB), ("8 GiB", 8 * _GIB)):
        for pages, advice in (("huge pages", _HUGEPAGE), ("small pages", _NO_HUGEPAGE)):
            record.measure(
                f"register {name}, {pages}",
                lambda nbytes=nbytes, advice=advice: _registering(nbytes // scale, advice),
                needs_s=4 * nbytes / _GIB,
            )
    record.measure("a product while memory is registered", lambda: _beside_products(bench, _GIB // scale), needs_s=4)
    record.measure("unregistering waits for a copy", lambda: _unregistering(bench, 4 * _GIB // scale), needs_s=6)
    record.measure("events of two streams", lambda: _elapsed(bench))
    nbytes = 2 * _GIB // scale
    record.measure("fork, memory shared with the child", lambda: _forked(bench, nbytes), needs_s=5)
    kept = record.measure("fork", lambda: _forked(bench, nbytes, _DONTFORK), needs_s=5)  # as the runtime allocates it
    if kept is not None:
        record.hold("the GPU reads what was written after a fork", kept["stale_bytes"] == 0, kept)
    record.measure("a failing registration", lambda: _failing(bench))


def _registering(nbytes: int, advice: int) -> dict[str, float]:
    block = Block(nbytes, advice)
    seconds = block.register()
    return {"gbps": nbytes / seconds / 1e9, "unregister_s": block.unregister()}


def _beside_products(bench: Bench, nbytes: int) -> dict[str, float]:
    """Launches go through the driver too: how long the training thread waits for one while another registers."""
    matrix = bench.put(torch.randn(64 if bench.simulated else 2048, 64 if bench.simulated else 2048))
    block = Block(nbytes, _HUGEPAGE)
    took: list[float] = []
    thread = threading.Thread(target=lambda: took.append(block.register()))

    def longest(until: Callable[[], bool]) -> float:
        most = 0.0
        while True:
            began = time.perf_counter()
            matrix @ matrix
            most = max(most, time.perf_counter() - began)
            bench.synchronize()
            if until():
                return 1e3 * most

    ends = time.perf_counter() + 0.2
    alone = longest(lambda: time.perf_counter() > ends)
    thread.start()
    beside = longest(lambda: not thread.is_alive())
    thread.join()
    block.unregister()
    return {"longest_launch_ms_alone": alone, "longest_launch_ms_beside": beside, "register_s": took[0]}


def _unregistering(bench: Bench, nbytes: int) -> dict[str, Any]:
    block = Block(nbytes, _HUGEPAGE)
    far = bench.put(torch.ones(nbytes, dtype=torch.uint8))
    block.register()
    stream = torch.cuda.Stream(bench.torch_device)
    event = torch.cuda.Event()
    bench.synchronize()
    with torch.cuda.stream(stream):
        if not bench.simulated:
            torch.cuda._sleep(2_000_000_000)  # cycles: about a second
        block.tensor.copy_(far, non_blocking=True)
        event.record(stream)
    if bench.simulated:
        event.synchronize()  # the checker rightly takes what is tried here for a mistake
    seconds = block.unregister()
    over = bool(event.query())
    event.synchronize()
    return {"unregister_s": seconds, "copy_was_over": over}


def _elapsed(bench: Bench) -> dict[str, float]:
    """Which sign it has between events of different streams; the stall's figures rest on it."""
    first, second = (torch.cuda.Stream(bench.torch_device) for _ in range(2))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    one = bench.put(torch.zeros(1 << 10))
    for stream, event in zip((first, second), events, strict=True):
        with torch.cuda.stream(stream):
            one.add_(1)
            event.record(stream)
        event.synchronize()
    forth, back = events[0].elapsed_time(events[1]), events[1].elapsed_time(events[0])
    return {"later_minus_earlier_ms": forth, "earlier_minus_later_ms": back}


def _forked(bench: Bench, nbytes: int, *advice: int) -> dict[str, Any]:
    """A child is there while the parent writes and the GPU reads, as a data loader's worker is."""
    block = Block(nbytes, _HUGEPAGE, *advice)
    block.register()
    available = memory_bytes("MemAvailable")
    ready, write = os.pipe()
    began = time.perf_counter()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(ready, 1)  # until the parent closes its end
        os._exit(0)
    fork_s = time.perf_counter() - began
    os.close(ready)
    try:
        began = time.perf_counter()
        block.tensor.fill_(7)
        write_s = time.perf_counter() - began
        far = bench.put(torch.zeros(nbytes, dtype=torch.uint8))
        far.copy_(block.tensor, non_blocking=True)
        bench.synchronize()
        stale = int((far != 7).sum().item())
        taken = available - memory_bytes("MemAvailable")
    finally:
        os.close(write)
        os.waitpid(child, 0)
    block.unregister()
    return {"fork_s": fork_s, "write_s": write_s, "host_bytes_taken": taken, "stale_bytes": stale}


def _failing(bench: Bench) -> dict[str, Any]:
    """Whether the error of a registration comes back at the next launch."""
    block = Block(1 << 20)
    block.register()
    code = int(_runtime().cudaHostRegister(block.address, block.nbytes, 0))  # it is registered already
    try:
        bench.put(torch.zeros(16)).add_(1)
        bench.synchronize()
        later = None
    except RuntimeError as error:
        later = str(error).partition("\n")[0]
    block.unregister()
    return {"code": code, "next_launch_raises": later}


def _runtime() -> Any:
    return torch.cuda.cudart()


def _checked(code: Any, what: str) -> None:
    if int(code):
        raise RuntimeError(f"{what} gave CUDA error {int(code)}")
