"""Comparisons of profiles whose differences are known."""

from __future__ import annotations

import copy
import io
import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from tests.support.zftune.report.documents import cpu_profile, gpu_profile, knobs, rig_profile
from zftune.cli.profile import compare as command
from zftune.errors import BadInputError
from zftune.profile.figures import figures
from zftune.profile.schema import validate
from zftune.report.compare import Comparison, compare, read_profile, render


def by_name(comparison: Comparison) -> dict[str, Any]:
    return {one.name: one for one in comparison.differences}


def jittered(seed: int, *, spread_ms: float = 5.0, longer_ms: float = 0.0) -> dict[str, Any]:
    """The CPU script's profile with steps that vary, all of it in backward."""
    document, generator = cpu_profile(40), random.Random(seed)
    for row in document["per_step"]:
        own = longer_ms + generator.gauss(0.0, spread_ms)
        row["phases_ms"]["backward"] += own
        row["step_ms"] += own
    return document


def screen(comparison: Comparison) -> str:
    console = Console(file=io.StringIO(), width=120, record=True)
    console.print(render(comparison))
    return console.export_text()


def write(folder: Path, name: str, document: Any) -> str:
    path = folder / name
    path.write_text(json.dumps(document), encoding="utf-8")
    return str(path)


def test_a_profile_does_not_differ_from_itself() -> None:
    for document in (rig_profile(), cpu_profile(), gpu_profile()):
        found = compare(document, copy.deepcopy(document))
        assert {one.finding for one in found.differences} <= {"within noise", "same"}
        assert (found.settings, found.warnings) == ([], [])
        assert found.verdict[0].startswith("The typical step does not differ beyond noise")


def test_steps_that_are_longer_by_more_than_they_vary() -> None:
    found = by_name(compare(jittered(1), jittered(2, longer_ms=6.0)))
    assert found["step_ms.mean"].finding == "beyond noise"
    assert found["step_ms.mean"].change == pytest.approx(6.0, abs=3.0)
    # Two means of 40 steps, each varying by 5 ms (and by 0.02 of 277 ms times a sine).
    assert found["step_ms.mean"].standard_error == pytest.approx((2 * (25.0 + 15.3) / 40) ** 0.5, rel=0.2)
    assert found["phases_ms.backward"].finding == "beyond noise"
    assert found["phases_ms.forward"].finding == "within noise"


def test_some_slow_steps_do_not_pass_for_a_slower_run() -> None:
    slow = jittered(1)
    for row in slow["per_step"][::5]:
        row["step_ms"] += 4000.0
    comparison = compare(slow, jittered(2, longer_ms=60.0))
    assert comparison.verdict[0].startswith("The typical step is ")
    assert "longer" in comparison.verdict[0]
    assert comparison.verdict[1].startswith("The mean step goes the other way: ")
    assert by_name(comparison)["step_ms.typical"].change == pytest.approx(60.0, abs=10.0)
    assert not any("mean" in sentence for sentence in compare(jittered(1), jittered(2, longer_ms=60.0)).verdict)


def test_slow_steps_in_a_row_are_noise() -> None:
    """As beside other work: they tell less than as many independent ones."""
    slow = jittered(1)
    for row in slow["per_step"][:12]:
        row["step_ms"] += 100.0
    assert by_name(compare(slow, jittered(2)))["step_ms.mean"].finding == "within noise"


def test_noise_is_called_beyond_it_one_time_in_twenty() -> None:
    beyond = sum(
        by_name(compare(jittered(2 * n), jittered(2 * n + 1)))["step_ms.mean"].finding == "beyond noise"
        for n in range(60)
    )
    assert beyond <= 8


def test_stall_bytes_and_knobs() -> None:
    a, b = rig_profile(), rig_profile()
    for row in b["per_step"]:
        row["step_ms"] -= row["stall_ms"]["host"] / 2
        row["stall_ms"]["host"] /= 2
    b["link"]["d2h_bytes_per_step"] = 2 * a["link"]["d2h_bytes_per_step"]
    b["knobs"] = knobs(topk_ratio=0.1, overlap_step=False)
    comparison = compare(a, b)
    found = by_name(comparison)
    host = statistics.fmean(row["stall_ms"]["host"] for row in a["per_step"])
    assert found["stall.by_cause.host"].change == pytest.approx(-host / 2)
    assert found["stall.by_cause.host"].finding == "beyond noise"
    assert found["stall.by_cause.h2d"].finding == "within noise"
    assert found["link.d2h_bytes_per_step"].finding == "changed"
    assert found["link.d2h_bytes_per_step"].relative == pytest.approx(1.0)
    assert found["link.h2d_bytes_per_step"].finding == "same"
    assert [(one.name, one.a, one.b) for one in comparison.settings] == [
        ("knobs.topk_ratio", "0.05", "0.1"),
        ("knobs.overlap_step", "on", "off"),
    ]
    assert comparison.warnings == []
    assert "most of it by host" in comparison.verdict[1]
    assert comparison.verdict[2] == "Settings that changed: topk_ratio 0.05 → 0.1, overlap_step on → off."


def test_a_plain_cpu_beside_a_gpu() -> None:
    comparison = compare(cpu_profile(), gpu_profile())
    found = by_name(comparison)
    assert found["stall.by_cause.host"].finding == "only in B"
    assert (found["stall.by_cause.host"].a, found["stall.by_cause.host"].relative) == (None, None)
    assert "stall.ms_per_step" not in found
    assert found["nvml.power_w"].finding == "only in B"
    assert [one.partition("(")[0] for one in comparison.warnings] == [
        "The machines differ ",
        "The numbers of ranks differ ",
    ]


def test_workloads_rigs_versions_and_few_steps() -> None:
    a, b = rig_profile(), rig_profile(4)
    b["workload"] = a["workload"] | {"sequence": 128}
    b["rig"] = a["rig"] | {"name": "slow", "late_segments": 0}
    b["software"] = a["software"] | {"torch": "2.14.0"}
    comparison = compare(a, b)
    assert comparison.warnings == [
        "The workloads differ (sequence 64 → 128): their times cannot be compared step by step.",
        "The emulated hardware differs (llama2-7b-4xa100 → slow).",
        "B has 4 measured steps: its noise is a guess below 8.",
    ]
    assert comparison.verdict[0].startswith("The steps do different work, so that they are not compared: the typical")
    assert not any(word in " ".join(comparison.verdict) for word in ("%", "shorter", "longer", "error"))
    assert not any(word in screen(comparison) for word in ("change ", "beyond noise", "within noise"))
    changed = {one.name: (one.a, one.b) for one in comparison.settings}
    assert changed["software.torch"] == ("2.13.0+cpu", "2.14.0")
    assert set(changed) == {"workload.sequence", "rig.name", "software.torch", "steps.measured"}
    b["rig"] = None
    assert "Only A was measured on an emulated accelerator." in compare(a, b).warnings


def test_one_step_has_no_noise() -> None:
    comparison = compare(cpu_profile(1), cpu_profile(1))
    assert by_name(comparison)["step_ms.mean"].finding in ("noise unknown", "same")
    assert "too few steps" in comparison.verdict[0]


def test_the_json_says_the_same() -> None:
    comparison = compare(rig_profile(), rig_profile(stretch=0.9))
    document = json.loads(json.dumps(comparison.document(), allow_nan=False))
    assert document["schema"] == "zftune.comparison/1"
    assert document["verdict"] == comparison.verdict
    for row, one in zip(document["differences"], comparison.differences, strict=True):
        expected = {"name": one.name, "a": one.a, "b": one.b, "standard_error": one.standard_error}
        assert row == expected | {"finding": one.finding, "change": one.change, "relative": one.relative}


NOT_A_NUMBER = cpu_profile()
NOT_A_NUMBER["step_ms"]["mean"] = float("nan")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[" * 200_000, "is not JSON"),
        (b"[1, 2]", "has no schema"),
        (b"null", "has no schema"),
        (b'{"a": 1}', "has no schema"),
        (b'{"schema": "other/1"}', "has the schema 'other/1'"),
        (b'{"schema": ["zftune.profile/1"]}', "has the schema"),
        (b'{"schema": "zftune.profile/1"}', "is not a valid profile"),
        (json.dumps(NOT_A_NUMBER).encode(), "is not a valid profile"),
    ],
)
def test_what_is_no_profile_is_refused(content: bytes, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(BadInputError) as caught:
        read_profile(str(path))
    message = str(caught.value)
    assert message.startswith(f"'{path}': {fault}")
    assert "give a file that `zftune profile --json` wrote" in message
    assert "\n" not in message


@pytest.mark.parametrize("path", ["/nowhere/file.json", ".", "a\0b"])
def test_a_file_that_cannot_be_read(path: str) -> None:
    with pytest.raises(BadInputError, match="give a file that"):
        read_profile(path)


def cli() -> typer.Typer:
    app = typer.Typer()
    app.command()(command)
    return app


def test_the_command_shows_and_writes(tmp_path: Path) -> None:
    a, b = rig_profile(), rig_profile(stretch=0.9)
    validate(b)
    paths = write(tmp_path, "a.json", a), write(tmp_path, "b.json", b)
    done = CliRunner().invoke(cli(), [*paths, "--json", str(tmp_path / "out.json")], env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.output
    assert "The typical step is 10% shorter" in done.stdout
    assert "step_ms.mean" in done.stdout
    assert "beyond noise" in done.stdout
    assert json.loads((tmp_path / "out.json").read_text()) == compare(a, b).document()
    assert f"zftune: wrote '{tmp_path / 'out.json'}', for scripts\n" in done.stderr
    on_stdout = CliRunner().invoke(cli(), [*paths, "--json", "-"])
    assert json.loads(on_stdout.stdout) == compare(a, b).document()
    assert "The typical step is 10% shorter" in on_stdout.stderr


def test_text_of_a_profile_is_no_markup(tmp_path: Path) -> None:
    a, b = rig_profile(), rig_profile()
    b["workload"] = a["workload"] | {"model": "[red]x[/red]"}
    done = CliRunner().invoke(cli(), [write(tmp_path, "a.json", a), write(tmp_path, "b.json", b)])
    assert done.exit_code == 0
    assert "[red]x[/red]" in done.stdout


def with_loss(document: dict[str, Any], seed: int, *, worse: float = 0.0, first: int = 1) -> dict[str, Any]:
    """Losses that fall, of batches that are the same in every run; `worse` grows to its value over the steps."""
    batches, own = random.Random(0), random.Random(seed)
    rows = document["per_step"]
    document["steps"]["discarded"] = first - 1
    for number, row in enumerate(rows):
        row["step"] = number + first
        row["loss"] = 3.0 - number / len(rows) + batches.gauss(0.0, 0.3) + own.gauss(0.0, 0.02)
        row["loss"] += worse * number / len(rows)
    return document


def test_a_shorter_step_with_a_higher_loss_is_not_free() -> None:
    a, b = with_loss(jittered(1, longer_ms=40.0), 1), with_loss(jittered(2), 2, worse=0.2)
    comparison = compare(a, b)
    step, loss, *_ = comparison.verdict
    assert "% shorter" in step
    assert loss.startswith("The loss is ")
    assert "% higher in steps 21 to 40 of both" in loss
    assert loss.endswith("the shorter step is not free.")
    found = by_name(comparison)["loss"]
    assert found.finding == "beyond noise"
    assert found.change == pytest.approx(0.15, abs=0.03)
    assert found.standard_error < 0.03  # the batches' own noise, ten times as large, is in both
    assert "free" not in compare(a, with_loss(jittered(2), 2, worse=-0.2)).verdict[1]


def test_steps_have_the_numbers_that_a_profiles_screen_gives_them() -> None:
    discarded = cpu_profile(40)["steps"]["discarded"]
    a, b = (with_loss(jittered(seed), seed, first=discarded + 1) for seed in (1, 2))
    a["loss"] = {"first": 3.0, "last": 2.0, "error": 0.1, "trend": "falling", "count": 40, "not_finite": 0}
    screen = io.StringIO()
    Console(file=screen, width=200).print(figures(a, wide=True))
    assert f"of steps {discarded + 1} to {discarded + 40})" in screen.getvalue()
    assert f"in steps {discarded + 21} to {discarded + 40} of both" in compare(a, b).verdict[1]


def test_losses_that_are_still_falling_apart_are_not_noise() -> None:
    a, b = with_loss(jittered(1), 1), with_loss(jittered(2), 2)
    for number, row in enumerate(b["per_step"]):
        row["loss"] += 4.0 - 3.5 * number / len(b["per_step"])
    found = by_name(compare(a, b))["loss"]
    assert found.finding == "beyond noise"
    assert found.standard_error < 0.03


def test_losses_that_differ_by_less_than_their_noise() -> None:
    pairs = [compare(with_loss(jittered(1), 2 * n), with_loss(jittered(2), 2 * n + 1)) for n in range(40)]
    within = [one for one in pairs if by_name(one)["loss"].finding == "within noise"]
    assert len(within) >= 34
    assert within[0].verdict[1].startswith("The loss does not differ beyond noise in steps 21 to 40 of both")


def test_a_coverage_far_below_what_is_assumed_and_a_broken_loss_are_warnings() -> None:
    a, b = rig_profile(), rig_profile()
    a["selection"]["coverage"], b["selection"]["coverage"] = 0.95, 0.13
    b["loss"] = {"first": 3.0, "last": 2.0, "error": 0.1, "trend": "falling", "count": 20, "not_finite": 4}
    broken, covered = [one for one in compare(a, b).warnings if one.startswith(("A: ", "B: "))]
    assert broken == "B: the loss is not a finite number in 4 of the measured steps."
    assert covered.startswith("B: The selected columns hold 13% of the gradient energy")
