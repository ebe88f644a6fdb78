"""The suite for a GPU: what is on disk and what it ends with, whatever becomes of a part; and all of it on the stub."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import zygote
from tests.studies.test_studies import STUDIES, load
from tests.tiers import by_day

SCRIPT = STUDIES / "gpu" / "run_all.py"
SIMULATED = "simulated: no figure of a GPU"
NEEDS_CUDA = {"sanitizer", "kernel-tests", "deepspeed-zero-offload", "deepspeed-zenflow", "commands"}


@pytest.fixture(scope="module")
def suite() -> Any:
    """The script; with it its modules can be imported."""
    before = list(sys.path)
    yield load(SCRIPT)
    sys.path[:] = before


def module(suite: Any, name: str) -> Any:
    return importlib.import_module(f"gpu.{name}")


# --- parts, with work of the test's own ------------------------------------------------------------------------------

SCENARIO = f"""
import json, os, signal, sys, time
from pathlib import Path
sys.path[:0] = [{str(STUDIES)!r}]
from gpu.parts import NO_GPU, Part
from gpu.record import Record
from gpu.runs import NoGpuHereError, Run

folder = Path(sys.argv[1])

def work(name, path, limit_s):
    record = Record(path, name, limit_s=limit_s)
    record.note("figure", name)
    if name == "endless":
        if (child := os.fork()) == 0:
            time.sleep(60)
        record.note("child", child)
        time.sleep(60)
        os._exit(9)  # without another word
    if name == "broken":
        record.hold("one and one is two", False, 3)
    if name == "broken, then dead":
        record.hold("one and one is two", False, 3)
        os.abort()
    if name == "ended":
        time.sleep(0.5)  # what a handler raises while hooks run after a fork, Python ignores
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(60)
    if name == "dead":
        os.abort()
    if name == "refused":
        record.refuse("there is no moon")
        return 0
    if name == "failing":
        record.measure("ratio", lambda: 1 / 0)
        record.measure("next", lambda: 2)
        record.measure("late", lambda: 3, needs_s=1e9)
    if name == "no GPU":
        record.refuse("there is no GPU")
        return NO_GPU
    record.end()
    return 0

def clock():  # jumps when the endless part has written everything
    try:
        return 1e3 if "child" in (folder / "endless.json").read_text() else 0.0
    except OSError:
        return 0.0

signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
run = Run(folder, 30, work, clock=clock)
found = {{"codes": [], "files": []}}
for name in sys.argv[2:]:
    try:
        run.take(Part(name, 100, 1e4 if name == "long" else 1))
    except NoGpuHereError as error:
        found["refused"] = str(error)
    found["codes"].append(run.code)
    found["files"].append(sorted(file.name for file in folder.glob("*.json")))
print(json.dumps(found))
"""


def scenario(tmp_path: Path, *parts: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the script said, and the parts of its summary by name."""
    script = tmp_path / "scenario.py"
    script.write_text(SCENARIO, encoding="utf-8")
    done = zygote.run([script, tmp_path / "out", *parts])
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))
    said = json.loads(done.stdout) if done.stdout else {}
    return said, {part["part"]: part for part in summary["parts"]}


def lives(pid: int) -> bool:
    """Whether a process is there and not dead already."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_part_that_exceeds_its_limit_is_killed_with_what_it_started_and_the_rest_goes_on(tmp_path: Path) -> None:
    said, parts = scenario(tmp_path, "first", "endless", "last", "long")
    assert [parts[name]["status"] for name in parts] == ["done", "stopped", "done", "left out"]
    assert parts["endless"]["reason"] == "it was ended at its limit of 100 s"
    assert parts["long"]["reason"] == "797 s were left, it needs 10000"
    endless = json.loads((tmp_path / "out" / "endless.json").read_text(encoding="utf-8"))
    assert endless["figures"]["figure"] == "endless"
    assert not lives(endless["figures"]["child"])
    assert said["codes"] == [0, 3, 3, 3]


def test_results_are_on_disk_after_each_part(tmp_path: Path) -> None:
    said, _ = scenario(tmp_path, "first", "second", "dead")
    files = ["first.json", "summary.json"], ["first.json", "second.json", "summary.json"]
    assert said["files"][:2] == list(files)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))
    assert summary["figures"] == {name: {"figure": name} for name in ("first", "second", "dead")}
    assert summary["code"] == 3


def test_a_script_that_is_ended_leaves_what_was_measured(tmp_path: Path) -> None:
    _, parts = scenario(tmp_path, "first", "ended", "last")
    assert [(part, each["status"]) for part, each in parts.items()] == [("first", "done"), ("ended", "stopped")]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))
    assert summary["figures"]["ended"] == {"figure": "ended"}
    assert summary["code"] == 3


def test_exit_codes_tell_a_broken_invariant_from_a_part_that_could_not_run(tmp_path: Path) -> None:
    names = ("first", "refused", "failing", "dead", "broken", "broken, then dead", "last")
    said, parts = scenario(tmp_path, *names)
    assert [parts[name]["status"] for name in names] == [
        "done",
        "could not run",
        "failed",
        "failed",
        "broken",
        "broken",
        "done",
    ]
    assert said["codes"] == [0, 3, 3, 3, 1, 1, 1]
    assert parts["broken"]["broken"] == ["one and one is two"]
    assert parts["refused"]["reason"] == "there is no moon"
    assert parts["failing"]["failed"] == {"ratio": "ZeroDivisionError: division by zero"}
    assert parts["failing"]["absent"]["late"].endswith("s were left, it needs 1000000000")
    assert parts["dead"]["reason"] == "its process ended with -6; see dead.log"


def test_a_part_without_a_gpu_ends_it_all(tmp_path: Path) -> None:
    said, parts = scenario(tmp_path, "first", "no GPU")
    assert said["refused"] == "there is no GPU"
    assert list(parts) == ["first"]


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--minutes", "0"], "--minutes 0 must be above 0"),
        (["--parts", "moon"], "invalid choice: 'moon'"),
        pytest.param(
            ["--parts", "environment"],
            "there is no NVIDIA GPU here (torch sees none); --stub takes the simulated one",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_bad_input_ends_with_2_and_a_sentence(tmp_path: Path, words: list[str], sentence: str) -> None:
    done = zygote.run([SCRIPT, "--out", tmp_path, *words])
    assert done.returncode == 2
    assert sentence in done.stderr


STUB_PARTS = by_day(("driver", "calls", "zenflow"), all_of=())


def test_the_whole_script_runs_on_the_stub_and_says_that_its_figures_are_none_of_a_gpu(
    tmp_path: Path, suite: Any
) -> None:
    chosen = ["--parts", *STUB_PARTS] if STUB_PARTS else []
    done = zygote.run([SCRIPT, "--stub", "--minutes", "60", "--out", tmp_path, *chosen], timeout=800)
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    statuses = {part["part"]: part["status"] for part in summary["parts"]}
    names = list(STUB_PARTS) or [part.name for part in module(suite, "parts").PARTS]
    assert statuses == {name: "could not run" if name in NEEDS_CUDA else "done" for name in names}, done.stdout
    assert done.returncode == summary["code"] == (0 if STUB_PARTS else 3)
    documents = [summary, *summary["parts"]]
    documents += [json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8")) for name in names]
    assert {document["figures_of"] for document in documents} == {SIMULATED}
    assert done.stdout.count(SIMULATED) >= 3  # at the head, and over each table
    assert {goal["met"] for goal in summary["goals"]} == {None}
    assert summary["figures"]["zenflow"]["prediction"]["step_ms"] > 0
    assert summary["figures"]["driver"]["fork"]["stale_bytes"] == 0
    assert len(summary["figures"]["calls"]) >= 15
    assert min(summary["figures"]["calls"].values()) > 0
    assert "zenflow-feed" in summary["figures"]["zenflow"]["threads_ms"]


PLANTED = f"""
import sys
sys.argv[0] = {str(SCRIPT)!r}
sys.path[:0] = [{str(STUDIES)!r}, {str(STUDIES.parent)!r}]
from zenflow.device import CudaDevice
CudaDevice.join = lambda self, transfer, tensor: None  # weights are written before they have arrived
from gpu import run_all
sys.exit(run_all.main(sys.argv[1:]))
"""


def test_a_mistake_that_is_planted_in_the_runtime_ends_with_1(tmp_path: Path) -> None:
    script = tmp_path / "planted.py"
    script.write_text(PLANTED, encoding="utf-8")
    done = zygote.run([script, "--stub", "--minutes", "60", "--out", tmp_path / "out", "--parts", "zero-offload"])
    assert done.returncode == 1, done.stdout
    document = json.loads((tmp_path / "out" / "zero-offload.json").read_text(encoding="utf-8"))
    (invariant,) = document["invariants"].values()
    assert not invariant["holds"]
    assert any(problem.startswith("race") for problem in invariant["found"])


# --- what is made of figures -----------------------------------------------------------------------------------------


def test_idle_time_and_overlap_on_a_timeline_by_hand(suite: Any) -> None:
    found = module(suite, "profiled").account(
        [
            ("gemm", (0.0, 4000.0)),
            ("adam", (3000.0, 5000.0)),  # beside it
            ("Memcpy DtoH (Device -> Pinned)", (4000.0, 6000.0)),  # half of it beside a kernel
            ("Memset (Device)", (8000.0, 8500.0)),
            ("gemm", (9000.0, 10000.0)),
            ("Memcpy HtoD (Pinned -> Device)", (6000.0, 8000.0)),
        ],
        2,
    )
    assert found == {
        "launches": 1.5,
        "idle": pytest.approx(0.4),
        "d2h": {"ms": 1.0, "overlap": pytest.approx(0.5)},
        "h2d": {"ms": 1.0, "overlap": 0.0},
    }


def test_goals_on_figures_by_hand(suite: Any) -> None:
    def step(p50: float) -> dict[str, Any]:
        return {"step_ms": {"p50": p50}}

    figures = {
        "adamw": step(90.0),
        "zero-offload": step(250.0),
        "deepspeed-zenflow": step(150.0),
        "kernels": {"pack": {"of_copy": 0.79}},
        "zenflow": {
            **step(100.0),
            "stall": {"share": 0.04},
            "stall_beside_idle": {"stall": 0.04, "profiler_idle": 0.2},
            "prediction": {"s_min": 3, "measured_over_predicted": 0.9},
        },
    }
    found = {goal.name: (goal.measured, goal.met) for goal in module(suite, "goals").goals(figures)}
    assert found["speed of AdamW without offloading"] == ("90.0%", True)
    assert found["speed over our ZeRO-Offload"] == ("2.50 x", False)
    assert found["speed over DeepSpeed's ZeRO-Offload"] == ("not measured", None)
    assert found["speed over DeepSpeed's ZenFlow"] == ("1.50 x", True)
    assert found["stall of ZenFlow"] == ("4.0%", True)
    assert found["stall and the profiler's idle, zenflow"] == ("4.0%, profiler 20.0%", False)
    assert found["kernel pack, of a copy's rate"] == ("79.0%", False)
    assert found["step beside the planner's, zenflow"] == ("-10.0%", True)
    figures["zenflow"]["prediction"]["s_min"] = 5
    assert module(suite, "goals").goals(figures)[0].met is None


TESTS = """
import pytest

class OutOfMemoryError(Exception): ...

def test_right(): assert True
def test_wrong(): assert 1 == 2, "one is not two"
def test_too_large(): raise OutOfMemoryError("no room")
@pytest.fixture
def missing(): raise ImportError("no module named moon")
def test_needs_it(missing): pass
"""


def test_a_test_that_fails_is_a_broken_invariant_and_one_that_could_not_run_is_none(
    tmp_path: Path, suite: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "test_four.py"
    file.write_text(TESTS, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(STUDIES), os.environ.get("PYTHONPATH", "")]))
    record = module(suite, "record").Record(tmp_path / "out.json", "invariants")
    module(suite, "checks").run_tests(record, [str(file), f"--rootdir={tmp_path}", "-c", "/dev/null"])
    document = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert document["figures"]["tests"] == {"passed": 1, "failed": 3}
    assert [(name.rpartition("::")[2], each["holds"]) for name, each in document["invariants"].items()] == [
        ("test_wrong", False)
    ]
    assert [name.rpartition("::")[2] for name in document["failed"]] == ["test_too_large", "test_needs_it"]
