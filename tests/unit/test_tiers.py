from __future__ import annotations

from collections.abc import Callable
from itertools import combinations as choose
from itertools import product
from typing import Any

import pytest

from tests.support.tiers import VARIABLE, combinations, everything, fast, repeated

AXES: dict[str, list[Any]] = {"rule": list("abcde"), "layout": list("wxyz"), "threads": [1, 2, 5], "odd": [False, True]}


@pytest.fixture
def tier(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    def choose_tier(name: str | None) -> None:
        monkeypatch.delenv(VARIABLE, raising=False) if name is None else monkeypatch.setenv(VARIABLE, name)

    choose_tier(None)
    return choose_tier


@pytest.mark.parametrize(("name", "all_of_it"), [(None, False), ("", False), ("day", False), ("all", True)])
def test_everything_is_asked_for_by_name(tier: Callable[[str | None], None], name: str | None, all_of_it: bool) -> None:
    tier(name)
    assert everything() == all_of_it
    assert fast(2, all_of=20) == (20 if all_of_it else 2)
    assert [repeated(count) for count in (1, 2, 5, 30)] == ([1, 2, 5, 30] if all_of_it else [1, 2, 2, 7])


@pytest.mark.parametrize("count", [2, 3, 4])
def test_by_day_every_two_values_of_two_axes_meet(tier: Callable[[str | None], None], count: int) -> None:
    axes = dict(list(AXES.items())[:count])
    cases = combinations(**axes)
    for one, other in choose(range(count), 2):
        met = {(case[one], case[other]) for case in cases}
        assert met == set(product(list(axes.values())[one], list(axes.values())[other]))
    assert len(cases) == len(set(cases))
    assert set(cases) <= set(product(*axes.values()))


def test_by_day_there_are_few_and_always_the_same(tier: Callable[[str | None], None]) -> None:
    cases = combinations(**AXES)
    assert 20 <= len(cases) <= 30 < 5 * 4 * 3 * 2
    assert combinations(**AXES) == cases


def test_before_a_release_all_values_meet(tier: Callable[[str | None], None]) -> None:
    tier("all")
    assert combinations(**AXES) == list(product(*AXES.values()))


def test_one_axis_and_an_empty_one(tier: Callable[[str | None], None]) -> None:
    assert combinations(seed=range(3)) == [(0,), (1,), (2,)]
    assert combinations(seed=range(3), rule=[]) == []


def test_values_need_neither_differ_nor_have_a_hash(tier: Callable[[str | None], None]) -> None:
    cases = combinations(lag=[1, 1], knobs=[{"a": 1}, {"a": 2}, {}])
    assert sorted(map(str, cases)) == sorted(map(str, product([1, 1], [{"a": 1}, {"a": 2}, {}])))
