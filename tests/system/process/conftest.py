"""Fixtures of tests/support/process."""

from tests.support.process.fixtures import *  # noqa: F403
