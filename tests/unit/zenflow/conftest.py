"""Fixtures of tests/support/zenflow."""

from tests.support.zenflow.fixtures import *  # noqa: F403
