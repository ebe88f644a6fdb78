"""A small soak in every run of the tests; `make soak` does the long one."""

from __future__ import annotations

import re

import pytest

from tests.zenflow import soak
from tests.zenflow.family_cases import REFERENCE


def test_three_hundred_operations() -> None:
    line = soak.soak(300, range(1000, 1006))
    assert line.startswith("soak: 300 operations on 6 models in ")
    done = {kind: int(count) for count, kind in re.findall(r"(\d+) ([a-z ]+)(?:,|$)", line.split(" s: ")[1])}
    assert sum(count for kind, count in done.items() if kind != "started over") == 300
    assert done.keys() >= {*soak.WEIGHTS, "skip"}


def test_a_difference_is_found_and_the_seed_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle of the wrong rule."""
    monkeypatch.setitem(REFERENCE, "adamw", REFERENCE["adam"])
    with pytest.raises(AssertionError) as caught:
        soak.soak(80, range(4))
    assert any(re.fullmatch(r"soak: seed \d, 20 operations", note) for note in caught.value.__notes__)
