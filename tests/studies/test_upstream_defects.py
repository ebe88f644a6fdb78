"""Study 002: verdicts from figures, what a crash or a hang leaves behind, and one defect through its command line."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tiers import everything

STUDY = Path(__file__).parents[2] / "studies" / "002-upstream-defects"
FAST = "moments_restart"


@pytest.fixture(scope="module")
def study() -> Any:
    """The study's modules."""
    before = list(sys.path)
    sys.path[:0] = [str(STUDY), str(STUDY.parent)]
    try:
        spec = importlib.util.spec_from_file_location("study_upstream_defects", STUDY / "run.py")
        assert spec is not None
        assert spec.loader is not None
        run = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(run)
        yield SimpleNamespace(
            run=run, **{part: importlib.import_module(f"defects.{part}") for part in ("case", "report")}
        )
    finally:
        sys.path[:] = before


def test_every_defect_is_listed_and_has_what_it_needs(study: Any) -> None:
    helpers = {"__init__", "report", *study.run.SHARED}
    assert sorted(study.run.NAMES) == sorted(p.stem for p in (STUDY / "defects").glob("*.py") if p.stem not in helpers)
    for name in study.run.NAMES:
        defect = study.run.defect_of(name)
        json.dumps(defect.settings)
        assert defect.control is None or defect.control_is
    assert sum(study.run.defect_of(name).quick for name in study.run.NAMES) >= 3


@pytest.mark.parametrize(
    ("figures", "verdict", "ours"),
    [
        ({"expected": 1.0, "control": [1.0, 1.0], "upstream": 3.0, "ours": 1.0}, "reproduced", "passes"),
        ({"expected": 1.0, "control": [1.0, 1.0], "upstream": 1.0, "ours": 1.0}, "not reproduced", "passes"),
        ({"expected": 1.0, "control": [2.0, 1.0], "upstream": 3.0, "ours": 1.1}, "no verdict", "FAILS"),
        ({"expected": 1.0, "control": "KeyError: x", "upstream": 3.0, "ours": None}, "no verdict", "not yet"),
        ({"expected": 0.0, "control": [0.0, 0.0], "upstream": float("nan"), "ours": 0.0}, "reproduced", "passes"),
        ({"expected": 0.0, "control": [0.0, 0.0], "upstream": "IndexError: x", "ours": 0.0}, "no verdict", "passes"),
        ({"expected": 0.0, "control": [0.0, 0.0], "ended": "exit status -11", "ours": 0.0}, "no verdict", "passes"),
        ({"expected": 0.0, "ended": "exit status 1"}, "no verdict", "FAILS"),
        ({"expected": 0.0, "control": [0.0, 0.0], "upstream": 1.0, "ours": "ValueError: x"}, "reproduced", "FAILS"),
        ({"expected": 0.0, "control": [0, 0], "upstream": 1.0, "ours": "UnsupportedError: x"}, "reproduced", "not yet"),
    ],
)
def test_verdicts(study: Any, figures: dict[str, Any], verdict: str, ours: str) -> None:
    defect = study.run.defect_of(FAST)
    assert study.report.verdict_of(defect, figures) == verdict
    assert study.report.ours_verdict_of(defect, figures) == ours


def test_an_exception_is_a_verdict_where_it_is_the_defect(study: Any) -> None:
    figures = {"expected": 0.0, "control": [0.0, 0.0], "upstream": "IndexError: x", "ours": 0.0}
    assert study.report.verdict_of(study.run.defect_of("unused_parameter"), figures) == "reproduced"


def test_a_hang_is_a_result(study: Any) -> None:
    found = study.run.attempt(sys.executable, FAST, ["upstream"], 0.1)
    assert found["ended"] == "no answer within 0 s"
    assert "upstream" not in found


def test_a_crash_is_a_result_with_its_last_lines(study: Any) -> None:
    found = study.run.attempt(sys.executable, "no_such_defect", ["upstream"], 60.0)
    assert found["ended"] == "exit status 1"
    assert "no_such_defect" in found["log"][-1]


@pytest.mark.parametrize("name", ["moments_restart", "clipping", "group_settings", "window_mean"])
def test_this_runtime_passes_without_deepspeed(study: Any, name: str) -> None:
    defect = study.run.defect_of(name)
    assert study.case.agrees(defect.ours(), defect.expected(), defect.tolerance)


@pytest.mark.skipif(not everything(), reason="before a release: it trains with DeepSpeed, whose version is pinned")
def test_one_defect_through_the_command_line(study: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not study.run.deepspeedkit.compiled():
        pytest.skip("DeepSpeed's operations are not compiled yet; the study's first run compiles them")
    arguments = ["--only", FAST, "--results", str(tmp_path / "r"), "--json", str(tmp_path / "all.json")]
    assert study.run.main(arguments) == 0
    first = (tmp_path / "all.json").read_text()
    (row,) = json.loads(first)["rows"]
    assert (row["verdict"], row["ours"]) == ("reproduced", "passes")
    assert row["figures"]["upstream"] > 1.5  # a step that should have the length 1
    assert study.run.main(arguments) == 0  # nothing new is measured
    assert (tmp_path / "all.json").read_text() == first
    assert "reproduced" in capsys.readouterr().out
