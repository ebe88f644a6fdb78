"""Forked children: without host memory, they end nothing of their parent's, and to use the optimizer is refused."""

from __future__ import annotations

import ctypes
import gc
import mmap
import multiprocessing
import os
import re
import resource
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.support.mappings import pages_kept_from_children
from tests.support.zenflow import script_cases
from tests.support.zenflow.cases import same_bits
from tests.support.zenflow.small import Stack, seeded
from zenflow import UnsupportedError, ZenFlowAdamW, ZenFlowConfig
from zenflow.deferred import DeferredTier
from zenflow.host.native import NativeBackend, load_native

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel what is mapped"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]
TOLD = re.compile(
    r"process \d+ was forked from process \d+, which alone has the optimizer's state and threads: here the "
    r"model's weights can be read, nothing else"
)
ENDS_S = 60.0
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.write.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
LIBC.mmap.restype = ctypes.c_void_p
MAP_FIXED_NOREPLACE = 0x100000


def child(do: Callable[[], object]) -> str:
    """What a call gives in a forked child, or the sentence that it is told; fails where the child crashes or hangs."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)  # as a DataLoader's worker does: OpenMP's threads are not forked
        try:
            text = str(do())
        except UnsupportedError as error:
            text = str(error)
        except BaseException as error:  # noqa: BLE001 - the parent tells it
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)  # no fixture of this process is the child's to tear down
    os.close(writing)
    said = b""
    try:
        while True:
            assert select.select([reading], [], [], ENDS_S)[0], "the child hangs"
            part = os.read(reading, 1 << 16)
            if not part:
                break
            said += part
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        os.close(reading)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 0, "the child crashed"
    return said.decode()


def is_there(address: int) -> bool:
    """Whether memory can be read: the kernel says so, where a look would be a crash."""
    reading, writing = os.pipe()
    try:
        return int(LIBC.write(writing, address, 1)) == 1
    finally:
        os.close(reading)
        os.close(writing)


class Points(Dataset[tuple[Tensor, bool]]):
    """Inputs, and whether the process that reads them has the memory at some addresses."""

    def __init__(self, addresses: Callable[[], list[int]]) -> None:
        self._inputs = torch.randn(12, 7, generator=torch.Generator().manual_seed(5))
        self._addresses = addresses

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, bool]:
        return self._inputs[index], all(map(is_there, self._addresses()))  # a few may be something else by now


class Run:
    """A small model that trains, with every kind of host memory in use and the engine's threads late."""

    def __init__(self, **knobs: Any) -> None:
        torch.manual_seed(11)
        self.model = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5))
        every = {"topk_ratio": 0.2, "update_interval": 3, "select_interval": 2, "host_threads": 2, **knobs}
        config = ZenFlowConfig(**every)
        self.optimizer = ZenFlowAdamW(self.model.parameters(), lr=0.02, config=config, module=self.model)
        backend = self.optimizer._training.engine.backend
        if isinstance(backend, NativeBackend):
            backend.engine.inject("jitter", 0, 1e-3, 3)

    def step(self, inputs: Tensor) -> None:
        self.model(inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, count: int) -> Run:
        for number in range(count):
            self.step(torch.randn(4, 7, generator=torch.Generator().manual_seed(number)))
        return self

    def addresses(self) -> list[int]:
        """Of state, log and staging."""
        tiers = self.tiers()
        tensors = [state for tier in tiers for state in (tier.state.master, *tier.state.moments, tier.state.count)]
        tensors += [self.optimizer._own.runtime.buckets.result_of(part.bucket) for tier in tiers for part in tier.parts]
        tensors += self.optimizer._own.runtime.log._pool._segments
        return [tensor.data_ptr() for tensor in tensors]

    def tiers(self) -> list[DeferredTier]:
        """The host's parts of the weights."""
        return [weight.deferred for weight in self.optimizer._own.model.weights if weight.deferred is not None]

    def weights(self) -> list[Tensor]:
        """After a last flush."""
        self.optimizer.close()
        return [parameter.detach().clone() for parameter in self.model.parameters()]


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZENFLOW_NATIVE", "require")


@pytest.fixture
def run() -> Iterator[Run]:
    made = Run().steps(5)
    yield made
    made.optimizer.abandon()


# Memory.


@pytest.mark.smoke
def test_no_child_has_the_host_memory(run: Run) -> None:
    assert len(run.addresses()) > 8
    assert all(map(is_there, run.addresses()))
    assert child(lambda: [*map(is_there, run.addresses())]) == str([False] * len(run.addresses()))


@pytest.mark.parametrize("nbytes", [1, mmap.PAGESIZE + 1, (2 << 20) + 1])
def test_where_freed_memory_was_children_lack_nothing(nbytes: int) -> None:
    """Others' memory lies there next."""
    backend = NativeBackend(load_native(), [-1])
    array = backend.allocate(nbytes, nbytes)
    pages = set(range(array.ctypes.data, array.ctypes.data + nbytes, mmap.PAGESIZE))
    assert pages <= pages_kept_from_children()
    del array
    assert not pages & pages_kept_from_children()
    backend.close()


def test_a_child_costs_its_parent_no_copy() -> None:
    """Not a page is faulted in again, and large pages stay whole."""
    backend = NativeBackend(load_native(), [-1])
    array = backend.allocate(32 << 20, 32 << 20)
    try:
        before = _huge_bytes(array.ctypes.data)
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.read(reading, 1)  # while the parent writes
            os._exit(0)
        faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        array[:: mmap.PAGESIZE] = 1
        faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - faults
        os.write(writing, b"x")
        os.waitpid(pid, 0)
        assert faults < (32 << 20) // mmap.PAGESIZE // 10
        assert _huge_bytes(array.ctypes.data) == before
    finally:
        backend.close()


def _huge_bytes(address: int) -> int:
    found = -1
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            low, high = (int(part, 16) for part in span.groups())
        elif line.startswith("AnonHugePages:") and low <= address < high:
            found = 1024 * int(line.split()[1])
    assert found >= 0
    return found


def test_a_child_that_collects_it_unmaps_nothing_of_its_own() -> None:
    made = [Run().steps(5)]
    address = made[0].addresses()[-1]  # state is kept by the threads that the child has not got

    def collect() -> object:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
        assert LIBC.mmap(address, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == address
        made.clear()
        gc.unfreeze()  # of itself a child leaves all that there was to its parent
        gc.collect()
        return is_there(address)

    with every_lock_held(made[0].optimizer):
        assert child(collect) == "True"
    assert is_there(address)
    made[0].optimizer.abandon()


def test_a_child_collects_nothing_of_its_parents(run: Run) -> None:
    """As an event of a GPU, which PyTorch destroys in a child by ending it."""
    collected: list[int] = []

    class Event:
        def __init__(self) -> None:
            self.known_by = self

        def __del__(self) -> None:
            collected.append(os.getpid())

    def collect() -> object:
        gc.collect()
        return collected

    gc.disable()
    try:
        Event()
        assert child(collect) == "[]"
    finally:
        gc.enable()
    gc.collect()
    assert collected == [os.getpid()]
    run.steps(1)


# A parent goes on.


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_that_load_data_change_nothing(persistent: bool) -> None:
    finals = []
    for workers in (0, 2):
        run = Run().steps(4)
        loader = DataLoader(
            Points(run.addresses),
            batch_size=3,
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
            persistent_workers=persistent and workers > 0,
        )
        for _ in range(3):
            for inputs, mapped in loader:
                assert bool(mapped.all()) is (workers == 0)
                run.step(inputs)
        finals.append(run.weights())
    assert all(bool(same_bits(a, b).all()) for a, b in zip(*finals, strict=True))


@pytest.mark.smoke
def test_children_that_end_it_or_use_it_change_nothing(run: Run) -> None:
    for _ in range(3):
        assert TOLD.fullmatch(child(run.optimizer.flush))
        assert child(run.optimizer.abandon) == "None"
        process = multiprocessing.get_context("fork").Process(target=run.optimizer.abandon)
        process.start()
        process.join(ENDS_S)
        assert process.exitcode == 0
        run.steps(2)
    undisturbed = Run().steps(5)
    for _ in range(3):
        undisturbed.steps(2)
    assert all(bool(same_bits(a, b).all()) for a, b in zip(run.weights(), undisturbed.weights(), strict=True))


# A child that uses it.

USES: dict[str, Callable[[ZenFlowAdamW], object]] = {
    "step": lambda optimizer: optimizer.step(),
    "flush": lambda optimizer: optimizer.flush(),
    "close": lambda optimizer: optimizer.close(),
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "set_knobs": lambda optimizer: optimizer.set_knobs(update_interval=2),
    "history": lambda optimizer: optimizer.history(wait=True),
    "host_bytes": lambda optimizer: optimizer.host_bytes(),
    "add_param_group": lambda optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 2))]}),
}


@pytest.mark.smoke
@pytest.mark.parametrize("mode", ["require", "off"])
def test_a_child_that_uses_it_is_told(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZENFLOW_NATIVE", mode)
    run = Run().steps(5)
    saved = run.optimizer.state_dict()
    uses = {**USES, "load_state_dict": lambda optimizer: optimizer.load_state_dict(saved)}
    with every_lock_held(run.optimizer):
        for name, use in uses.items():
            said = child(lambda use=use: use(run.optimizer))  # type: ignore[misc]
            assert TOLD.fullmatch(said), (name, said)
    assert child(lambda: (run.optimizer.steps, run.optimizer.config.update_interval)) == "(5, 3)"
    run.optimizer.abandon()


@contextmanager
def every_lock_held(optimizer: ZenFlowAdamW) -> Iterator[None]:
    """While it lasts a thread has the locks that a thread of the engine may have when a process is forked."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight.detach()  # what is late arrives before a fork, and needs the locks
    held, over = threading.Event(), threading.Event()

    def hold(locks: Sequence[Any]) -> None:
        with locks[0], locks[1], locks[2]:
            held.set()
            over.wait()

    training = optimizer._training
    locks = (
        training.engine._turnstile._changed,
        training.runtime.memory._count._lock,
        training.runtime.log._pool._changed,
    )
    del training  # which a child is to collect
    thread = threading.Thread(target=hold, args=[locks])
    thread.start()
    assert held.wait(ENDS_S)
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_finalizer_of_a_child_that_uses_it_is_told(run: Run) -> None:
    class Trainer:
        def __del__(self) -> None:
            run.optimizer.close()

    trainers = [Trainer()]
    told: list[str] = []

    def collect() -> object:
        sys.unraisablehook = lambda raised: told.append(str(raised.exc_value))
        trainers.clear()
        return told[0]

    with every_lock_held(run.optimizer):
        assert TOLD.fullmatch(child(collect))
    run.steps(2)
    trainers[0].__class__.__del__ = lambda _: None  # type: ignore[method-assign]


@pytest.mark.smoke
def test_a_child_reads_weights_and_its_gradients_are_whole(run: Run) -> None:
    """Those of a pass in the child; what has left the parent during backward is not to be had there."""
    inputs = torch.ones(2, 7)
    expected = run.model(inputs).sum()
    gradients = torch.autograd.grad(expected, list(run.model.parameters()))

    def backward() -> object:
        loss = run.model(inputs).sum()
        loss.backward()
        pairs = zip(run.model.parameters(), gradients, strict=True)
        whole = [p.grad is not None and bool(same_bits(p.grad, gradient).all()) for p, gradient in pairs]
        return torch.equal(loss, expected), all(whole)

    assert child(backward) == "(True, True)"
    run.model(inputs).sum().backward()
    left = run.model.get_parameter("0.weight").grad
    assert left is not None
    assert type(left) is not Tensor
    norm = left.norm().item()
    assert child(lambda: left.norm().item()) == str(norm)
    assert TOLD.fullmatch(child(backward))
    run.optimizer.step()


@pytest.mark.smoke
@pytest.mark.parametrize("setting", script_cases.TRIED, ids=str)
def test_a_late_weight_arrives_before_the_fork(setting: script_cases.Setting) -> None:
    """The child has it, but not the threads that bring it."""
    run = script_cases.Run(seeded(Stack, depth=1), script_cases.ours(setting, with_module=True))
    run.train(6)
    seen = child(lambda: [weight.detach().tolist() for weight in run.weights])
    assert seen == str([weight.detach().tolist() for weight in run.weights])
    run.train(3)
    run.optimizer.close()
