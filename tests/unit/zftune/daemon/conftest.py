"""Fixtures of tests/support/zftune/daemon."""

from tests.support.zftune.daemon.fixtures import *  # noqa: F403
