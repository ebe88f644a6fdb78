"""Fixtures of tests/support/zftune/checkpoint."""

from tests.support.zftune.checkpoint.fixtures import *  # noqa: F403
