"""The installed DeepSpeed, asked by all tests of a process: forked from the fork server, which has imported it."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from importlib import metadata
from typing import IO, Any

import pytest

from tests.support import fork_server
from zftune.integrations.deepspeed import asking
from zftune.integrations.deepspeed.asking import Ask, Fault


@functools.cache
def _asker() -> tuple[IO[str], IO[str]]:
    """Where questions are written, and where answers are read."""
    questions, to_ask = os.pipe()
    to_read, answers = os.pipe()
    errors = os.open(os.devnull, os.O_WRONLY)
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    fork_server.fork(["-m", asking.__name__], [questions, answers, errors], env=environment)
    for end in (questions, answers, errors):
        os.close(end)
    return os.fdopen(to_ask, "w"), os.fdopen(to_read)


@functools.cache
def _answer(config: str, world_size: int) -> list[Fault]:
    questions, answers = _asker()
    questions.write(f'{{"config": {config}, "world_size": {world_size}}}\n')
    questions.flush()
    return [Fault(**{**one, "path": tuple(one["path"])}) for one in json.loads(answers.readline())]


def ask(config: Mapping[str, Any], world_size: int) -> list[Fault]:
    return _answer(json.dumps(config, default=str), world_size)


def asked(version: str) -> Ask | None:
    """The same where it is of that version; others are not there to be asked."""
    return ask if version == metadata.version("deepspeed") else None


@pytest.fixture(scope="session", autouse=True)
def _deepspeed_is_there_to_be_asked() -> None:
    """No test starts its process."""
    _asker()
