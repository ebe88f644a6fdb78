"""Fixtures of the runtime's tests."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from tests.zenflow.cases import Make
from zenflow import CpuDevice, ZenFlowAdamW
from zenflow.device import HostSpan, Mark, Transfer


class SlowHost(CpuDevice):
    """Plain CPU whose host work starts up to 5 ms late, by a seed of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._delays = random.Random(seed)

    @contextmanager
    def host_work(self, nbytes: int, inputs: Sequence[Transfer], submitted: Mark) -> Iterator[HostSpan]:
        time.sleep(self._delays.choice([0, 0, 0.001, 0.005]))
        with super().host_work(nbytes, inputs, submitted) as span:
            yield span
            time.sleep(self._delays.choice([0, 0, 0.001]))


@pytest.fixture
def slow_host() -> Callable[[int], Make]:
    """For a seed, a maker of `ZenFlowAdamW` whose host is held up at random moments drawn from that seed."""

    def maker(seed: int) -> Make:
        def make(groups: Any, **arguments: Any) -> ZenFlowAdamW:
            return ZenFlowAdamW(groups, device=SlowHost(seed), **arguments)

        return make

    return maker
