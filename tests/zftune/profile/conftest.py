from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parent / "data"
EXAMPLE = DATA / "example.json"


@pytest.fixture
def document() -> dict[str, Any]:
    """A profile of ZenFlow on a rig, with all baselines; every test gets its own."""
    return copy.deepcopy(json.loads(EXAMPLE.read_text()))


@pytest.fixture
def of_a_command() -> dict[str, Any]:
    """A profile of a user's command, two ranks on plain CPU."""
    return copy.deepcopy(json.loads((DATA / "command.json").read_text()))
