"""Which rule sees what: every bad ds_config, no safe one, for either backend."""

from __future__ import annotations

import ast
import io
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from tests.support.zftune.check.asked import ask, asked
from tests.support.zftune.check.cases import CASES, OFFLOAD, PARAMS, SAFE, ZENFLOW, ZERO, ZF_S, ZF_U, ZF_W, Bad, safe
from zftune.ds_config.reading import Source, leaves, path_of, put
from zftune.integrations.deepspeed.check.checking import check, fix
from zftune.integrations.deepspeed.check.findings import SEVERITIES, Finding, render
from zftune.integrations.deepspeed.outcome import divided_by
from zftune.store.types import Backend

INSTALLED = metadata.version("deepspeed")
NAMES = sorted(path.stem for path in SAFE.glob("*.json"))


def found(config: dict[str, Any], backend: Backend | None = None, version: str = INSTALLED) -> list[Finding]:
    return list(check(config, backend=backend, version=version, ask=asked(version)).findings)


def faults(config: dict[str, Any], backend: Backend | None = None) -> list[str]:
    return [finding.rule for finding in found(config, backend) if finding.is_fault]


def with_changes(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    config = safe(name)
    for dotted, value in changes.items():
        put(config, path_of(dotted), value)
    return config


ALSO_A_FAULT = {
    "zenflow-overflow": {"zenflow-bf16"},
    "zenflow-not-adam": {"refused-by-deepspeed"},
    "zenflow-16-bit-masters": {"zenflow-bf16"},
    "group-settings": {"accelerate-boundary"},
    "accelerate-boundary": {"group-settings"},
    "ratio-zenflow": {"zenflow-stage-3", "zenflow-clipping", "zenflow-bf16"},
    "auto-not-filled": {"accelerate-boundary", "zenflow-clipping", "weight-decay-default"},
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_found_and_nothing_else(case: Bad) -> None:
    findings = found(case.config, "deepspeed", case.version)
    (finding,) = (one for one in findings if (one.rule, ".".join(one.path)) == (case.rule, case.where))
    assert finding.is_fault
    assert finding.severity == "crashes" or case.proof in ("figure", "moves", "elsewhere")
    assert finding.reason.endswith(".")
    assert finding.safe or finding.rule == "refused-by-deepspeed"
    assert bool(finding.changes) == case.mended or case.rule == "auto-not-filled"
    others = {one.rule for one in findings if one.is_fault} - {case.rule}
    assert others <= ALSO_A_FAULT.get(case.rule, set())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("version", ["0.19.6", "0.18.0", "1.0.0"])
def test_safe_ds_configs_have_no_fault(name: str, version: str) -> None:
    report = check(safe(name), backend=None, version=version)
    assert [finding for finding in report.findings if finding.is_fault] == []
    assert report.ok


def test_there_are_ten() -> None:
    assert len(NAMES) == 10


@pytest.mark.parametrize("name", NAMES)
def test_the_backend_zenflow_takes_the_safe_ones(name: str) -> None:
    assert faults(safe(name), "zenflow") == []


@pytest.mark.parametrize(
    ("name", "changes", "where"),
    [
        ("zero3-offload", {f"{ZERO}.zero_hpz_partition_size": 4}, f"{ZERO}.zero_hpz_partition_size"),
        ("zero3-offload", {f"{ZERO}.offload_param.device": "nvme"}, f"{ZERO}.offload_param.device"),
        ("zero2-offload", {f"{OFFLOAD}.device": "nvme"}, f"{OFFLOAD}.device"),
        ("zero2-offload", {"sparse_gradients": True}, "sparse_gradients"),
        ("zero2-offload", {"amp": {"enabled": True}}, "amp.enabled"),
        ("zero2-offload", {"optimizer.type": "Lamb"}, "optimizer.type"),
        ("zenflow-sequential", {ZF_U: 0}, ZF_U),
        ("zenflow-sequential", {ZF_S: 0}, ZF_S),
        ("zenflow-sequential", {ZF_W: -1}, ZF_W),
    ],
)
def test_what_the_backend_zenflow_refuses(name: str, changes: dict[str, Any], where: str) -> None:
    config = with_changes(name, changes)
    there = [finding for finding in found(config, "zenflow") if ".".join(finding.path) == where]
    assert "crashes" in {finding.severity for finding in there}
    assert where in {".".join(finding.path) for finding in found(config) if finding.severity == "crashes"}


@pytest.mark.parametrize(("name", "told"), [("zero3-offload", True), ("zero2-offload", False)])
def test_nvme_names_the_op_that_deepspeed_compiles(name: str, told: bool) -> None:
    config = with_changes(name, {f"{OFFLOAD}.device": "nvme", f"{OFFLOAD}.nvme_path": "/nvme"})
    notes = [one for one in found(config, "deepspeed") if one.rule == "nvme-op"]
    assert [one.advice for one in notes] == ["ds_report tells whether it can"] * told


@pytest.mark.parametrize("backend", ["zenflow", "deepspeed", None])
@pytest.mark.parametrize(("value", "on"), [(True, True), ("true", True), (False, False)])
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_a_dtype_that_is_switched_on_by_a_truth_value_is_refused_and_mended(
    name: str, value: object, on: bool, backend: Backend | None
) -> None:
    """A section that is none would be passed over, and the training would be of another dtype."""
    config = {**safe("zero2-offload"), "bf16": {"enabled": False}, name: value}
    assert check(Source(config), backend=backend, version=INSTALLED, ask=ask).outcome.kind == "refused"
    assert (name,) in {one.path for one in found(config, backend) if one.is_fault}
    mended, _, left = fix(Source(config), backend=backend, version=INSTALLED, ask=ask)
    assert (mended[name], left.ok) == ({"enabled": on}, True)


def test_where_a_version_scrambles_weights_it_is_refused_as_by_run() -> None:
    config = safe("zenflow-sequential")
    kinds = [check(config, backend="deepspeed", version=one).outcome.kind for one in ("0.19.6", "0.19.8")]
    assert kinds == ["trains", "refused"]


def test_a_refused_backend_in_the_file_is_mended() -> None:
    config = with_changes("zero3-offload", {f"{ZERO}.zero_hpz_partition_size": 4, "zftune": {"backend": "zenflow"}})
    mended, done, left = fix(Source(config), backend=None, version=INSTALLED, ask=ask)
    assert [change.sentence() for change, _ in done] == ['zftune.backend = "deepspeed"']
    assert mended["zftune"]["backend"] == "deepspeed"
    assert left.ok


def test_the_trainers_example_warms_up() -> None:
    """Some versions of transformers put in its warmup_steps, and DeepSpeed refuses 0."""
    tree = ast.parse((Path(__file__).parents[4] / "examples/hf_trainer.py").read_bytes())
    given = {one.arg: one.value for one in ast.walk(tree) if isinstance(one, ast.keyword)}
    assert ast.literal_eval(given["warmup_steps"]) >= 1


@pytest.mark.parametrize("notes", [False, True])
def test_who_fills_in_auto_is_told(notes: bool) -> None:
    config = with_changes("zero2-offload", {f"{PARAMS}.lr": "auto", f"{ZERO}.reduce_bucket_size": "auto"})
    console = Console(width=400, file=io.StringIO())
    with console.capture() as shown:
        console.print(render(check(config, version=INSTALLED, ask=ask), notes=notes))
    line = f'Accelerate put a value in for "auto": {PARAMS}.lr, {ZERO}.reduce_bucket_size.'
    assert " ".join(shown.get().split()).count(line) == 1
    assert check(config, version=INSTALLED, ask=ask).ok


@pytest.mark.parametrize("value", ["1.0", "much", None])
def test_clipping_by_no_number_ends_deepspeeds_own_runtime(value: object) -> None:
    """It is compared with 0 in the first step: a TypeError. Its absence is another thing."""
    config = with_changes("zero2-offload", {"gradient_clipping": value})
    assert "clipping-no-number" in faults(config, "deepspeed")
    assert ("gradient_clipping" in {".".join(one.path) for one in found(config, "zenflow") if one.is_fault}) == bool(
        value
    )
    (refusal,) = check(config, backend="deepspeed", version=INSTALLED, ask=ask).outcome.refusals
    assert refusal.field == "gradient_clipping"


@pytest.mark.parametrize(
    ("kind", "switched_on", "told"),
    [("fixed_linear", True, True), ("fixed_linear", False, False), ("custom", True, False)],
)
def test_a_curriculum_is_divided_by_its_steps(kind: str, switched_on: bool, told: bool) -> None:
    steps = {"total_curriculum_step": 8, "difficulty_step": 0}
    section = {"enabled": switched_on, "schedule_type": kind, "schedule_config": steps}
    fields = [refusal.field for refusal in divided_by({"curriculum_learning": section})]
    assert fields == ["curriculum_learning.schedule_config.difficulty_step"] * told


@pytest.mark.parametrize("value", [None, 1, 100, -1, float("inf"), True, "auto"])
def test_steps_per_print_that_can_be_divided_by_is_no_fault(value: Any) -> None:
    assert list(divided_by({"steps_per_print": value})) == []


def test_the_sum_counts_the_entries_of_the_list() -> None:
    """The word "beta" is refused as a setting of the optimizer, and as one of ZenFlow's: under one name."""
    report = check(with_changes("zenflow-sequential", {f"{PARAMS}.beta": [0.9, 0.95]}), version=INSTALLED, ask=ask)
    assert len([one for one in report.findings if one.severity == "crashes"]) == 2
    lines = io.StringIO()
    Console(file=lines, width=100).print(render(report))
    shown = lines.getvalue()
    assert shown.count("optimizer.params.beta = ") == 1
    assert "TypeError. " in shown
    assert "Found: crashes 1" in shown


def test_no_backend_is_advised_that_refuses_a_stage_too() -> None:
    for finding in found(with_changes("zero2-offload", {f"{ZERO}.stage": 4})):
        assert '"deepspeed"' not in finding.reason + finding.safe


def test_a_question_is_not_called_safe() -> None:
    console = Console(width=400, file=io.StringIO())
    with console.capture() as shown:
        console.print(render(check(with_changes("zero1", {"optimizer.type": "AdamV"}), version=INSTALLED, ask=ask)))
    assert "did you mean Adam" in shown.get()
    assert "safe: did you mean" not in shown.get()


def test_upstream_only_defects_do_not_concern_the_backend_zenflow() -> None:
    config = with_changes("zenflow-sequential", {"bf16": {"enabled": True}, "gradient_clipping": 1.0, ZF_U: "auto"})
    assert set(faults(config, "deepspeed")) >= {"zenflow-bf16", "zenflow-clipping", "update-interval-auto"}
    assert faults(config, "zenflow") == []
    config["zftune"] = {"backend": "zenflow"}
    assert faults(config) == []
    config["zftune"] = {"backend": "deepspeed"}
    assert faults(config) == faults(config, "deepspeed")


def test_the_version_decides() -> None:
    config = safe("zenflow-sequential")
    for version, scrambled in (("0.19.6", False), ("0.19.7", True), ("0.19.8", True), ("0.20.0", False)):
        rules = {finding.rule for finding in found(config, "deepspeed", version)}
        assert ("scrambled-weights" in rules) == scrambled
    without = with_changes("zenflow-sequential", {"gradient_clipping": None})
    del without["gradient_clipping"]
    rules = {finding.rule for finding in found(without, "deepspeed", "0.18.0")}
    assert "zenflow-clipping" not in rules  # it did not clip by default


@pytest.mark.parametrize(("share", "told"), [(0.1, True), (0.0, False), ("auto", False), (None, False)])
def test_weights_on_the_host_have_no_selected_columns(share: object, *, told: bool) -> None:
    """Which is so where they do not fit; a share that nobody asks for becomes 0 there by itself."""
    section = {} if share is None else {"topk_ratio": share}
    config = with_changes("zero3-offload", {f"{ZERO}.zenflow": section})
    assert ("offload-param-topk" in {finding.rule for finding in found(config, "zenflow")}) == told
    assert "offload-param-topk" not in {finding.rule for finding in found(config, "deepspeed")}


def test_the_worst_comes_first() -> None:
    config = with_changes("zenflow-sequential", {ZF_S: 2, "gradient_clipping": 1.0, f"{OFFLOAD}.pin_memory": False})
    order = [SEVERITIES.index(finding.severity) for finding in found(config)]
    assert order == sorted(order)
    assert len(set(order)) > 2


FRESH: tuple[st.SearchStrategy[Any], ...] = (
    st.builds(list),
    st.builds(dict),
)  # what one example puts into them is no other example's
ODD = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(["auto", "cpu", "x"]), *FRESH)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), name=st.sampled_from(NAMES))
def test_odd_values_are_no_reason_to_fail(data: st.DataObject, name: str) -> None:
    config = safe(name)
    places = [path for path, _ in leaves(config)]
    sections = [path[:-1] for path in places if len(path) > 1]
    for path in data.draw(st.lists(st.sampled_from(places + sections), min_size=1, max_size=4)):
        put(config, path, data.draw(ODD))
    for backend in (None, "zenflow", "deepspeed"):
        check(config, backend=backend, version=INSTALLED, ask=ask)


def test_sections_of_the_wrong_kind_are_let_be() -> None:
    values: tuple[Any, ...] = (None, True, 3, "auto", [])
    for value in values:
        for name in (ZERO, OFFLOAD, ZENFLOW, "optimizer", "zftune", "bf16"):
            check(with_changes("zenflow-sequential", {name: value}), backend=None, version=None)
