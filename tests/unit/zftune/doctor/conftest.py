"""Fixtures of tests/support/zftune/doctor."""

from tests.support.zftune.doctor.fixtures import *  # noqa: F403
