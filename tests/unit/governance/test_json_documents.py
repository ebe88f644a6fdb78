"""What commands write as JSON is what docs/reference says: each field of real documents, with its type and meaning."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.support.governance.documents import ROOT
from tests.support.zftune.explain.runs import finished
from tests.support.zftune.report.documents import cpu_profile, rig_profile
from tools.reference_pages import DOCUMENTS, json_schemas, makers
from zftune.explain.summary import RunSummary, tune_document
from zftune.integrations.deepspeed.check.checking import check
from zftune.planner.machine import load_machine, machine_names
from zftune.planner.model import Job, ModelFacts
from zftune.planner.plan import curves, make_plan
from zftune.report.compare import compare
from zftune.store import open_store

PROFILE = "zftune.profile/1"
"""Its name is imported where it is written."""


@cache
def page() -> str:
    return makers()["reference/json.md"]()


def rows(name: str) -> dict[str, tuple[str, str]]:
    """Type and meaning of the fields of a document, as the page has them."""
    _, _, section = page().partition(f"\n## {name}\n")
    found = re.findall(r"^\| `(.+?)` \| (.*?) \| (.*) \|$", section.partition("\n## ")[0], re.MULTILINE)
    return {path: (kind, meaning) for path, kind, meaning in found}


def tuned(*, is_known: bool = True) -> dict[str, Any]:
    about = {
        "device": "cpu", "rig": {"name": "a", "source": "made up"}, "quality": "published", "interrupted": False,
        "workload": {"model": "tiny", "world_size": 1, "nodes": 1, "shards": 1, "ranks": "1 rank"}, "hardware": {},
        "software": {}, "seed": 0, "steps": 700,
    }  # fmt: skip
    with open_store("sqlite://", environment={"HOME": "/nowhere"}) as store:
        run_id = finished(store, 6)[0].run_id if is_known else None
        return tune_document(store, run_id, about, ["it is short"], "Nothing was tuned.")


def explained() -> dict[str, Any]:
    with open_store("sqlite://", environment={"HOME": "/nowhere"}) as store:
        run_id = finished(store, 6)[0].run_id
        return RunSummary.read(store, next(one for one in store.runs() if one.run_id == run_id)).document()


def planned() -> dict[str, Any]:
    model, machine = ModelFacts.from_text("1B,16,2048"), load_machine(machine_names()[0])
    document = make_plan(model, machine, Job(), quality="published")
    return {**document, "curves": curves(model, machine, Job(), document["proposal"])}


def checked() -> dict[str, Any]:
    config = {"train_batch_size": 1, "bf16": {"enabled": True}, "fp16": {"enabled": True}, "unknown": 1}
    return check(config, backend=None, version="0.18.2").document("1", {"ok": True, "changes": [], "left": []})


REAL: dict[str, Callable[[], dict[str, Any]]] = {
    "a search": tuned,
    "a search of which nothing is known": lambda: tuned(is_known=False),
    "a run of the store": explained,
    "a plan": planned,
    "a comparison": lambda: compare(rig_profile(), cpu_profile()).document(),
    "findings": checked,
}


def closed(schema: Any, extended: set[str]) -> Any:
    """The same, in which an object has no fields that are not described."""
    if isinstance(schema, list):
        return [closed(one, extended) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {key: closed(value, extended) for key, value in schema.items()}
    for key, one in found.items():
        if isinstance(one, dict) and isinstance(one.get("properties"), dict) and key not in extended:
            one["unevaluatedProperties"] = False
    return found


@pytest.mark.parametrize("kind", REAL)
def test_each_field_of_a_real_document_is_on_the_page(kind: str) -> None:
    document = json.loads(json.dumps(REAL[kind]()))
    name = document["schema"]
    told = rows(name)
    assert set(document) <= set(told), f"{name}: {sorted(set(document) - set(told))}"
    schema = closed(json.loads(DOCUMENTS.read_text(encoding="utf-8")), {"search"})
    key = next(key for key, one in schema["$defs"].items() if one.get("title") == name)
    validator = Draft202012Validator({**schema, "$ref": f"#/$defs/{key}"})
    assert [f"{one.json_path}: {one.message[:200]}" for one in validator.iter_errors(document)] == []


def test_each_field_has_a_type_and_a_meaning() -> None:
    described = json.loads(DOCUMENTS.read_text(encoding="utf-8"))["$defs"].values()
    missing = [name for one in described for name in one["properties"] if not re.search(rf"[`.]{name}` \|", page())]
    assert missing == []
    for name in json_schemas():
        told = rows(name)
        assert len(told) > 1
        assert [path for path, (kind, meaning) in told.items() if not kind or not meaning] == [], name


def written() -> Iterator[tuple[str, str]]:
    """Each document with a field that the code gives it where it names it, from the dicts in the code."""
    for path in (ROOT / "zftune").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {
            node.targets[0].id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            keys = [one.value if isinstance(one, ast.Constant) else "" for one in getattr(node, "keys", ())]
            if not isinstance(node, ast.Dict) or "schema" not in keys:
                continue
            value = node.values[keys.index("schema")]
            name = str(value.value if isinstance(value, ast.Constant) else names.get(getattr(value, "id", ""), ""))
            if name.startswith("zftune."):
                yield from ((name, str(key)) for key in keys if key)


def test_the_page_has_each_document_that_the_code_names_and_its_fields() -> None:
    found = set(written())
    assert {name for name, _ in found} | {PROFILE} == json_schemas()
    assert [(name, field) for name, field in sorted(found) if field not in rows(name)] == []
