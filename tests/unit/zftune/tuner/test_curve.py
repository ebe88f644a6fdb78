"""How a training goes, kept small: nothing of it is lost but detail."""

from __future__ import annotations

from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zftune.store.types import Curve, CurvePoint, KnobChange
from zftune.tuner.curve import MOST_POINTS, CurveBuilder


def test_a_short_training_keeps_every_step() -> None:
    builder = CurveBuilder()
    builder.step(1, None, 0.5)
    builder.loss(1, 3.0)
    builder.change(1, {"topk_ratio": 0.1})
    builder.step(2, 8.0, None)
    points = (CurvePoint(1, 1, None, 3.0, 0.5), CurvePoint(2, 1, 8.0))
    assert builder.curve() == Curve(points, (KnobChange(1, {"topk_ratio": 0.1}),))


@given(st.integers(1, 5000), st.integers(1, 1_000_000))
def test_a_long_one_keeps_its_means(steps: int, first: int) -> None:
    builder = CurveBuilder()
    for step in range(first, first + steps):
        builder.step(step, float(step % 7), None)
        builder.loss(step, float(step % 5))
    points = builder.curve().points
    assert len(points) <= MOST_POINTS
    assert [point.step for point in points] == sorted(point.step for point in points)
    assert points[-1].step == first + steps - 1
    assert sum(point.steps for point in points) == steps
    for name, modulus in (("step_ms", 7), ("loss", 5)):
        total = sum(getattr(point, name) * point.steps for point in points)
        assert total / steps == pytest.approx(fmean(step % modulus for step in range(first, first + steps)))


def test_a_saved_state_that_is_loaded_takes_back_what_came_after_it() -> None:
    builder = CurveBuilder()
    for step in range(1, 11):
        builder.step(step, 1.0, None)
        builder.loss(step, 1.0)
    builder.change(3, {"topk_ratio": 0.1})
    builder.change(8, {"topk_ratio": 0.2})
    builder.step(6, 2.0, None)
    curve = builder.curve()
    assert [point.step for point in curve.points] == [1, 2, 3, 4, 5, 6]
    assert curve.points[-1] == CurvePoint(6, 1, 2.0)
    assert [change.step for change in curve.changes] == [3]


def test_a_run_that_is_gone_on_with_has_its_earlier_steps() -> None:
    before, after = CurveBuilder(), CurveBuilder()
    for step in range(1, 1001):
        before.step(step, 4.0, 0.25)
    before.change(1, {"topk_ratio": 0.1})
    after.change(1001, {"topk_ratio": 0.2})
    after.step(1001, 2.0, 0.25)
    after.join(before.curve())
    curve = after.curve()
    assert sum(point.steps for point in curve.points) == 1001
    assert len(curve.points) <= MOST_POINTS
    assert {point.coverage for point in curve.points} == {0.25}
    assert [change.step for change in curve.changes] == [1, 1001]


@pytest.mark.parametrize("known_first", [True, False])
def test_a_run_that_goes_on_from_an_older_checkpoint_forgets_what_came_after_that(*, known_first: bool) -> None:
    """A daemon hears of steps before it has read what was kept, a training of its own after that."""
    before, after = CurveBuilder(), CurveBuilder()
    for step in range(1, 11):
        before.step(step, 1.0, None)
        before.loss(step, 1.0)
    before.change(3, {"topk_ratio": 0.1})
    before.change(8, {"topk_ratio": 0.2})
    if known_first:
        after.join(before.curve())
    after.loss(6, 3.0)
    after.step(6, 2.0, None)
    after.loss(7, 3.0)
    after.step(7, 2.0, None)
    if not known_first:
        after.join(before.curve())
    curve = after.curve()
    assert [(point.step, point.steps, point.step_ms, point.loss) for point in curve.points] == [
        *((step, 1, 1.0, 1.0) for step in range(1, 6)),
        (6, 1, 2.0, 3.0),
        (7, 1, 2.0, 3.0),
    ]
    assert [change.step for change in curve.changes] == [3]
