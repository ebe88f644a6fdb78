from __future__ import annotations

import pytest

from zftune.explain.account import Account


def account(*parts: tuple[float, float, float, float]) -> Account:
    """From (seconds, spent, the incumbent's seconds, gain)."""
    found = Account()
    for seconds, spent_s, incumbent_s, gain in parts:
        found.add(seconds, spent_s=spent_s, incumbent_s=incumbent_s, gain=gain)
    return found


def test_it_breaks_even_where_the_savings_reach_the_cost() -> None:
    found = account((8, 0, 8, 0), (10, 2, 8, 0), (4, 0, 4, 0.2))
    assert found.saved_s == pytest.approx(1)  # a quarter of the 4 s
    assert found.break_even_s is None
    assert found.remaining_s(0.2) == pytest.approx(4)  # a second is missing, each saves a quarter
    found.add(8, spent_s=0, incumbent_s=8, gain=0.2)
    assert found.break_even_s == pytest.approx(22 + 4)
    assert found.remaining_s(0.2) is None


def test_what_is_spent_later_has_to_be_won_again() -> None:
    found = account((1, 1, 0, 0), (2, 0, 2, 0.5))
    assert found.break_even_s == pytest.approx(2)
    found.add(3, spent_s=3, incumbent_s=0, gain=0.5)
    assert found.break_even_s is None
    assert found.remaining_s(0.5) == pytest.approx(2)
    found.add(4, spent_s=0, incumbent_s=4, gain=0.5)
    assert found.break_even_s == pytest.approx(8)


def test_a_challenger_that_is_measured_saves_what_the_incumbent_would() -> None:
    found = account((10, 4, 6, 0.25))
    assert found.spent_s == 4
    assert found.saved_s == pytest.approx(2)


@pytest.mark.parametrize("gain", [0.0, -0.01])
def test_without_a_gain_it_never_breaks_even(gain: float) -> None:
    found = account((5, 1, 4, 0), (100, 0, 100, gain))
    assert found.break_even_s is None
    assert found.remaining_s(gain) is None


def test_what_cost_nothing_was_even_from_the_beginning() -> None:
    found = account((5, 0, 5, 0), (5, 0, 5, 0.1))
    assert found.break_even_s == 0
    assert found.remaining_s(0.1) is None
