"""Real profiles, in this process, on a rig whose ZeRO-Offload step takes a fifth of a second."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.zftune.fixtures import MINI_TIMELINE
from zenflow import ZenFlowConfig
from zftune.cli import main as cli
from zftune.errors import BadInputError, ProfileError
from zftune.profile import measure as measure_module
from zftune.profile.companions import TorchAdamW
from zftune.profile.run import ProfileOptions, profile, read_config, task_of
from zftune.profile.schema import validate
from zftune.profile.screen import render

Document = dict[str, Any]
BASELINES = {"no_offload", "zero_offload", "zero_offload_pipelined"}
COMPUTE_MS = MINI_TIMELINE["forward_ms"] + MINI_TIMELINE["backward_ms"]
WAIT_MS = MINI_TIMELINE["d2h_ms"] + MINI_TIMELINE["host_ms"] + MINI_TIMELINE["h2d_ms"]


@pytest.fixture(scope="module")
def options(mini_model: Path, mini_rig: Path) -> ProfileOptions:
    return ProfileOptions(
        config=read_config(None, {"topk_ratio": 0.1}),
        steps=8,
        model=str(mini_model),
        text=__file__,
        sequence=16,
        rig=str(mini_rig),
    )


def run_profile(options: ProfileOptions, **changes: Any) -> Document:
    return profile(dataclasses.replace(options, **changes), lambda name: lambda done, total: None)


@pytest.fixture(scope="module")
def told() -> dict[str, list[tuple[int, int]]]:
    """What the module's profile told about its steps, by system."""
    return {}


@pytest.fixture(scope="module")
def document(options: ProfileOptions, told: dict[str, list[tuple[int, int]]]) -> Document:
    def on_system(name: str) -> Any:
        return lambda done, total: told.setdefault(name, []).append((done, total))

    return profile(options, on_system)


@pytest.fixture(scope="module")
def alone(options: ProfileOptions) -> Document:
    return run_profile(options, baselines=False)


def test_the_document_is_valid_and_can_be_shown(document: Document) -> None:
    validate(document)
    validate(json.loads(json.dumps(document, allow_nan=False)))
    render(document)


def test_the_four_systems_are_there(document: Document, told: dict[str, list[tuple[int, int]]]) -> None:
    assert set(document["baselines"]) == BASELINES
    assert set(told) == BASELINES | {"this run"}
    assert told["this run"] == [(step, 16) for step in range(1, 17)]
    for name in BASELINES:
        assert told[name] == [(step, 11) for step in range(1, 12)]


def test_knobs_steps_and_workload_are_what_was_asked_for(document: Document) -> None:
    assert document["knobs"]["topk_ratio"] == 0.1
    assert (document["knobs"]["update_interval"], document["knobs"]["select_interval"]) == (4, 16)
    assert document["steps"] == {"measured": 8, "discarded": 8}
    assert document["workload"]["model"] == "mini"
    assert document["workload"]["parameters"] == 51_392
    assert document["workload"]["learning_rate"] == 1e-4
    assert document["workload"]["text"] == Path(__file__).name
    assert document["rig"]["name"] == "mini"
    assert document["device"] == "cpu (emulated accelerator)"
    baselines = document["baselines"]
    assert "knobs" not in baselines["no_offload"]
    assert baselines["no_offload"]["optimizer"] == "torch.optim.AdamW(fused=True)"
    assert baselines["zero_offload"]["knobs"]["pipeline"] == "none"
    assert baselines["zero_offload_pipelined"]["knobs"]["pipeline"] == "bucket"


def test_zero_offload_stalls_as_its_timeline_implies(document: Document) -> None:
    run = document["baselines"]["zero_offload"]
    # One layer: what is between its gradients and the end of backward hides a part of the way down.
    assert run["stall"]["fraction"] == pytest.approx(WAIT_MS / (COMPUTE_MS + WAIT_MS), abs=0.05)
    assert run["step_ms"]["mean"] == pytest.approx(COMPUTE_MS + run["stall"]["ms_per_step"])
    causes = run["stall"]["by_cause"]
    for cause in ("host", "h2d"):
        assert causes[cause] == pytest.approx(MINI_TIMELINE[f"{cause}_ms"], rel=0.02)
    assert 0 < causes["d2h"] <= MINI_TIMELINE["d2h_ms"] * 1.02


def test_the_pipeline_shortens_the_wait_and_cannot_hide_it(document: Document) -> None:
    stall = document["baselines"]["zero_offload_pipelined"]["stall"]["ms_per_step"]
    assert MINI_TIMELINE["host_ms"] - 1e-6 <= stall < 0.9 * WAIT_MS


def test_overlap_hides_the_host(document: Document) -> None:
    zero = document["baselines"]["zero_offload"]
    assert document["stall"]["ms_per_step"] < 0.1 * zero["stall"]["ms_per_step"]
    assert document["step_ms"]["mean"] < 1.1 * COMPUTE_MS
    assert zero["speedup"] > 2
    assert document["hidden_ms_per_step"] >= 0


def test_no_offloading_never_waits(document: Document) -> None:
    run = document["baselines"]["no_offload"]
    assert run["stall"]["ms_per_step"] == 0
    assert run["step_ms"]["mean"] == pytest.approx(COMPUTE_MS)
    assert document["practicality"] == pytest.approx(run["step_ms"]["mean"] / document["step_ms"]["mean"])


def test_causes_and_phases_add_up(document: Document) -> None:
    for run in (document, *document["baselines"].values()):
        assert sum(run["stall"]["by_cause"].values()) == pytest.approx(run["stall"]["ms_per_step"])
    phases = document["phases_ms"]
    assert sum(phases.values()) == pytest.approx(document["step_ms"]["mean"], rel=0.02)
    assert phases["other"] < 0.02 * document["step_ms"]["mean"]
    compute = phases["forward"] + phases["backward"] + phases["optimizer"]
    assert compute == pytest.approx(document["step_ms"]["mean"], rel=0.1)
    assert phases["forward"] == pytest.approx(MINI_TIMELINE["forward_ms"], rel=0.2)  # with the stalls in it


def test_the_rig_says_by_which_clock(document: Document) -> None:
    rig = document["rig"]
    assert rig["forward_ms"] == MINI_TIMELINE["forward_ms"]
    # One layer: a segment forward and one backward, in 3 baselines of 8 steps and this run's 8.
    assert rig["segments"] == 2 * 4 * 8
    assert (rig["clock"], rig["late_segments"], rig["attempts"], rig["slack"]) == ("simulated", 0, 1, None)
    assert rig["real_work_s"] > 0
    assert "Time is simulated" in render_text(document)


def test_in_real_time_the_rig_says_how_close_it_came(monkeypatch: pytest.MonkeyPatch, options: ProfileOptions) -> None:
    monkeypatch.setattr(measure_module, "MAX_LATE_SHARE", 0.5)  # other processes must not fail this
    document = run_profile(options, baselines=False, real_time=True, steps=4)
    rig = document["rig"]
    assert (rig["clock"], rig["segments"]) == ("real", 2 * 4)
    assert rig["slack"]["min_ms"] <= rig["slack"]["p50_ms"]
    assert "of its padding" in render_text(document)
    held = document["thread_lines"]
    assert held["of"] == "idle"
    assert held["ms_per_step"] <= document["step_ms"]["mean"]
    assert document["system"]["cpu_percent"] > 0
    assert document["system"]["samples"] >= 1
    span_ms = document["per_step"][-1]["begin_ms"] + document["per_step"][-1]["step_ms"]
    assert all(0 <= row["at_ms"] <= span_ms + 5000 for row in document["series"]["system"])


def test_real_time_is_of_a_rig(options: ProfileOptions) -> None:
    with pytest.raises(BadInputError, match="--real-time: allowed only on a rig"):
        run_profile(options, rig="none", real_time=True)


def test_bytes_on_the_link_are_those_of_the_deferred_columns(document: Document, mini_model: Path) -> None:
    # Of 64 (96) columns 6 (10) are selected; gradients go down every step, each window's weights up once in four.
    rows_64, rows_96 = 256 + 4 * 64 + 2 * 96, 64
    deferred = rows_64 * (64 - 6) + rows_96 * (96 - 10)
    assert document["link"]["d2h_bytes_per_step"] == 2 * deferred
    assert document["link"]["h2d_bytes_per_step"] == pytest.approx(2 * deferred / 4, rel=0.2)


def test_figures_have_sources_and_gaps_have_reasons(document: Document, alone: Document) -> None:
    assert document["sources"]["stall"] == "rig"
    assert document["sources"]["link"] == "count"
    assert "memory.device_peak_bytes" not in document["sources"]
    sampled = {"nvml", "system", "series.nvml", "series.system"}
    others = {"idle", "thread_lines", "overhead_fraction", "waits_ms", "memory.device_peak_bytes", "selection.churn"}
    assert set(document["missing"]) == sampled | others
    assert "rig mini" in render_text(document)
    assert set(alone["missing"]) >= {"baselines", "practicality"}
    assert "baselines" not in alone["sources"]


def test_every_step_is_there(document: Document) -> None:
    rows = document["per_step"]
    assert [row["step"] for row in rows] == list(range(9, 17))
    assert sum(row["step_ms"] for row in rows) / 8 == pytest.approx(document["step_ms"]["mean"])
    assert rows[-1]["begin_ms"] == pytest.approx(sum(row["step_ms"] for row in rows[:-1]))
    for cause, mean in document["stall"]["by_cause"].items():
        assert sum(row["stall_ms"][cause] for row in rows) / 8 == pytest.approx(mean)
    (rank,) = document["ranks"]
    assert (rank["rank"], rank["steps"], rank["step_ms"]) == (0, 8, document["step_ms"])


def test_the_timeline_is_the_first_measured_window(document: Document) -> None:
    timeline = document["timeline"]
    assert (timeline["first_step"], timeline["steps"]) == (9, 4)
    assert timeline["length_ms"] == pytest.approx(sum(row["step_ms"] for row in document["per_step"][:4]), rel=0.05)
    lanes = timeline["lanes"]
    # This rig charges nothing for the optimizer's own work on the device.
    assert {label for _, _, label in lanes["compute"]} | {"optimizer"} == {"forward", "backward", "optimizer"}
    for lane in ("d2h", "h2d", "host", "data"):
        assert lanes[lane], lane


def test_the_least_step_is_its_longest_roof(document: Document) -> None:
    roofs = document["roofs"]
    resources = [roofs[f"{name}_ms"] for name in ("compute", "d2h", "h2d", "host")]
    assert roofs["least_step_ms"] == max(resources)
    assert roofs["compute_ms"] == pytest.approx(COMPUTE_MS, rel=0.15)
    # The timeline's host pass moves 28 bytes an element each step; a window of four 26 + 2 * 4, of 0.9 of the columns.
    host_ms = 0.9 * MINI_TIMELINE["host_ms"] * (26 + 2 * 4) / 28 / 4
    assert roofs["host_ms"] == pytest.approx(host_ms, rel=0.1)
    assert document["step_ms"]["mean"] >= 0.98 * roofs["least_step_ms"]


def test_in_simulated_time_nothing_is_sampled(document: Document) -> None:
    assert (document["system"], document["nvml"]) == (None, None)
    assert document["series"] == {"nvml": None, "system": None}
    assert "time is simulated" in document["missing"]["system"]


def render_text(document: Document) -> str:
    from rich.console import Console

    console = Console(width=120, record=True, quiet=True)
    with console.capture() as shown:
        console.quiet = False
        console.print(render(document))
    return shown.get()


def test_without_baselines_there_is_only_this_run(alone: Document, document: Document) -> None:
    assert alone["baselines"] is None
    assert alone["practicality"] is None
    assert alone["rig"]["segments"] == 2 * 8
    assert alone["knobs"] == document["knobs"]


def test_the_same_seed_gives_the_same_run(document: Document, alone: Document, options: ProfileOptions) -> None:
    del document["rig"]["real_work_s"], alone["rig"]["real_work_s"]
    of_the_baselines = {"baselines", "practicality", "missing", "verdict", "rig", "sources"}
    for name in set(alone) - of_the_baselines:
        assert alone[name] == document[name], name
    other = run_profile(options, baselines=False, seed=1)
    assert other["selection"]["coverage"] != alone["selection"]["coverage"]


def test_plain_cpu_has_no_stall_and_says_why(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], options: ProfileOptions
) -> None:
    """By the command, whose standard output is the document and nothing else."""
    arguments = ["--model", options.model, "--text", __file__, "--rig", "none", "--steps", "1", "--json", "-"]
    monkeypatch.setattr("sys.argv", ["zftune", "profile", "--sequence", "8", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code in (0, None)
    document = json.loads(capfd.readouterr().out)
    validate(document)
    assert (document["rig"], document["device"], document["hidden_ms_per_step"]) == (None, "cpu", None)
    runs = (document, *document["baselines"].values())
    assert [run["stall"] for run in runs] == [None] * 4
    assert all(run["step_ms"]["mean"] > 0 for run in runs)
    no_stall = {"stall", *(f"baselines.{name}.stall" for name in BASELINES)}
    assert no_stall | {"hidden_ms_per_step"} <= set(document["missing"])


def test_a_baseline_that_does_not_fit_is_null_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, options: ProfileOptions
) -> None:
    def measure(task: Any, system: Any, *rest: Any) -> Any:
        if isinstance(system, TorchAdamW) or system.offload_ratio == 0:
            raise torch.cuda.OutOfMemoryError
        return measure_module.measure(task, system, *rest)

    monkeypatch.setattr("zftune.profile.run.measure", measure)
    document = run_profile(options, rig="none", steps=1)
    assert document["baselines"]["no_offload"] is None
    assert document["baselines"]["zero_offload"] is not None
    assert document["practicality"] is None
    for name in ("baselines.no_offload", "practicality"):
        assert "memory" in document["missing"][name]
    render(document)
    with pytest.raises(ProfileError, match="does not fit into the GPU's memory"):
        run_profile(options, rig="none", steps=1, config=read_config(None, {"offload_ratio": 0.0}))


def test_a_system_that_is_this_run_is_measured_once(options: ProfileOptions) -> None:
    names: list[str] = []

    def on_system(name: str) -> Any:
        names.append(name)
        return lambda done, total: None

    zero = {"topk_ratio": 0.0, "update_interval": 1, "overlap_step": False, "pipeline": "none"}
    config = read_config(None, zero)
    document = profile(dataclasses.replace(options, config=config, rig="none", steps=2), on_system)
    assert names == ["this run", "no_offload", "zero_offload_pipelined"]
    assert document["baselines"]["zero_offload"]["speedup"] == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="the defaults of a machine with a GPU are others")
@pytest.mark.parametrize(("rig", "asked", "sequence"), [(None, None, 16), ("none", None, 64), (None, 33, 33)])
def test_sequences_are_short_where_they_must_fit_into_pads(rig: str | None, asked: int | None, sequence: int) -> None:
    options = ProfileOptions(config=ZenFlowConfig(), rig=rig, sequence=asked, text=__file__)
    assert task_of(options)[0].sequence == sequence
