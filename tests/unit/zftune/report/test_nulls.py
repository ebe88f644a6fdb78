"""Every profile that is valid can be shown, whatever of it is null."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.tiers import fast
from tests.support.zftune.profile.fixtures import DATA
from tests.support.zftune.report.documents import cpu_profile, gpu_profile, rig_profile
from zftune.errors import ProfileError
from zftune.profile.schema import validate
from zftune.report.compare import compare
from zftune.report.html import contents
from zftune.report.trace import trace

Place = tuple[Any, ...]


def places(value: Any, path: Place = ()) -> Iterator[Place]:
    """Everything that could be null; of lists only the first item, of what is only listed only two."""
    if path:
        yield path
    if isinstance(value, dict):
        most = 2 if path and path[0] in ("knobs", "system", "nvml", "software", "hardware", "rig") else len(value)
        for key, child in list(value.items())[:most]:
            yield from places(child, (*path, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*path, 0))


def without(document: dict[str, Any], path: Place) -> dict[str, Any]:
    changed = copy.deepcopy(document)
    inside: Any = changed
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = None
    changed["missing"][".".join(map(str, path))] = "a test took it away"
    if path[0] in ("hardware", "software") and len(path) > 1:
        changed[path[0]]["missing"][".".join(map(str, path[1:]))] = "a test took it away"
    return changed


def is_valid(document: dict[str, Any]) -> bool:
    try:
        validate(document)
    except (ProfileError, TypeError, KeyError):  # the schema's own checks assume its shape
        return False
    return True


@pytest.mark.parametrize("build", fast([gpu_profile], all_of=[rig_profile, cpu_profile, gpu_profile]))
def test_a_null_in_any_place_that_may_be_null(build: Callable[[int], dict[str, Any]]) -> None:
    document = build(4)
    document["series"] = {source: rows and rows[:3] for source, rows in document["series"].items()}
    tried = []
    for path in list(places(document))[:: fast(7, all_of=1)]:
        if "missing" in path or path[0] in ("sources", "schema"):
            continue
        changed = without(document, path)
        if is_valid(changed):
            tried.append(".".join(map(str, path)))
            json.dumps(contents(changed), allow_nan=False)
            json.dumps(trace(changed), allow_nan=False)
            json.dumps(compare(document, changed).document(), allow_nan=False)
    assert len(tried) > fast(5, all_of=30)


@pytest.mark.parametrize("name", ["example.json", "command.json"])
def test_the_schemas_own_examples(name: str) -> None:
    document = json.loads((DATA / name).read_text(encoding="utf-8"))
    body, figures = contents(document)
    assert document["verdict"][0].split("'")[0] in body
    assert "run" in figures
    assert trace(document)["traceEvents"]
    assert compare(document, document).settings == []


def test_a_timeline_of_steps_that_were_not_measured() -> None:
    document = rig_profile()
    document["timeline"]["first_step"] = 3
    validate(document)
    _, figures = contents(document)
    assert figures["timeline"]["layout"].get("shapes", ()) == ()
    assert min(event["ts"] for event in trace(document)["traceEvents"] if event.get("cat") == "compute") < 100e3


def test_lanes_and_samples_that_are_empty() -> None:
    document = gpu_profile()
    document["timeline"]["lanes"] = {"compute": [], "stall": []}
    document["series"] = {"nvml": [], "system": []}
    validate(document)
    body, figures = contents(document)
    assert figures["timeline"]["data"] == []
    assert "PCIe is not shown" in body
