"""The studies: their command lines, the closed forms on numbers worked out by hand, and what a resumed run keeps."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import zygote
from zenflow import ZenFlowConfig
from zftune.emulation import Rig

ROOT = Path(__file__).parents[2]
STUDIES = ROOT / "studies"
RUNS = sorted(STUDIES.glob("[0-9]*/run.py"))


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"study_{path.parent.name.replace('-', '_')}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def timelines() -> Any:
    return load(STUDIES / "000-rig-timelines" / "run.py")


@pytest.fixture(scope="module")
def bandwidth() -> Any:
    return load(STUDIES / "007-host-bandwidth" / "run.py")


@pytest.mark.parametrize("path", RUNS, ids=lambda path: str(path.parent.name))
def test_every_study_has_its_options_and_its_readme(path: Path) -> None:
    done = zygote.run([path, "--help"])
    assert done.returncode == 0, done.stderr
    assert all(option in done.stdout for option in ("--quick", "--json PATH", "--again"))
    assert (path.parent / "README.md").is_file()


def test_studies_that_are_named_are_there() -> None:
    """In their scripts (whose digest is over files by name), in tests and in texts."""
    named = re.compile(r"\bstudies/[0-9]{3}-[a-z0-9-]+")
    parts = [STUDIES, *(STUDIES.parent / name for name in ("zftune", "runtime", "tests"))]
    files = [file for part in parts for kind in ("*.py", "*.md") for file in part.rglob(kind)]
    found = {name for file in files for name in named.findall(file.read_text(encoding="utf-8"))}
    assert len(found) > 5
    assert [name for name in sorted(found) if not (STUDIES.parent / name).is_dir()] == []


def digested(path: Path) -> list[str]:
    """The files and folders of a script's `CODE`, without importing it; of imported ones their own script tells."""
    assigned: dict[str, ast.expr] = {}
    around: dict[str, Any] = {"Path": Path, "__file__": str(path), "ROOT": ROOT}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            assigned[node.targets[0].id] = node.value
        elif isinstance(node, ast.ImportFrom):
            around |= {one.asname or one.name: () for one in node.names if one.name.endswith("CODE")}

    def value(name: str) -> Any:
        used = {one.id for one in ast.walk(assigned[name]) if isinstance(one, ast.Name) and one.id in assigned}
        return eval(ast.unparse(assigned[name]), {**around, **{one: value(one) for one in used}})

    return [part for name in assigned if name.endswith("CODE") for part in value(name)]


def test_code_that_a_record_depends_on_is_there() -> None:
    """A run would end at its first measurement, or keep what is outdated."""
    of_scripts = {path: digested(path) for path in sorted(STUDIES.rglob("*.py"))}
    assert sum(map(bool, of_scripts.values())) > 20
    missing = {(path.name, one) for path, parts in of_scripts.items() for one in parts if not (ROOT / one).exists()}
    assert missing == set()


# A rig on which an element costs 1 ms on either link and 28 ms on the host (1 ms a byte), and, where the device is not
# free, 0.1 ms a byte there. Two layers of 10 ms forward.
def rig(device_gbps: float | None = None) -> Rig:
    return Rig("hand", "", 20.0, 30.0, 2e-6, 2e-6, 1e-6, device_gbps, 1.0)


def split(timelines: Any, *, resident: int = 5) -> Any:
    buckets = tuple(timelines.Bucket(elements, stage) for elements, stage in ((1, 0), (2, 0), (1, 1), (1, 2)))
    return timelines.Split(buckets, resident=resident, scored=7, layers=2)


def test_a_server_takes_one_after_the_other(timelines: Any) -> None:
    assert timelines.served([0, 1, 10], [2, 3, 1]) == [2, 5, 11]


def test_no_offload_is_compute_and_the_update(timelines: Any) -> None:
    everything = timelines.Split((), resident=5, scored=0, layers=2)
    assert timelines.no_offload(rig(), everything).step_ms == 50
    # 5 elements * 28 bytes * 0.1 ms
    assert timelines.no_offload(rig(1e-5), everything).step_ms == pytest.approx(50 + 14)


def test_in_turn_is_the_sum(timelines: Any) -> None:
    found = timelines.in_turn(rig(), split(timelines))
    # 5 elements: down 5, host 140, up 5
    assert found.step_ms == pytest.approx(50 + 150)
    assert found.stall_ms == pytest.approx(150)


def test_in_turn_packs_before_and_scatters_after(timelines: Any) -> None:
    found = timelines.in_turn(rig(1e-5), split(timelines))
    # The first bucket is packed in 0.4 ms. Down: 1.4, then ready at 1.2: 3.4, 4.4, 5.4. The device's own update ends at
    # 2.0 + 14 = 16, and the host starts then: 156. Up 5; the last bucket's scatter 0.4.
    assert found.step_ms == pytest.approx(50 + 16 + 140 + 5 + 0.4)
    assert found.stall_ms == pytest.approx(50 + 161.4 - (50 + 14 + 2 + 2))


def test_bucketwise_waits_for_each_weight_where_it_is_needed(timelines: Any) -> None:
    found = timelines.bucketwise(rig(), split(timelines))
    # Down 1, 3, 4, 5; host 29, 85, 113, 141; up 30, 87, 114, 142. Layer 0 starts at 87 and ends at 97, layer 1 starts
    # at 114 and ends at 124, the head's weight arrives at 142; backward 30.
    assert found.step_ms == pytest.approx(142 + 30)
    assert found.stall_ms == pytest.approx(172 - 50)
    assert found.kind == "exact"


def test_bucketwise_on_a_fast_host_hides_behind_forward(timelines: Any) -> None:
    fast = Rig("hand", "", 20.0, 30.0, 2e-6, 2e-6, 1e9, None, 1.0)
    # Up: 2, 5 (down until 3), 6, 7. Layer 0 from 5 to 15, layer 1 to 25.
    assert timelines.bucketwise(fast, split(timelines)).step_ms == pytest.approx(25 + 30)


def test_a_window_is_bounded_by_its_busiest_part(timelines: Any) -> None:
    # 5 deferred elements, S = 4: host 5 * 34 / 4 a step, links 5 and 5 / 4.
    found = timelines.windowed(rig(), split(timelines), 4)
    assert (found.limit, found.kind) == ("compute", "lower bound")
    assert found.step_ms == 50
    slow = Rig("hand", "", 2.0, 3.0, 2e-6, 2e-6, 1e-6, None, 1.0)
    found = timelines.windowed(slow, split(timelines), 4)
    assert found.limit == "host"
    assert found.step_ms == pytest.approx(42.5)
    assert found.stall_ms == pytest.approx(37.5)
    fast_host = Rig("hand", "", 1.0, 1.0, 2e-6, 2e-6, 1e9, None, 1.0)
    assert timelines.windowed(fast_host, split(timelines), 4).limit == "d2h"
    # Update 5 * 28, importance 7 * 2, packing 5 * 4, scattering 5 * 4 / 4 bytes, 0.1 ms each.
    assert timelines.windowed(rig(1e-5), split(timelines), 4).step_ms == pytest.approx(50 + 17.9)


def test_the_form_follows_from_the_knobs(timelines: Any) -> None:
    offloading = {name: config for name, config in timelines.SYSTEMS.items() if config.offload_ratio > 0}
    assert {name: timelines.predict(rig(), split(timelines), config).limit for name, config in offloading.items()} == {
        "zero-offload": "in turn",
        "zero-offload-pipelined": "pipeline",
        "zenflow": "compute",
    }
    everything = timelines.Split((), resident=5, scored=0, layers=2)
    assert timelines.predict(rig(), everything, timelines.SYSTEMS["no-offload"]).step_ms == 50


def test_the_split_is_the_runtimes(timelines: Any) -> None:
    workload = timelines.task_for(timelines.QUICK_RIG).build()
    matrices = sum(p.numel() for p in workload.module.parameters() if p.dim() >= 2)
    full = timelines.split_of(workload, ZenFlowConfig.zero_offload().resolved())
    assert full.deferred == matrices
    assert full.deferred + full.resident == workload.parameters
    assert (full.layers, full.scored) == (4, 0)
    # The embedding, seven weights in each of four layers, the head.
    assert [bucket.stage for bucket in full.buckets] == [0, *(layer for layer in range(4) for _ in range(7)), 4]
    none = timelines.split_of(workload, timelines.SYSTEMS["no-offload"].resolved())
    assert none.buckets == ()
    assert none.resident == workload.parameters
    part = timelines.split_of(workload, timelines.SYSTEMS["zenflow"].resolved())
    assert 0.94 < part.deferred / matrices < 0.96
    assert part.scored == matrices


def test_thread_counts(bandwidth: Any) -> None:
    assert [bandwidth.thread_counts(cores) for cores in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]
    assert bandwidth.updates_per_s(34.0, 4) == 1e9


def test_bandwidth_resumes_and_writes_json(
    bandwidth: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bandwidth, "QUICK_ELEMENTS", 10_000)
    arguments = ["--quick", "--results", str(tmp_path / "r"), "--json", str(tmp_path / "all.json")]
    assert bandwidth.main(arguments) == 0
    first = (tmp_path / "all.json").read_text()
    assert bandwidth.main(arguments) == 0  # nothing new is measured
    assert (tmp_path / "all.json").read_text() == first
    assert "GB/s" in capsys.readouterr().out


def test_results_are_kept_for_equal_inputs_only(bandwidth: Any, tmp_path: Path) -> None:
    results = bandwidth.Results.of(tmp_path, argparse.Namespace(quick=True, results=None))
    assert results.folder == tmp_path / "results" / "quick"
    assert results.load("a", {"x": (1, 2)}) is None
    kept = results.save("a", {"x": (1, 2)}, {"figure": 1.0})
    assert kept["provenance"]["software"]["torch"]
    loaded = results.load("a", {"x": (1, 2)})
    assert loaded is not None
    assert loaded["figures"] == {"figure": 1.0}
    assert results.load("a", {"x": (1, 3)}) is None
    (results.folder / "a.json").write_text("{")
    assert results.load("a", {"x": (1, 2)}) is None


_CODE = """import math

def area(radius: float) -> float:
    return math.pi * radius**2
"""


@pytest.mark.parametrize(
    ("after", "is_same"),
    [
        (
            "import math\ndef area( radius: float ) -> float:\n    '''m2'''\n    return math.pi*radius ** 2 # of it",
            True,
        ),
        (_CODE.replace("import math", "from cmath import pi as math"), True),
        (_CODE.replace("**2", "**3"), False),
        (_CODE + "\n\nprint(area(1))\n", False),
    ],
    ids=["words and layout", "imports", "what it computes", "more"],
)
def test_a_digest_is_of_what_the_code_does(bandwidth: Any, tmp_path: Path, after: str, is_same: bool) -> None:
    files = [tmp_path / name for name in ("before.py", "after.py")]
    for file, text in zip(files, (_CODE, after), strict=True):
        file.write_text(text)
    before, now = (bandwidth.code_digest(str(file)) for file in files)
    assert (before == now) is is_same


def test_a_digest_is_of_all_files_in_any_order(bandwidth: Any, tmp_path: Path) -> None:
    """What moves from one of them to another is the same; figures and C++ count as they are written."""
    one, other = tmp_path / "one", tmp_path / "other"
    for folder, first, second in ((one, "x = 1\ny = 2\n", "z = 3\n"), (other, "y = 2\n", "z = 3\nx = 1\n")):
        folder.mkdir()
        (folder / "a.py").write_text(first)
        (folder / "b.py").write_text(second)
    digest = bandwidth.code_digest
    assert digest(str(one)) == digest(str(other)) == digest(str(one / "b.py"), str(one / "a.py"))
    for name in ("machine.toml", "kernel.cpp"):
        (tmp_path / name).write_text("a = 1")
        (one / name).write_text("a = 2")
    assert digest(str(one)) != digest(str(other))
    assert digest(str(tmp_path / "kernel.cpp")) != digest(str(one / "kernel.cpp"))


_APART = """import json, sys
ask = json.load(open(sys.argv[1]))
print("line", *range(5), sep="\\n")
if ask["answers"]:
    json.dump({"loss": ask["scale"] * 2}, open(sys.argv[1], "w"))
else:
    sys.exit(3)
"""


def test_a_run_apart_has_figures_or_how_it_ended(bandwidth: Any, tmp_path: Path) -> None:
    import deepspeedkit  # beside studykit

    script = tmp_path / "script.py"
    script.write_text(_APART)
    found = deepspeedkit.run_apart(script, {"scale": 1.5, "answers": True}, 60.0)
    assert found.pop("seconds") > 0
    assert found == {"loss": 3.0}
    failed = deepspeedkit.run_apart(script, {"scale": 1.5, "answers": False}, 60.0)
    assert failed == {"ended": "exit status 3", "log": ["2", "3", "4"]}


def test_spread(bandwidth: Any) -> None:
    assert bandwidth.spread(range(1, 102)) == {"median": 51, "p5": 6, "p95": 96, "n": 101}
    assert bandwidth.spread([3.0]) == {"median": 3.0, "p5": 3.0, "p95": 3.0, "n": 1}
