"""Fixtures of tests/support/zftune/planner."""

from tests.support.zftune.planner.fixtures import *  # noqa: F403
