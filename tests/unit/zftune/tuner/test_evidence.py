"""The sequential test of a pair's units, and gains as shares."""

from __future__ import annotations

import math

import numpy as np
import pytest

from zftune.tuner.evidence import WRONG, Gain, log_evidence, needed_evidence


def test_what_is_not_faster_is_rarely_proven_however_often_one_looks() -> None:
    draw, wrong = np.random.default_rng(0), 0
    for _ in range(2000):
        gains = draw.normal(0.0, 0.04, 60).tolist()
        wrong += any(log_evidence(gains[:n], [1.0] * n, 0.04**2) > math.log(1 / 0.05) for n in range(1, 61))
    assert 0.002 < wrong / 2000 < 0.05


def test_a_true_gain_is_proven_and_a_loss_never() -> None:
    draw = np.random.default_rng(1)
    gains = list(draw.normal(0.05, 0.02, 30))
    assert log_evidence(gains, [1.0] * 30, 0.02**2) > needed_evidence(8)
    assert log_evidence([-one for one in gains], [1.0] * 30, 0.02**2) < -5
    assert log_evidence([], [], 1.0) == 0.0


def test_errors_of_all_challengers_sum_to_the_nominal_one() -> None:
    assert sum(math.exp(-needed_evidence(order)) for order in range(1, 10_000)) == pytest.approx(WRONG, rel=1e-3)
    assert needed_evidence(2) > needed_evidence(1)


def test_a_gain_of_logarithms_is_a_share() -> None:
    found = Gain.of_log(math.log(2), 0.1)
    assert found.share == pytest.approx(0.5)
    assert found.error == pytest.approx(0.05)
    assert found.holds
    assert not Gain(0.01, 0.01).holds
    assert not Gain(-0.5, 0.01).holds
    assert str(Gain(0.123, 0.01)) == "12.3 +/- 2.0%"


def test_a_unit_of_twice_the_weight_counts_as_two() -> None:
    twice = log_evidence([0.08, -0.01], [2.0, 1.0], 0.0025)
    assert twice == pytest.approx(log_evidence([0.08, 0.08, -0.01], [1.0, 1.0, 1.0], 0.0025))
    assert twice != pytest.approx(log_evidence([0.08, -0.01], [1.0, 1.0], 0.0025))
