"""How a daemon looks for garbage."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from zftune.daemon.process import Garbage, few_pauses


class Cycle:
    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def looks() -> Iterator[list[int]]:
    """The generation of each look for garbage, in order."""
    found: list[int] = []

    def note(phase: str, about: dict[str, Any]) -> None:
        if phase == "start":
            found.append(about["generation"])

    with few_pauses():
        gc.callbacks.append(note)
        try:
            yield found
        finally:
            gc.callbacks.remove(note)


def test_nobody_looks_unasked(looks: list[int]) -> None:
    history: deque[list[list[int]]] = deque(maxlen=20_000)
    for _ in range(50_000):
        history.append([[]])
    assert looks == []


def test_garbage_goes(looks: list[int]) -> None:
    now_s = [0.0]
    garbage = Garbage(lambda: now_s[0])
    young, old = Cycle(), Cycle()
    seen = weakref.ref(young), weakref.ref(old)
    del young
    garbage.collect()
    assert [one() is None for one in seen] == [True, False]
    del old
    garbage.collect()
    assert seen[1]() is not None  # it has been looked at before, and found in use
    now_s[0] = 600.0
    garbage.collect()
    assert seen[1]() is None
