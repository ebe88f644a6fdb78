from __future__ import annotations

import copy
from dataclasses import fields
from typing import Any, get_args

import jsonschema
import pytest

from zenflow.config import DeferredUpdate, LookAhead, Pipeline, SelectStrategy, WindowPhase, ZenFlowConfig
from zftune.errors import ProfileError
from zftune.profile.schema import CAUSES, PHASES, schema, validate
from zftune.telemetry import hardware, software

Document = dict[str, Any]


def put(document: Document, path: str, value: Any) -> Document:
    *parents, last = path.split(".")
    target: Any = document
    for parent in parents:
        target = target[int(parent) if isinstance(target, list) else parent]
    target[last] = value
    return document


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())


def test_every_object_is_strict() -> None:
    def walk(part: Any) -> None:
        if isinstance(part, dict):
            if part.get("type") == "object":
                assert "additionalProperties" in part, part
            for child in part.values():
                walk(child)
        elif isinstance(part, list):
            for child in part:
                walk(child)

    walk(schema())


def test_the_examples_are_valid(document: Document, of_a_command: Document) -> None:
    validate(document)
    validate(of_a_command)


def test_this_machine_fits(document: Document) -> None:
    validate({**document, "hardware": hardware(), "software": software()})


def test_knobs_causes_and_phases_are_those_of_the_code() -> None:
    definitions = schema()["$defs"]
    knobs = definitions["knobs"]["properties"]
    assert set(knobs) == {field.name for field in fields(ZenFlowConfig)} | {"auto"}
    assert set(definitions["knobs"]["required"]) == set(knobs)
    assert set(knobs["select_strategy"]["enum"]) == set(get_args(SelectStrategy))
    assert set(knobs["deferred_update"]["enum"]) == set(get_args(DeferredUpdate))
    assert set(knobs["look_ahead"]["enum"]) == set(get_args(LookAhead))
    assert set(knobs["window_phase"]["enum"]) == set(get_args(WindowPhase))
    assert set(knobs["pipeline"]["enum"]) == set(get_args(Pipeline))
    assert set(definitions["by_cause"]["properties"]) == set(CAUSES)
    assert list(definitions["phases_ms"]["properties"]) == list(PHASES)


def test_every_required_field_is_required(document: Document) -> None:
    for name in document:
        broken = copy.deepcopy(document)
        del broken[name]
        with pytest.raises(ProfileError):
            validate(broken)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema", "zftune.profile/2", "schema"),
        ("extra", 1, "extra"),
        ("workload.sequence", 0, "workload.sequence"),
        ("workload.micro_batch", True, "workload.micro_batch"),
        ("stall.by_cause.gremlins", 1.0, "gremlins"),
        ("stall.fraction", 1.5, "stall"),
        ("knobs.update_interval", "auto", "knobs.update_interval"),
        ("fingerprint.hw_id", "HOST", "fingerprint.hw_id"),
        ("step_ms.mean", None, "step_ms.mean"),
        ("step_ms.p95", 1.0, "p50 is above p95"),
        ("step_ms.mean", float("nan"), "not a finite number"),
        ("stall.by_cause.host", 20.0, "does not add up"),
        ("stall.fraction", 0.5, "stall.fraction"),
        ("baselines.zero_offload.speedup", 2.0, "baselines.zero_offload.speedup"),
        ("baselines.zero_offload.stall.by_cause.h2d", 0.0, "baselines.zero_offload.stall.by_cause"),
        ("phases_ms.forward", 20.0, "phases_ms: do not add up to the mean step"),
        ("phases_ms.compute", 1.0, "compute"),
        ("ranks", [], "ranks"),
        ("ranks.0.phases_ms.other", 50.0, "ranks.0.phases_ms: do not add up"),
        ("per_step.3.waits_ms.luck", 1.0, "luck"),
        ("timeline.lanes.disk", [], "disk"),
        ("timeline.lanes.host", [[0.0, 1.0]], "timeline.lanes.host"),
        ("timeline.lanes.host", [[0.0, 1.0, "a", "b"]], "timeline.lanes.host"),
        ("series.system.0.at_ms", "now", "series.system.0"),
        ("command", {"script": "x"}, "command"),
        ("seed", None, "missing"),
        ("waits_ms", None, "missing"),
        ("system.threads", None, "system.threads: is null"),
        ("roofs.host_ms", None, "roofs.host_ms: is null"),
        ("per_step.0.stall_ms", None, "per_step.0.stall_ms: is null"),
        ("workload.dtype", None, "workload.dtype: is null"),
        ("practicality", 0, "practicality"),
        ("practicality", None, "missing"),
        ("selection.churn", None, "selection.churn: is null"),
        ("hardware.numa_nodes", None, "hardware.numa_nodes: is null"),
        ("software.torch", None, "software.torch: is null"),
        ("baselines.no_offload", None, "baselines.no_offload: is null"),
        ("sources", {}, "step_ms: "),
        ("sources.nonesuch", "count", "names no field"),
        ("missing.nvml", "", "missing.nvml"),
    ],
)
def test_a_fault_is_named_by_its_path(document: Document, path: str, value: Any, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        validate(put(document, path, value))


@pytest.mark.parametrize(
    "name", ["phases_ms", "hidden_ms_per_step", "link", "host", "selection", "staleness", "practicality", "baselines"]
)
def test_null_with_a_reason_is_valid_and_json_schema_alone_asks_for_it(document: Document, name: str) -> None:
    document[name] = None
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema()).validate(document)
    document["missing"][name] = "not measured"
    jsonschema.Draft202012Validator(schema()).validate(document)
    validate(document)


def test_a_nested_null_is_explained_by_its_own_name_or_its_parents(document: Document) -> None:
    document["baselines"]["no_offload"]["stall"] = None
    for name in ("baselines.no_offload.stall", "baselines.no_offload", "baselines"):
        validate({**document, "missing": {**document["missing"], name: "too large for the device"}})


def test_a_null_in_a_list_is_explained_without_its_number(document: Document) -> None:
    for row in document["per_step"]:
        row["stall_ms"] = None
    document["missing"]["per_step.stall_ms"] = "plain CPU"
    validate(document)


def test_a_moment_at_which_nothing_was_read_needs_no_reason(document: Document) -> None:
    assert document["series"]["system"][0]["throttled_percent"] is None
    validate(document)


def test_what_is_null_in_itself_needs_no_reason(of_a_command: Document) -> None:
    for name in ("script", "exit_code"):
        validate(put(of_a_command, f"command.{name}", None))


def test_knobs_that_are_null_need_a_reason(of_a_command: Document) -> None:
    del of_a_command["missing"]["knobs"]
    with pytest.raises(ProfileError, match="knobs"):
        validate(of_a_command)


def test_a_real_device_needs_no_reason_for_having_no_rig(document: Document) -> None:
    validate(put(document, "rig", None))
