"""What is believed of settings, and how measurements correct it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from tests.support.zftune.tuner.surfaces import START, Surface
from zftune.tuner.belief import MOST, Belief, doubted, far_apart, neighbours, places_of, pool_of
from zftune.tuner.space import Setting
from zftune.tuner.states import Lesson

SETTINGS = [replace(START, topk_ratio=ratio) for ratio in (0.05, 0.1, 0.15, 0.4)]


def belief(lessons: Iterable[Lesson] = (), **step_ms: float) -> Belief:
    times = {one: step_ms.get(f"k{100 * one.topk_ratio:.0f}", 100.0) for one in SETTINGS}
    return Belief(times, places_of(SETTINGS), lessons)


def test_the_planner_says_first_what_is_worth_a_look() -> None:
    found = belief(k5=90.0, k40=120.0)
    improvements = found.improvements(START)
    assert found.settings[int(improvements.argmax())] == SETTINGS[0]
    assert improvements[1] == 0.0  # the incumbent's own
    assert found.gain(START, SETTINGS[0])[0] == pytest.approx(np.log(100 / 90))
    assert not found.is_flat
    assert belief().is_flat


def test_a_measurement_corrects_the_planner_and_tells_of_neighbours() -> None:
    found = belief(k5=90.0)
    for _ in range(20):
        found.learn(found.lesson(START, SETTINGS[0], -0.2, 0.03**2))
    mean, error = found.gain(START, SETTINGS[0])
    assert mean == pytest.approx(-0.2, abs=0.02)
    assert error < 0.01
    near, far = (found.gain(SETTINGS[0], one)[0] for one in SETTINGS[2:])
    assert near > far  # the like of the incumbent is believed to be as fast as that


def test_the_planners_error_is_learnt_from_gains_that_it_did_not_predict() -> None:
    draw, settings = np.random.default_rng(0), [replace(START, update_interval=n, apply_lag=n) for n in range(1, 9)]
    true, found = draw.normal(0, 0.4, 8), Belief(dict.fromkeys(settings, 100.0), places_of(settings))
    assert found.planner_error == 0.1
    for index in (1, 2, 3, 4, 5, 6, 7):
        found.learn(found.lesson(settings[0], settings[index], float(true[0] - true[index]), 0.02**2))
    assert found.planner_error == 0.3


def test_lessons_learnt_anew_give_the_same_belief() -> None:
    draw, first, lessons = np.random.default_rng(1), belief(k5=90.0), []
    for _ in range(30):
        a, b = draw.choice(4, 2, replace=False)
        lessons.append(first.lesson(SETTINGS[a], SETTINGS[b], float(draw.normal(0, 0.2)), 0.05**2))
        first.learn(lessons[-1])
    second = belief(lessons, k5=90.0)
    assert second.planner_error == first.planner_error
    assert (second.improvements(START) == first.improvements(START)).all()


def test_after_a_counted_change_a_pair_is_known_no_better_than_that() -> None:
    lessons = [belief().lesson(START, SETTINGS[0], 0.1, 0.01**2)] * 50
    before, after = belief(lessons), belief(doubted(lessons, 0.1))
    assert before.gain(START, SETTINGS[0])[1] < 0.002
    assert 0.03 < after.gain(START, SETTINGS[0])[1] < 0.1
    assert after.gain(START, SETTINGS[0])[0] > 0  # nothing is forgotten


def test_first_looks_without_a_planner_are_far_apart() -> None:
    surface = Surface.random(0)
    settings = list(surface.space(START).settings())
    places = places_of(settings)
    found = far_apart(settings, places, START, 6)

    def apart(one: Setting, other: Setting) -> float:
        return float(np.linalg.norm(np.array(places(one)) - np.array(places(other))))

    assert len(set(found)) == 6
    closest = min(apart(one, other) for one in found for other in (*found, START) if one != other)
    usual = np.mean([apart(one, START) for one in settings])
    assert closest > 0.5 * usual


def test_the_pool_of_a_large_space_is_a_sample_with_the_neighbours_of_what_is_known() -> None:
    space = Surface.random(0).space(START)
    allowed = set(space.settings())
    pool = pool_of(space, [START], seed=0)
    near = neighbours(space, START)
    assert len(allowed) > 2 * MOST
    assert pool[0] == START
    assert set(near) <= set(pool)
    assert len(pool) <= MOST + len(near) + 1
    assert set(pool) - {START} <= allowed
    assert pool == pool_of(space, [START], seed=0) != pool_of(space, [START], seed=1)
