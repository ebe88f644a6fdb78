"""The document of a command, from records."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

import pytest

from tests.support.zftune.profile.fixtures import EXAMPLE
from zenflow import ZenFlowConfig
from zftune.profile.command.document import Ended, build_document, runtime_of
from zftune.profile.command.records import Rank
from zftune.profile.figures import _lines
from zftune.profile.sampling import Sampling
from zftune.profile.schema import schema

Row = dict[str, Any]
STEP_NS = 10_000_000
STATS: Row = {
    "step": 1, "step_ms": 10.0, "stall_ms": {"host": 2.0}, "hidden_ms": 1.0, "cpu_wait_ms": 3.0, "closed": True,
    "d2h_bytes": 100, "h2d_bytes": 50, "index_bytes": 5, "migrated_bytes": 5, "host_ms": 4.0, "host_bytes": 8_000_000,
    "host_elements": 1000, "staleness_mean_steps": 2.0, "staleness_max_steps": 3, "coverage": 0.4, "churn": None,
    "change_norm": None, "weight_norm": None,
}  # fmt: skip
LAST: Row = {
    **STATS, "host_memory": {"state": 10, "log": 20, "staging": 30, "peak": 70}, "host_engine": ["native", 2]
}  # fmt: skip


@pytest.fixture(scope="module")
def sampling() -> Sampling:
    with Sampling(lambda: [os.getpid()]) as sampling:
        pass
    return sampling


def step(index: int, **more: Any) -> Row:
    phases = {"data": 1.0, "forward": 3.0, "backward": 4.0, "optimizer": 1.5, "other": 0.5}
    begin = index * STEP_NS
    return {
        "index": index,
        "measured": True,
        "begin_ns": begin,
        "end_ns": begin + STEP_NS,
        "step_ms": 10.0,
        "phases_ms": phases,
        "waits_ms": {"data": 1.0},
        "stall_ms": None,
        "hidden_ms": None,
        "overhead_ms": 0.1,
        "spans": [["data", 0.0, 1.0], ["forward", 1.0, 4.0], ["other", 4.0, 4.5], ["backward", 4.5, 8.5]],
        **more,
    }


def rank(
    number: int = 0, *, header: Row | None = None, model: Row | None = None, steps: list[Row] | None = None
) -> Rank:
    given = {"rank": number, "world_size": 1, "script": "train.py", "device": "cpu", **(header or {})}
    return Rank(given, model=model or {}, steps=steps or [step(5 + i) for i in range(6)])


def ours(last: Row | None = None, *, model: Row | None = None, **knobs: Any) -> Rank:
    """A rank that zenflow trained in two steps."""
    given = {"model_bytes": 1000, "knobs": dataclasses.asdict(ZenFlowConfig(**knobs)), **(model or {})}
    return rank(model=given, steps=[step(5, runtime=STATS), step(6, runtime={**LAST, **(last or {})})])


def build(*ranks: Rank, sampling: Sampling) -> Row:
    return build_document(ranks, Ended(0, stopped=False), sampling)


def test_what_an_agent_knows_least(sampling: Sampling) -> None:
    document = build(rank(), sampling=sampling)
    assert document["step_ms"] == {"mean": 10.0, "p50": 10.0, "p95": 10.0}
    assert document["steps"] == {"measured": 6, "discarded": 5}
    assert [row["step"] for row in document["per_step"]] == [6, 7, 8, 9, 10, 11]  # from 1, as on every screen
    assert document["overhead_fraction"] == pytest.approx(0.01)
    assert document["waits_ms"] == {"data": 1.0}
    assert document["throughput"]["tokens_per_s"] is None
    for name in ("stall", "knobs", "link", "host", "baselines", "practicality", "seed", "roofs"):
        assert document[name] is None
        assert document["missing"][name]


def test_the_lines_that_held_the_thread(sampling: Sampling) -> None:
    one = rank()
    place = {"file": "train.py", "line": 3, "function": "main"}
    lines = [{**place, "share": 0.75, "within": place}]
    one.lines = {"of": "step", "samples": 9, "fraction": 0.8, "cost": 0.002, "lines": lines}
    document = build(one, sampling=sampling)
    found = document["thread_lines"]
    assert (found["of"], found["samples"], found["ms_per_step"]) == ("step", 9, 8.0)
    assert found["lines"] == [{**place, "share": 0.75, "ms_per_step": pytest.approx(6.0), "within": place}]
    assert document["overhead_fraction"] == pytest.approx(0.01 + 0.002)
    assert document["sources"]["thread_lines"] == "sampled frames"
    assert "thread_lines" in build(rank(), sampling=sampling)["missing"]


def test_the_timeline_has_four_steps(sampling: Sampling) -> None:
    timeline = build(rank(), sampling=sampling)["timeline"]
    assert (timeline["first_step"], timeline["steps"], timeline["length_ms"]) == (6, 4, 40.0)
    assert timeline["lanes"]["data"][1] == [10.0, 11.0, "data"]
    assert [label for _, _, label in timeline["lanes"]["compute"]] == ["forward", "backward"] * 4


def test_a_stall_by_cause(sampling: Sampling) -> None:
    stalls: list[Row] = [{"host": 2.0}, {"host": 1.0, "data": 3.0}]
    steps = [step(i, stall_ms=stall, hidden_ms=0.5) for i, stall in enumerate(stalls)]
    document = build(rank(steps=steps, header={"has_stream": True, "source": "event"}), sampling=sampling)
    assert document["stall"] == {"fraction": 0.3, "ms_per_step": 3.0, "by_cause": {"host": 1.5, "data": 1.5}}
    assert document["hidden_ms_per_step"] == 0.5
    assert document["sources"]["stall"] == "event"
    assert "stall" not in document["missing"]


def test_tokens_and_the_model(sampling: Sampling) -> None:
    model = {"model": "Net", "parameters": 10, "trainable": 0, "dtype": "float32", "micro_batch": 2, "sequence": 4}
    document = build(rank(model={**model, "tokens_per_step": 16, "systems": ["DDP"]}), sampling=sampling)
    assert document["throughput"]["tokens_per_s"] == pytest.approx(1600)
    assert document["workload"] == {**model, "text": None}
    assert document["command"]["systems"] == ["DDP"]
    assert "learning_rates" not in document["command"]  # an earlier version's records have none


@pytest.mark.parametrize("has_knobs", [False, True])
def test_the_learning_rate_stands_with_the_settings(sampling: Sampling, has_knobs: bool) -> None:
    one = ours(model={"learning_rates": [1e-5, 0.002]})
    if not has_knobs:
        del one.model["knobs"], one.model["model_bytes"]
    document = build(one, sampling=sampling)
    assert document["command"]["learning_rates"] == [1e-5, 0.002]
    (settings,) = [one.value for one in _lines(document) if one.name == "settings"]
    assert settings.endswith("learning rate 1e-05, 0.002 in the first measured step")
    assert settings.startswith("topk_ratio") == has_knobs


def test_our_own_runtime_tells_the_rest(sampling: Sampling) -> None:
    document = build(ours(update_interval=1), sampling=sampling)
    assert document["knobs"]["update_interval"] == 1
    assert document["link"]["bytes_over_model_bytes"] == pytest.approx(0.16)
    assert document["host"] | {"ceiling_gbps": 0} == {
        "update_ms": 4.0, "gbps": 2.0, "ceiling_gbps": 0, "bytes_per_element": 8000, "engine": "native", "threads": 2
    }  # fmt: skip
    assert document["selection"] == {"coverage": 0.4, "churn": None}
    assert document["staleness"] == {"mean": 2.0, "max": 3}
    assert document["movement"] is None  # records of an earlier version
    assert "updated twice" in document["missing"]["movement"]
    assert document["memory"]["host_peak_bytes"] == 70


def test_the_movement_of_the_weights_tells_what_late_updates_may_cost(sampling: Sampling) -> None:
    document = build(ours({"change_norm": 0.5, "weight_norm": 500.0}, topk_ratio=0.25), sampling=sampling)
    assert document["movement"] == {
        "percent": pytest.approx(0.1),
        "late_percent": pytest.approx(0.1 * 0.75 * 2),
        "expected_loss_percent": pytest.approx(10.2 * 0.15**2),
    }
    assert document["sources"]["movement"] == "count"


def test_a_probe_below_what_the_host_did_is_no_ceiling(sampling: Sampling) -> None:
    """A pass of a byte in hardly any time: no probe of memory reaches that."""
    steps = [step(5, runtime={**LAST, "host_ms": 1e-6}, stall_ms={"host": 1.0}, hidden_ms=0.0)]
    one = rank(model=ours(update_interval=1).model, steps=steps, header={"has_stream": True})
    document = build(one, sampling=sampling)
    assert document["host"]["gbps"] > 1e6
    assert document["host"]["ceiling_gbps"] is None
    assert "the processor's caches" in document["missing"]["host.ceiling_gbps"]
    assert "host.ceiling_gbps" not in document["sources"]
    assert document["roofs"]["host_ms"] is None
    assert document["missing"]["roofs.host_ms"] == document["missing"]["host.ceiling_gbps"]


def test_a_script_on_an_emulated_accelerator_says_so(sampling: Sampling) -> None:
    rig = json.loads(EXAMPLE.read_text())["rig"]
    document = build(ours({"rig": rig}, update_interval=1), sampling=sampling)
    assert document["rig"] == rig
    assert document["device"] == "cpu (emulated accelerator)"
    assert document["host"]["ceiling_gbps"] == rig["host_gbps"]
    assert {document["sources"][name] for name in ("step_ms", "host.ceiling_gbps")} == {"rig"}
    plain = build(rank(), sampling=sampling)
    assert plain["fingerprint"]["hw_id"] != document["fingerprint"]["hw_id"]


def test_the_timeline_is_the_window_that_the_runtime_recorded(sampling: Sampling) -> None:
    lanes = {"compute": [], "d2h": [[1.0, 3.0, "2 bytes"]], "host": [], "h2d": [], "stall": [[4.0, 6.0, "host"]]}
    recorded = {"first_step": 6, "steps": 1, "length_ms": 10.0, "lanes": lanes}
    one = ours({"timeline": recorded}, update_interval=1)
    for row in one.steps:
        row["spans"] = [["data", 0.0, 1.0], ["forward", 1.0, 5.0], ["backward", 5.0, 10.0]]
    timeline = build(one, sampling=sampling)["timeline"]
    assert (timeline["first_step"], timeline["steps"], timeline["length_ms"]) == (7, 1, 10.0)
    assert timeline["lanes"]["d2h"] == [[1.0, 3.0, "2 bytes"]]
    assert timeline["lanes"]["data"] == [[0.0, 1.0, "data"]]
    assert timeline["lanes"]["compute"] == [[1.0, 4.0, "forward"], [6.0, 10.0, "backward"]]  # without the stall
    recorded["first_step"] = 7  # not among the measured steps
    assert build(one, sampling=sampling)["timeline"]["first_step"] == 6


@pytest.mark.parametrize(
    "change",
    [{"d2h_bytes": "x"}, {"host_ms": None}, {"coverage": []}, {"host_engine": 7}, {"host_memory": {}}],
    ids=str,
)
def test_a_runtime_that_tells_nonsense_is_not_believed(change: Row) -> None:
    assert runtime_of(ours(), {}) is not None
    assert runtime_of(ours(change), {}) is None


def test_knobs_of_another_version_are_not_believed() -> None:
    for knobs in ({"nonesuch": 1}, {"topk_ratio": 7}, {"topk_ratio": "x"}):
        missing: dict[str, str] = {}
        found = runtime_of(rank(model={"model_bytes": 1, "knobs": knobs}, steps=[step(5, runtime=LAST)]), missing)
        assert found is None
        assert "zenflow's optimizer trained" in missing["link"]


def test_steps_of_which_the_runtime_tells_nothing_leave_those_of_the_others(sampling: Sampling) -> None:
    model = ours(update_interval=1).model
    document = build(rank(model=model, steps=[step(5, runtime=LAST), step(6)]), sampling=sampling)
    assert document["link"]["bytes_over_model_bytes"] == pytest.approx(0.16)
    assert document["memory"]["host_peak_bytes"] == 70
    assert "link" not in document["missing"]


def test_a_reason_for_what_is_known_is_dropped(sampling: Sampling) -> None:
    told = rank(model={"model": "Net"})
    told.missing = {"workload.model": "never seen", "workload.dtype": "mixed", "nonsense.field": "x"}
    missing = build(told, sampling=sampling)["missing"]
    assert "workload.model" not in missing
    assert missing["workload.dtype"] == "mixed"


def test_the_script_is_its_last_part_only(sampling: Sampling) -> None:
    document = build(rank(header={"script": "/home/someone/train.py"}), sampling=sampling)
    assert document["command"]["script"] == "train.py"


def test_samplers_fill_exactly_the_schemas_fields(sampling: Sampling) -> None:
    fields = schema()["properties"]["system"]["anyOf"][0]["required"]
    found = build(rank(), sampling=sampling)["system"]
    assert found is None or list(found) == fields


@pytest.mark.parametrize("visible", ["", " , "])
def test_hidden_gpus_are_not_sampled(visible: str) -> None:
    with Sampling(list, {"CUDA_VISIBLE_DEVICES": visible}) as sampling:
        pass
    missing: dict[str, str] = {}
    assert sampling.fields(0, 1, missing)["nvml"] is None
    assert missing["nvml"] == "CUDA_VISIBLE_DEVICES hides every GPU"


NO_DATA = {"phases_ms": {"forward": 4.0, "backward": 4.0, "optimizer": 1.5, "other": 0.5, "data": 0.0}, "waits_ms": {}}


def test_where_no_loader_gave_a_batch_nobody_knows_what_data_took(sampling: Sampling) -> None:
    document = build(rank(), rank(1, steps=[step(i, **NO_DATA) for i in range(6)]), sampling=sampling)
    assert document["phases_ms"]["data"] == 1.0
    assert document["ranks"][1]["phases_ms"]["data"] is None
    assert {name for name in document["missing"] if name.endswith("data")} == {"ranks.phases_ms.data"}
    document = build(rank(steps=[step(i, **NO_DATA) for i in range(6)]), sampling=sampling)
    assert document["phases_ms"] == {**NO_DATA["phases_ms"], "data": None}
    assert all(row["phases_ms"]["data"] is None for row in document["per_step"])
    assert document["missing"]["phases_ms.data"].startswith("no torch DataLoader gave a batch")


def test_one_batch_from_a_loader_is_enough(sampling: Sampling) -> None:
    steps = [step(5), *(step(i, **NO_DATA) for i in range(6, 11))]
    assert build(rank(steps=steps), sampling=sampling)["phases_ms"]["data"] == pytest.approx(1 / 6)


def test_on_a_stream_steps_begin_where_the_one_before_ended(sampling: Sampling) -> None:
    # The thread queues three steps and waits in the fourth, while the device takes 10 ms for each.
    at_ns = (0, 100_000, 200_000, 300_000, 40_000_000)
    stream: Row = {"has_stream": True, "source": "event"}
    steps = [step(i, stall_ms={}, hidden_ms=0.0, begin_ns=begin, end_ns=begin + 1) for i, begin in enumerate(at_ns)]
    rows = build(rank(steps=steps, header=stream), sampling=sampling)["per_step"]
    assert [row["begin_ms"] for row in rows] == [0.0, 10.0, 20.0, 30.0, 40.0]
    rows = build(rank(steps=steps), sampling=sampling)["per_step"]
    assert [row["begin_ms"] for row in rows] == [0.0, 0.1, 0.2, 0.3, 40.0]


def test_tokens_are_those_of_the_measured_steps(sampling: Sampling) -> None:
    counted = [step(i, tokens=tokens) for i, tokens in enumerate((10, 20, 60))]
    document = build(rank(steps=counted, model={"tokens_per_step": 16}), sampling=sampling)
    assert document["throughput"]["tokens_per_s"] == pytest.approx(3000)
    partly = [*counted, step(3, tokens=None)]
    document = build(rank(steps=partly, model={"tokens_per_step": 16}), sampling=sampling)
    assert document["throughput"]["tokens_per_s"] == pytest.approx(1600)


def test_tokens_of_the_ranks_are_added_up(sampling: Sampling) -> None:
    model: Row = {"tokens_per_step": 16}
    slower = [step(i, step_ms=20.0, phases_ms={"data": 20.0}) for i in range(6)]
    document = build(rank(model=model), rank(1, model=model, steps=slower), sampling=sampling)
    assert document["throughput"] == {"steps_per_s": pytest.approx(100), "tokens_per_s": pytest.approx(2400)}
    document = build(rank(model=model), rank(1), sampling=sampling)
    assert document["throughput"]["tokens_per_s"] is None
    assert document["missing"]["throughput.tokens_per_s"] == "the shape of the batches is not known"


class Asked(Sampling):
    uuids: Any = "nothing"

    def fields(self, *given: Any, uuids: Any = None) -> Row:
        self.uuids = uuids
        return super().fields(*given, uuids=uuids)


def test_only_the_ranks_gpus_are_asked_about() -> None:
    asked = Asked(list, {"CUDA_VISIBLE_DEVICES": ""})
    with asked:
        pass
    build(rank(header={"device_uuid": "GPU-a"}), rank(1, header={"device_uuid": "GPU-b"}), sampling=asked)
    assert asked.uuids == ["GPU-a", "GPU-b"]
    build(rank(header={"device_uuid": "GPU-a"}), rank(1), sampling=asked)
    assert asked.uuids is None


def test_the_loss_and_what_it_shows(sampling: Sampling) -> None:
    steps = [step(5 + i, loss=4.0 - i / 8, loss_source="log_loss") for i in range(16)]
    document = build_document([rank(steps=steps)], Ended(0, False), sampling)
    assert document["loss"]["trend"] == "falling"
    assert (document["loss"]["count"], document["loss"]["not_finite"]) == (16, 0)
    assert [row["loss"] for row in document["per_step"]] == [row["loss"] for row in steps]
    assert document["sources"]["loss"] == "log_loss"


def test_a_loss_that_is_not_finite_or_not_known(sampling: Sampling) -> None:
    steps = [step(5 + i, loss=float("nan") if i == 3 else 4.0, loss_source="backward") for i in range(8)]
    document = build_document([rank(steps=steps)], Ended(0, False), sampling)
    assert document["loss"]["not_finite"] == 1
    assert document["per_step"][3]["loss"] is None
    assert "The loss is not a finite number in 1 of the measured steps." in document["verdict"]
    broken = [{**row, "loss": float("inf")} for row in steps]
    document = build_document([rank(steps=broken)], Ended(0, False), sampling)
    assert document["loss"] is None
    assert any("not a finite number in any measured step" in sentence for sentence in document["verdict"])
    document = build_document([rank()], Ended(0, False), sampling)
    assert document["loss"] is None
    assert "zftune.log_loss" in document["missing"]["loss"]
