"""Fixtures of tests/support/zftune."""

from __future__ import annotations

from tests.support.zftune.fixtures import *  # noqa: F403
