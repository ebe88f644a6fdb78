"""The installed DeepSpeed, asked by all tests of a process."""

from __future__ import annotations

import atexit
import functools
import json
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from zftune.integrations.deepspeed.asking import Ask, Asker, Fault


@functools.cache
def _asker() -> Asker:
    asker = Asker()
    atexit.register(asker.__exit__)
    return asker


@functools.cache
def _answer(config: str, world_size: int) -> list[Fault]:
    return _asker()(json.loads(config), world_size)


def ask(config: Mapping[str, Any], world_size: int) -> list[Fault]:
    """What it refuses."""
    return _answer(json.dumps(config, default=str), world_size)


def asked(version: str) -> Ask | None:
    """The same where it is of that version; others are not there to be asked."""
    return ask if version == metadata.version("deepspeed") else None
