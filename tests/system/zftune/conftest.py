"""Fixtures of tests/support/zftune, and where searches are computed."""

from __future__ import annotations

import pytest

from tests.support.zftune.fixtures import *  # noqa: F403
from tests.support.zftune.samplers import FORKING
from zftune.tuner import sampler_process


@pytest.fixture(autouse=True)
def _search_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_process, "subprocess", FORKING)
