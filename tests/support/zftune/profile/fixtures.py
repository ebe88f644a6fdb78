from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

DATA = Path(__file__).parent / "data"
EXAMPLE = DATA / "example.json"


@pytest.fixture(autouse=True, scope="module")
def memory_is_not_probed() -> Iterator[None]:
    """A probe takes a second of all cores, and a profile would hold this machine's figure."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zftune.telemetry.bandwidth.host_bandwidth", lambda: SimpleNamespace(gbps_max=40.0))
        yield


@pytest.fixture
def document() -> dict[str, Any]:
    """A profile of ZenFlow on a rig, with all baselines; every test gets its own."""
    return copy.deepcopy(json.loads(EXAMPLE.read_text()))


@pytest.fixture
def of_a_command() -> dict[str, Any]:
    """A profile of a user's command, two ranks on plain CPU."""
    return copy.deepcopy(json.loads((DATA / "command.json").read_text()))
