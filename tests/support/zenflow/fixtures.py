"""Fixtures of the runtime's tests."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.support.zenflow import simulated_process
from tests.support.zenflow.cases import Make
from tests.support.zenflow.family_cases import OURS
from tests.support.zenflow.stream_cases import Pair
from zenflow import CpuDevice, ZenFlowConfig, ZenFlowOptimizer
from zenflow.device import HostSpan, Mark, Transfer
from zenflow.host.native import NativeBackend


class SlowHost(CpuDevice):
    """Plain CPU whose host work ends up to 5 ms late, by a seed of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._delays = random.Random(seed)

    def host_work(
        self, finish: Callable[[], HostSpan], nbytes: int, inputs: Sequence[Transfer], submitted: Mark
    ) -> HostSpan:
        span = finish()
        time.sleep(self._delays.choice([0, 0, 0.001, 0.005]))
        return span


@pytest.fixture
def slow_host() -> Callable[..., Make]:
    """For a seed and a rule, a maker of its optimizer whose host is held up at random moments drawn from that seed."""

    def maker(seed: int, rule: str = "adamw") -> Make:
        def make(groups: Any, **arguments: Any) -> ZenFlowOptimizer:
            optimizer: ZenFlowOptimizer = OURS[rule](groups, device=SlowHost(seed), **arguments)
            return optimizer

        return make

    return maker


@pytest.fixture
def native_host(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Make]:
    """For a number of threads, a seed and a rule, a maker of its optimizer on the native engine, its threads late."""
    monkeypatch.setenv("ZENFLOW_NATIVE", "require")

    def maker(threads: int, seed: int, rule: str = "adamw") -> Make:
        def make(groups: Any, *, config: ZenFlowConfig, **arguments: Any) -> ZenFlowOptimizer:
            optimizer: ZenFlowOptimizer = OURS[rule](groups, config=replace(config, host_threads=threads), **arguments)
            backend = optimizer._training.engine.backend
            assert isinstance(backend, NativeBackend)
            assert backend.threads == threads
            backend.engine.inject("jitter", 0, 2e-3, seed)
            return optimizer

        return make

    return maker


@pytest.fixture
def pair() -> Iterator[Callable[..., Pair]]:
    """Makes models beside their streamed twins; see there for the arguments."""
    made: list[Pair] = []

    def make(*arguments: Any, **options: Any) -> Pair:
        made.append(Pair(*arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.streams.close()


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """Once torch.compile was used in a process, no wait is left to a forward; other tests must not see that."""
    yield
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None:
        dynamo.counters.clear()


@pytest.fixture
def gpu() -> None:
    """Of a test marked `simulated_cuda`: the `SimulatedCuda` that its process makes."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Send a test marked `simulated_cuda` to the process of the simulated device."""
    mark = pyfuncitem.get_closest_marker("simulated_cuda")
    if mark is None:
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names if name != "gpu"}
    owner = "" if pyfuncitem.cls is None else f"{pyfuncitem.cls.__name__}."
    name = f"{owner}{pyfuncitem.originalname}"
    simulated_process.call(pyfuncitem.module.__name__, name, arguments, mark.kwargs)
    return True


@pytest.fixture(scope="session", autouse=True)
def the_simulated_device_ends_with_the_session() -> Iterator[None]:
    yield
    simulated_process.end()
