"""Fresh seeds for parametrized tests: other ones in every run, the same in all processes of one."""

from __future__ import annotations

import os
import random

VARIABLE = "ZFTUNE_TEST_SEED"
"""Holds the run's own seed; give it to see a run's cases again."""


def begin_run() -> None:
    os.environ.setdefault(VARIABLE, str(random.SystemRandom().getrandbits(48)))


def fresh_seeds(of: str, count: int) -> list[int]:
    """Seeds of 48 bits that follow from the run's."""
    chance = random.Random(f"{os.environ[VARIABLE]} {of}")
    return [chance.getrandbits(48) for _ in range(count)]
