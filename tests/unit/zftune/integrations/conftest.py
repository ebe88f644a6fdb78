"""What a Trainer imports is imported before its first test: the import starts processes, which a unit test must not."""

from __future__ import annotations

import contextlib
import warnings

import pytest

TRAINERS = "tests.support.zftune.integrations.trainers"


@pytest.fixture(scope="module", autouse=True)
def _deepspeed_is_imported(request: pytest.FixtureRequest) -> None:
    if any(getattr(one, "__module__", None) == TRAINERS for one in vars(request.module).values()):
        with contextlib.suppress(ImportError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import deepspeed  # noqa: F401
