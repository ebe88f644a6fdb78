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


def test_what_has_come_since_is_looked_at_each_time_and_all_of_it_rarely(looks: list[int]) -> None:
    now_s = [0.0]
    garbage = Garbage(lambda: now_s[0])
    for at_s in (1.0, 2.0, 599.0, 600.0, 601.0, 1199.0, 1200.0):
        now_s[0] = at_s
        garbage.collect()
    assert looks == [1, 1, 1, 2, 1, 1, 2]


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


def test_what_was_there_before_is_not_looked_at_and_all_is_as_it_was_afterwards() -> None:
    old = Cycle()
    seen, thresholds = weakref.ref(old), gc.get_threshold()
    gc.unfreeze()  # of the tests before
    with few_pauses():
        del old
        gc.collect()
        assert seen() is not None
    assert gc.get_threshold() == thresholds
    gc.collect()
    assert seen() is None


def test_what_somebody_else_has_frozen_stays_frozen() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with few_pauses():
        pass
    assert gc.get_freeze_count() >= frozen // 2 > 0
