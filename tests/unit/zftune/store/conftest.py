"""Fixtures of tests/support/zftune/store."""

from tests.support.zftune.store.fixtures import *  # noqa: F403
