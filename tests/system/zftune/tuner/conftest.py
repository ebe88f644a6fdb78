"""Fixtures of tests/support/zftune/tuner."""

from tests.support.zftune.tuner.fixtures import *  # noqa: F403
