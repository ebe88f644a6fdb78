"""Windows, due steps and selection steps against schedules worked out by hand."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zenflow.config import ZenFlowConfig
from zenflow.schedule import StepPlan, WindowClock, due_step, selects


def closes(clock: WindowClock, steps: int, flush_after: tuple[int, ...] = ()) -> list[tuple[int, int, bool]]:
    """(step, n_w, synchronous) of every close by step."""
    seen = []
    for _ in range(steps):
        plan = clock.advance()
        assert plan.step == clock.step
        assert plan.window_steps == clock.window_steps
        if plan.closes:
            seen.append((plan.step, plan.window_steps, plan.synchronous))
            clock.close()
        elif plan.step in flush_after:
            clock.close()
        assert clock.window_steps == 0 or not plan.closes
    return seen


def clock_of(
    interval: int | Literal["auto"], *, warm_up: int = 0, overlap: bool = True, longest: int = 16
) -> WindowClock:
    return WindowClock(
        ZenFlowConfig(
            update_interval=interval, full_warm_up_rounds=warm_up, overlap_step=overlap, max_update_interval=longest
        )
    )


@pytest.mark.parametrize(
    ("interval", "warm_up", "overlap", "expected"),
    [
        (1, 0, True, [(step, 1, False) for step in range(1, 11)]),
        (1, 0, False, [(step, 1, True) for step in range(1, 11)]),
        (4, 0, True, [(4, 4, False), (8, 4, False)]),
        (4, 0, False, [(4, 4, True), (8, 4, True)]),
        (4, 3, True, [(1, 1, True), (2, 1, True), (3, 1, True), (7, 4, False)]),
        (3, 1, True, [(1, 1, True), (4, 3, False), (7, 3, False), (10, 3, False)]),
        (7, 2, False, [(1, 1, True), (2, 1, True), (9, 7, True)]),
        (2, 100, True, [(step, 1, True) for step in range(1, 11)]),
    ],
)
def test_closes(interval: int, warm_up: int, overlap: bool, expected: list[tuple[int, int, bool]]) -> None:
    assert closes(clock_of(interval, warm_up=warm_up, overlap=overlap), 10) == expected


def test_a_flush_moves_the_following_closes() -> None:
    clock = clock_of(4)
    assert closes(clock, 12, flush_after=(2, 8)) == [(6, 4, False), (12, 4, False)]


def test_an_auto_window_closes_when_it_is_told_to_or_is_at_its_longest() -> None:
    clock = clock_of("auto", longest=3)
    told = {2, 3, 9}
    closed = []
    for step in range(1, 12):
        plan = clock.advance(close=step in told)
        if plan.closes:
            closed.append((step, plan.window_steps, plan.synchronous))
            clock.close()
    assert closed == [(2, 2, False), (3, 1, False), (6, 3, False), (9, 3, False)]


def test_a_close_at_once_is_synchronous_for_once() -> None:
    clock = clock_of(2)
    assert clock.advance(close=True, at_once=True) == StepPlan(step=1, window_steps=1, closes=True, synchronous=True)
    clock.close()
    assert closes(clock, 4) == [(3, 2, False), (5, 2, False)]


def test_other_knobs_hold_from_the_next_step_on() -> None:
    clock = clock_of(4, warm_up=2)
    assert closes(clock, 3) == [(1, 1, True), (2, 1, True)]
    clock.config = ZenFlowConfig(update_interval=2, full_warm_up_rounds=5, overlap_step=False)
    assert closes(clock, 5) == [(4, 2, True), (5, 1, True), (7, 2, True)]


@pytest.mark.parametrize(
    ("buckets", "lag", "window_steps", "expected"),
    [
        (4, 4, 4, [11, 12, 13, 14]),
        (4, 2, 4, [11, 11, 12, 12]),
        (4, 1, 4, [11, 11, 11, 11]),
        (4, 4, 2, [11, 11, 12, 12]),  # a short window, as after a flush
        (8, 3, 3, [11, 11, 11, 12, 12, 12, 13, 13]),
        (3, 7, 7, [11, 13, 15]),
        (1, 4, 4, [11]),
        (2, 1, 1, [11, 11]),
    ],
)
def test_due_steps_of_a_window_that_closed_at_ten(
    buckets: int, lag: int, window_steps: int, expected: list[int]
) -> None:
    due = [
        due_step(close_step=10, bucket=bucket, buckets=buckets, lag=lag, window_steps=window_steps)
        for bucket in range(buckets)
    ]
    assert due == expected


@given(st.integers(0, 10**6), st.integers(1, 500), st.integers(1, 64), st.integers(1, 64))
def test_due_steps_are_bounded_ordered_and_spread(close_step: int, buckets: int, lag: int, window_steps: int) -> None:
    span = min(lag, window_steps)
    due = [
        due_step(close_step=close_step, bucket=bucket, buckets=buckets, lag=lag, window_steps=window_steps)
        for bucket in range(buckets)
    ]
    assert due == sorted(due)
    assert due[0] == close_step + 1
    assert due[-1] <= close_step + span
    per_step = [due.count(step) for step in range(close_step + 1, close_step + span + 1)]
    assert max(per_step) - min(per_step) <= 1  # no step gets more of the H2D than another


@pytest.mark.parametrize(
    ("interval", "expected"), [(1, [1, 2, 3, 4, 5, 6, 7]), (2, [1, 3, 5, 7]), (3, [1, 4, 7]), (7, [1]), (50, [1])]
)
def test_selection_steps(interval: int, expected: list[int]) -> None:
    assert [step for step in range(1, 8) if selects(step, interval)] == expected


def test_an_auto_selection_is_looked_at_every_eight_steps() -> None:
    assert [step for step in range(1, 20) if selects(step, "auto")] == [1, 9, 17]
