"""Fixtures of tests/support/zftune/telemetry."""

from tests.support.zftune.telemetry.fixtures import *  # noqa: F403
