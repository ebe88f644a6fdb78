"""Fixtures of tests/support/zftune/profile."""

from tests.support.zftune.profile.fixtures import *  # noqa: F403
