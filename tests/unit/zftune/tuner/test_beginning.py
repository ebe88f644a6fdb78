"""Where a search begins: a preset that must not run here is refused with its reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zftune.quality import assumed_coverage
from zftune.tuner.search import SearchOptions
from zftune.tuner.setup import SearchRequest, _refusal
from zftune.tuner.space import PUBLISHED, space_for
from zftune.tuner.states import BarredSetting


@pytest.fixture
def wanted() -> SearchRequest:
    space = space_for(PUBLISHED, "published", coverage=assumed_coverage)
    return SearchRequest(own=PUBLISHED, space=space, options=SearchOptions(), fresh=False, ratios=None, least_ratio=1.0)


def test_a_preset_that_a_run_crashed_with_is_not_begun_with(wanted: SearchRequest) -> None:
    assert _refusal(PUBLISHED, wanted) is None
    crashed = replace(wanted, options=replace(wanted.options, barred=(BarredSetting(PUBLISHED, "crash"),)))
    assert _refusal(PUBLISHED, crashed) == "it crashed before"


def test_a_preset_that_takes_gpu_memory_is_for_who_allows_that(wanted: SearchRequest) -> None:
    less = replace(PUBLISHED, offload_ratio=0.5)
    assert "--tune-memory" in str(_refusal(less, wanted))
    assert _refusal(less, replace(wanted, least_ratio=0.0)) is None
