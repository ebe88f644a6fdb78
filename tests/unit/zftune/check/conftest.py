"""Fixtures of tests/support/zftune/check, and DeepSpeed's process, begun once."""

from tests.support.zftune.check.asked import _deepspeed_is_there_to_be_asked  # noqa: F401
from tests.support.zftune.check.fixtures import *  # noqa: F403
