from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parent / "data" / "example.json"


@pytest.fixture
def document() -> dict[str, Any]:
    """A profile of ZenFlow on a rig, with all baselines; every test gets its own."""
    return copy.deepcopy(json.loads(EXAMPLE.read_text()))
