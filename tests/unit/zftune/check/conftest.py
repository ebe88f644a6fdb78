"""Fixtures of tests/support/zftune/check."""

from tests.support.zftune.check.fixtures import *  # noqa: F403
