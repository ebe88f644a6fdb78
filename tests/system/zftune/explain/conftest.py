"""Fixtures of tests/support/zftune/explain."""

from tests.support.zftune.explain.fixtures import *  # noqa: F403
