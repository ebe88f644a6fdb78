"""What is known of DeepSpeed's defaults and of its loss scaling is true of the installed release."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest

from tests.support import fork_server
from zftune.ds_config import facts
from zftune.errors import BadInputError
from zftune.integrations.deepspeed.precision import Precision

NAMES = (
    "loss_scale",
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
    "min_loss_scale",
    "auto_cast",
    "opt_level",
)
VALUES: tuple[Any, ...] = (
    *(None, -1, 0, 1, 0.5, 2.0, -3, "16", " 4 ", "2.5", "x", "auto", "true", "no", 1e400, float("nan"), [], {}),
)
SECTIONS = {
    name: [{"enabled": True, "loss_scale": scale, name: value} for value, scale in product(VALUES, (0, 8, "auto"))]
    for name in NAMES
}
READ = """
import json, sys
from deepspeed.runtime.precision_config import DeepSpeedFP16Config
from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig

def read(section):
    try:
        return DeepSpeedFP16Config(**section).model_dump()
    except ValueError:
        return None

defaults = {name: one.default for name, one in ZenFlowConfig.model_fields.items() if not one.is_required()}
read = {name: [read(one) for one in sections] for name, sections in json.load(sys.stdin).items()}
print("found", json.dumps([defaults, read]))
"""
Found = tuple[dict[str, Any], dict[str, list[dict[str, Any] | None]]]


@pytest.fixture(scope="module")
def found() -> Found:
    """DeepSpeed's defaults of zenflow, and what it reads, in a process of its own: its import leaves warnings."""
    done = fork_server.run(["-c", READ], stdin=json.dumps(SECTIONS), check=True)
    (line,) = (one for one in done.stdout.splitlines() if one.startswith("found "))
    defaults, read = json.loads(line.removeprefix("found "))
    return defaults, read


@pytest.mark.smoke
def test_the_defaults_of_zenflow_are_those_of_the_installed_release(found: Found) -> None:
    assert {name: found[0][name] for name in facts.ZENFLOW_DEFAULTS} == facts.ZENFLOW_DEFAULTS


@pytest.mark.smoke
@pytest.mark.parametrize("name", NAMES)
def test_loss_scaling_is_read_as_deepspeed_reads_it(found: Found, name: str) -> None:
    for section, theirs in zip(SECTIONS[name], found[1][name], strict=True):
        if theirs is None:
            with pytest.raises(BadInputError, match=rf"^fp16\.{name} is "):
                Precision.of({"fp16": section})
            continue
        ours = Precision.of({"fp16": section}).loss_scaling
        assert ours == {field: theirs[field] for field in ours or ()}, section
