"""What is tested by day, and what before a release: everything."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import product
from typing import Any, TypeVar

VARIABLE = "ZFTUNE_TESTS"
"""Set to "all" for every case; `make test-all` sets it."""

_Cases = TypeVar("_Cases")


def everything() -> bool:
    return os.environ.get(VARIABLE) == "all"


def fast(few: _Cases, *, all_of: _Cases) -> _Cases:
    return all_of if everything() else few


def repeated(count: int) -> int:
    """How often something random is tried: so often before a release, by day a quarter of that, at least twice."""
    return fast(min(count, max(2, count // 4)), all_of=count)


def combinations(**axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Cases for `parametrize` with a value of every axis: all of them before a release.

    By day every two values of two axes meet in one of them, in the same ones each time.
    """
    return list(product(*axes.values())) if everything() else pairs(**axes)


def pairs(**axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Cases in which every two values of two axes meet, the same ones each time; `axes` as for `combinations`."""
    values = [list(axis) for axis in axes.values()]
    if len(values) < 2 or not all(values):
        return list(product(*values))
    from allpairspy import AllPairs  # by day alone: tests/system/gpu needs pytest and nothing else

    places = AllPairs([range(len(axis)) for axis in values])  # of values that are equal, or cannot be hashed
    return [tuple(axis[place] for axis, place in zip(values, case, strict=True)) for case in places]
