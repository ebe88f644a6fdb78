"""Threads of the native engine that throw, die or are late."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

from tests.support.tiers import combinations
from tests.support.zenflow.cases import assert_same, case_of, run, same_bits
from tests.support.zenflow.engine_cases import (
    ALL_DEFERRED,
    CONFIGS,
    SOON_S,
    WEIGHTS,
    Plain,
    engine_of,
    every_thread_ends,
    make,
)
from tests.support.zenflow.small import Stack, assert_same_run, seeded, tokens_of, train
from zenflow import CpuDevice, HostEngineError, ZenFlowAdamW, ZenFlowConfig, ZenFlowError
from zenflow.clock import REAL_CLOCK
from zenflow.device import HostSpan, Mark, Transfer
from zftune.emulation import EmulatedAccelerator, Rig

CAUSES = {"fail": "a failure was injected", "die": "a thread of the host engine is gone"}


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    with every_thread_ends():
        yield


def error_soon(step: Callable[[], object]) -> HostEngineError:
    """Step until it raises; long before the late thread of any test is back."""
    began_s = time.monotonic()
    while time.monotonic() < began_s + SOON_S:
        try:
            step()
        except HostEngineError as error:
            assert time.monotonic() - began_s < SOON_S
            return error
    pytest.fail("nothing was raised")


# A thread throws or dies.


@pytest.mark.parametrize(
    ("kind", "place", "config"), combinations(kind=CAUSES, place=range(WEIGHTS), config=CONFIGS.values())
)
def test_a_fault_is_raised_in_step_and_names_the_parameter(kind: str, place: int, config: ZenFlowConfig) -> None:
    plain = Plain(config)
    for _ in range(3):
        plain.step()
    plain.optimizer.flush()
    versions = [plain.values()]
    plain.inject(kind, place)  # one thread and small weights: a piece is an update
    error = error_soon(plain.step)
    assert str(error) == f"updating {place} failed: {CAUSES[kind]}"
    assert isinstance(error.__cause__, RuntimeError)
    seen = plain.values()
    plain.optimizer.abandon()
    with pytest.raises(ZenFlowError):
        plain.step()
    # What is seen of each weight is a state that it has without a fault too.
    steps, plain = plain.steps - 1, Plain(config)
    for _ in range(3):
        plain.step()
    plain.optimizer.flush()
    for _ in range(steps - 3):
        plain.step()
        versions.append(plain.values())
    plain.optimizer.close()
    for number, weight in enumerate(seen):
        assert any(bool(same_bits(weight, version[number]).all()) for version in versions), f"weight {number}"


class Slow(CpuDevice):
    """A link and a host that take their time, so that the engine is far behind its threads."""

    in_host_memory = False

    class Copy(Transfer):
        def __init__(self, copied: Transfer, wait: Callable[[], object]) -> None:
            self.begin, self.end, self.nbytes = copied.begin, copied.end, copied.nbytes
            self._wait = wait

        def wait(self) -> None:
            self._wait()

        def done(self) -> bool:
            return True

    def __init__(self, wait: Callable[[], object] = lambda: time.sleep(0.005)) -> None:
        super().__init__()
        self._wait = wait

    def d2h(self, source: Tensor, target: Tensor) -> Transfer:
        return self.Copy(super().d2h(source, target), self._wait)

    def host_work(
        self, finish: Callable[[], HostSpan], nbytes: int, inputs: Sequence[Transfer], submitted: Mark
    ) -> HostSpan:
        span = finish()
        time.sleep(0.02)
        return span


@pytest.mark.parametrize("place", [1, 2])
@pytest.mark.parametrize("kind", CAUSES)
def test_the_parameter_that_failed_is_named_and_not_those_behind_it(kind: str, place: int) -> None:
    plain = Plain(CONFIGS["overlapped"], Slow())
    plain.step()
    plain.optimizer.flush()
    plain.inject(kind, place)
    error = error_soon(plain.step)
    plain.optimizer.abandon()
    assert str(error) == f"updating {place} failed: {CAUSES[kind]}"


@pytest.mark.parametrize("kind", CAUSES)
@pytest.mark.parametrize("what", ["reading the masters of 0", "moving columns of 0", "updating 0"])
def test_every_kind_of_work_surfaces(what: str, kind: str) -> None:
    """Nobody waits for masters that are read or columns that join; they would be missing from every later update."""
    weight = nn.Parameter(torch.ones(3, 4))
    config = ZenFlowConfig(topk_ratio=0.5, update_interval=2, select_interval=1, host_threads=1)
    optimizer = make([weight], config)
    pieces = {"reading the masters of 0": 0, "moving columns of 0": 2, "updating 0": 3}[what]
    engine_of(optimizer).inject(kind, pieces)  # the masters; columns that leave, those that join, the rest
    steps = iter(range(1 << 20))

    def step() -> None:
        loud = [1.0, 1.0, 9.0, 9.0] if next(steps) % 2 else [9.0, 9.0, 1.0, 1.0]
        weight.grad = torch.tensor([loud] * 3)
        optimizer.step()

    error = error_soon(step)
    optimizer.abandon()
    assert str(error) == f"{what} failed: {CAUSES[kind]}"


@pytest.mark.parametrize("kind", CAUSES)
def test_a_fault_is_raised_in_a_step_that_asks_nothing_of_the_host(kind: str) -> None:
    arrived = threading.Event()
    plain = Plain(ZenFlowConfig(update_interval=1000, **ALL_DEFERRED), Slow(arrived.wait))
    plain.inject(kind, WEIGHTS - 1)
    plain.step()  # the masters are still on their way
    for weight in plain.weights:
        weight.grad = None
    arrived.set()

    def idle_step() -> None:
        time.sleep(0.01)  # else the window would be over soon
        plain.optimizer.step()

    error = error_soon(idle_step)
    plain.optimizer.abandon()
    assert str(error) == f"reading the masters of {WEIGHTS - 1} failed: {CAUSES[kind]}"


@pytest.mark.parametrize("end", ["flush", "close"])
@pytest.mark.parametrize("kind", CAUSES)
def test_a_fault_is_raised_at_the_end_at_the_latest(kind: str, end: str) -> None:
    plain = Plain(CONFIGS["windows"])
    plain.step()
    plain.optimizer._training.engine.drain()  # the masters were read
    plain.inject(kind, 1)
    error = error_soon(getattr(plain.optimizer, end))
    assert str(error) == f"updating 1 failed: {CAUSES[kind]}"
    plain.optimizer.abandon()


@pytest.mark.parametrize("kind", CAUSES)
def test_a_fault_is_raised_while_a_real_model_trains(kind: str) -> None:
    model = seeded(Stack)
    config = ZenFlowConfig(update_interval=2, bucket_bytes=200, host_threads=3)
    optimizer = make(model.parameters(), config, module=model)

    def step() -> None:
        model(tokens_of(1)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):
        step()
    engine_of(optimizer).inject(kind, 5)
    error = error_soon(step)
    optimizer.abandon()
    names = "|".join(re.escape(name) for name, _ in model.named_parameters())
    assert re.fullmatch(f"(updating|moving columns of) ({names}) failed: {CAUSES[kind]}", str(error))


@pytest.mark.parametrize("kind", CAUSES)
def test_a_late_thread_does_not_hold_up_anothers_fault(kind: str) -> None:
    weight = nn.Parameter(torch.zeros(1, 1 << 19))
    optimizer = make([weight], ZenFlowConfig(update_interval=1, topk_ratio=0.0, host_threads=2))

    def step() -> None:
        weight.grad = torch.ones_like(weight)
        optimizer.step()

    step()
    optimizer.flush()
    engine_of(optimizer).inject(
        kind, 0, 600.0
    )  # of the pieces of a bucket, one is late and the other thread's next fails
    error = error_soon(step)
    optimizer.abandon()
    assert str(error) == f"updating 0 failed: {CAUSES[kind]}"


# A thread is late.


@pytest.mark.parametrize("kind", ["delay", "jitter"])
def test_late_threads_change_no_bit(kind: str) -> None:
    def disturb(optimizer: ZenFlowAdamW, step: int) -> None:
        engine_of(optimizer).inject(kind, step % 5, 0.02 if kind == "delay" else 0.002, step)

    runs = [
        train(
            seeded(Stack, torch.bfloat16, width=24),
            ZenFlowConfig(update_interval=3, topk_ratio=0.2, select_interval=2, bucket_bytes=500, host_threads=3),
            steps=14,
            after_step=after_step,
        )
        for after_step in (disturb, None)
    ]
    assert_same_run(*runs)


@pytest.mark.parametrize("seed", range(300, 308))
def test_jitter_changes_no_bit_in_random_cases(seed: int) -> None:
    case = case_of(seed, steps=14, overlap_step=True, host_threads=2)

    def jitter(optimizer: ZenFlowAdamW, weights: list[Tensor], step: int) -> None:
        engine_of(optimizer).inject("jitter", 0, 0.002, seed)

    assert_same(case, run(case, ZenFlowAdamW, on_step=jitter), run(case, ZenFlowAdamW))


@pytest.fixture
def accelerator() -> Iterator[EmulatedAccelerator]:
    rates = dict.fromkeys(("link_d2h_gbps", "link_h2d_gbps", "host_gbps", "device_gbps"), 1e6)
    rig = Rig("fast", "", forward_ms=1.0, backward_ms=1.0, scale=1.0, **rates)
    device = EmulatedAccelerator(rig, clock=REAL_CLOCK)  # the delay is a real one
    yield device
    device.close()


DELAY_S = 0.3


@pytest.mark.parametrize("emulated", [False, True])
def test_the_wait_for_a_late_thread_is_accounted_for(emulated: bool, request: pytest.FixtureRequest) -> None:
    plain = Plain(CONFIGS["sync"], request.getfixturevalue("accelerator") if emulated else None)
    plain.step()
    plain.inject("delay", 2, DELAY_S)
    plain.step()
    plain.optimizer.close()
    _, last = plain.optimizer.history(wait=True)
    least_ms = 0.9e3 * DELAY_S  # a busy machine makes it more, never less
    assert last.cpu_wait_ms > least_ms
    if emulated:
        assert last.stall_ms is not None
        assert last.step_ms is not None
        assert last.stall_ms["host"] > least_ms
        assert sum(last.stall_ms.values()) <= last.step_ms + 1e-6  # on one timeline: it counts once
    else:
        assert last.stall_ms is None
