"""Fixtures of tests/support/zftune/daemon/runs."""

from tests.support.zftune.daemon.runs.fixtures import *  # noqa: F403
