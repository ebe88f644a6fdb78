"""Fixtures of tests/support/zftune/daemon/faults."""

from tests.support.zftune.daemon.faults.fixtures import *  # noqa: F403
