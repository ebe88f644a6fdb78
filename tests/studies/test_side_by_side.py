"""Study 005: what the systems are told, the arithmetic of its claims, its processes, and one run without DeepSpeed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

STUDY = Path(__file__).parents[2] / "studies" / "005-upstream-side-by-side"
PARTS = ("analysis", "children", "contenders", "report", "setting", "turns", "world")


@pytest.fixture(scope="module")
def study() -> Any:
    """The study's modules."""
    before = list(sys.path)
    sys.path[:0] = [str(STUDY), str(STUDY.parent)]
    try:
        spec = importlib.util.spec_from_file_location("study_side_by_side", STUDY / "run.py")
        assert spec is not None
        assert spec.loader is not None
        run = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(run)
        yield SimpleNamespace(run=run, **{part: importlib.import_module(f"sidebyside.{part}") for part in PARTS})
    finally:
        sys.path[:] = before


def run_of(steps_ms: list[list[float]], held_out: dict[str, float], *, first: float = 2.0) -> Any:
    parts = [[4.0, 5.0, 1.0] for _ in steps_ms]
    return {
        "steps_ms": steps_ms,
        "parts_ms": parts,
        "processor_ms": [20.0 for _ in steps_ms],
        "losses": [first],
        "held_out": held_out,
        "host_bytes": {"a": 60, "b": 40},
        "elements": 10,
    }


def record_of(study: Any, replay_loss: float, **changes: Any) -> Any:
    names = study.setting.SYSTEMS
    runs = {name: run_of([[10.0] * 8, [10.0] * 8], {"0": 3.0, "100": 2.0}) for name in names}
    runs[study.setting.ZERO_OFFLOAD] = run_of([[30.0] * 8] * 2, {"0": 3.0, "100": 1.9})
    runs[study.setting.SEQUENTIAL] = run_of([[8.0, 8.0, 8.0, 36.0] * 2] * 2, {"0": 3.0, "100": 2.0})
    runs[study.setting.OVERLAPPED] = run_of([[16.0, 16.0, 16.0, 32.0] * 2] * 2, {"0": 3.0, "100": 2.0})
    runs[study.setting.REPLAY] = run_of([[10.0] * 8] * 2, {"0": 3.0, "100": replay_loss})
    runs.update(changes)
    return {"others_share": 0.0, "systems": runs}


def test_upstream_and_this_runtime_get_the_same_knobs(study: Any) -> None:
    from zenflow import ZenFlowConfig

    s = study.setting
    told = s.document(s.SYSTEMS[s.OVERLAPPED])
    ours = ZenFlowConfig(**s.SYSTEMS[s.REPLAY].knobs)
    assert ZenFlowConfig.from_ds_config(told) == ours
    assert replace(ours, deferred_update="mean") == ZenFlowConfig(**s.SYSTEMS[s.MEAN].knobs)
    exact = ZenFlowConfig.zero_offload(pipeline="bucket", pt_reserved_cores_perc=0.0)
    assert ZenFlowConfig(**s.SYSTEMS[s.EXACT].knobs) == exact
    assert "zenflow" not in s.document(s.SYSTEMS[s.ZERO_OFFLOAD])["zero_optimization"]
    assert s.SELECT_INTERVAL % s.UPDATE_INTERVAL == 0
    assert s.WARM_UP >= s.UPDATE_INTERVAL  # upstream's overlapped mode is right only then
    for scale in (s.FULL, s.QUICK):
        assert scale.opening % s.UPDATE_INTERVAL == scale.turn % s.UPDATE_INTERVAL == 0
        assert scale.counted % s.UPDATE_INTERVAL == 0


def test_every_system_is_in_every_place(study: Any) -> None:
    names = list(study.setting.SYSTEMS)
    orders = [study.turns.order(names, number) for number in range(2 * len(names))]
    assert all(sorted(order) == sorted(names) for order in orders)
    places = Counter((name, place) for order in orders for place, name in enumerate(order))
    assert max(places.values()) <= 4
    assert len({order[0] for order in orders}) >= 3


def test_rows(study: Any) -> None:
    s = study.setting
    rows = study.analysis.rows([record_of(study, 2.0)])
    sequential = rows[s.SEQUENTIAL]
    assert (sequential.mean_ms, sequential.p50_ms, sequential.p95_ms) == (15.0, 8.0, 36.0)
    assert (sequential.spread, sequential.window_spread) == (4.5, 1.0)
    # 30 ms, of which the plain model's forward and backward are 9.
    assert study.analysis.offloading_share(rows) == pytest.approx(0.7)
    assert rows[s.ZERO_OFFLOAD].bytes_per_element == 10.0
    # The fastest takes 100 steps of 10 ms; 1000 ms are 50 of the overlapped mode's 20 ms: halfway from 3 to 2.
    assert rows[s.OVERLAPPED].at_equal_time.mean == pytest.approx(2.5)
    assert rows[s.REPLAY].at_equal_time.mean == pytest.approx(2.0)
    assert rows[s.REPLAY].losses == study.analysis.Estimate(2.0, None)


def test_claims(study: Any) -> None:
    losses = (2.00, 2.01, 1.99)  # of 2.0: the mean difference is 0, its standard error 0.0058
    found = study.analysis.claims([record_of(study, loss) for loss in losses])
    assert [claim.holds for claim in found] == [True] * 7
    assert "0.67" in found[2].found  # 10 ms by the sequential mode's 15
    assert "standard error 0.0058" in found[5].found
    worse = study.analysis.claims([record_of(study, 0.02 + loss) for loss in losses])
    assert [claim.holds for claim in worse] == [True] * 5 + [False] * 2
    assert study.analysis.claims([record_of(study, 2.0)])[5].holds is None


def test_claims_that_fail(study: Any) -> None:
    s = study.setting
    slow = {s.REPLAY: run_of([[13.0, 13.0, 13.0, 20.0] * 2] * 2, {"0": 3.0, "100": 2.0})}
    scrambled = {s.SEQUENTIAL: run_of([[8.0] * 8] * 2, {"0": 3.0, "100": 2.0}, first=5.5)}
    found = study.analysis.claims([record_of(study, 2.0, **slow, **scrambled)])
    assert [claim.holds for claim in found[:5]] == [False, True, False, False, False]
    assert s.SEQUENTIAL in found[0].found


def test_upstreams_buffers_are_counted_once(study: Any) -> None:
    parameter = torch.nn.Parameter(torch.zeros(100))
    parameter.grad = torch.zeros(100)
    parameter.overlap_grad = [torch.zeros(100), torch.zeros(100)]  # type: ignore[attr-defined]
    model = torch.zeros(50)
    optimizer = torch.optim.AdamW([parameter])
    found: dict[str, int] = {}
    seen = {model.untyped_storage().data_ptr()}
    visited: set[int] = set()
    study.contenders._walk("optimizer", optimizer, seen, found, visited)
    study.contenders._walk("again", [parameter, {"x": (model, parameter.grad)}], seen, found, visited)
    study.contenders._walk("meta", [torch.zeros(9, device="meta")], seen, found, visited)
    assert found == {"optimizer": 4 * 400}


def test_a_child_that_fails_says_why(study: Any, tmp_path: Path) -> None:
    start = {"system": study.setting.REPLAY, "folder": str(tmp_path / "none"), "seed": 0, "port": 1}
    child = study.children.Child(study.setting.SYSTEMS[study.setting.REPLAY], start, tmp_path / "log")
    try:
        with pytest.raises(study.children.ChildError, match=r"this, replay has ended: .*none"):
            child.wait_ready()
    finally:
        child.end()


def test_this_runtime_takes_its_turns(
    study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_fault: None
) -> None:
    s = study.setting
    names = (s.NO_OFFLOAD, s.EXACT, s.REPLAY)
    for module in (s, study.turns):
        monkeypatch.setattr(module, "SYSTEMS", {name: s.SYSTEMS[name] for name in names})
    size = s.Size("0M", 64, 1, 3)
    said: list[str] = []
    folder = study.world.pretrained(size, tmp_path, said.append)
    assert study.world.pretrained(size, tmp_path, said.append) == folder
    assert len(said) == size.pretrain_steps
    scale = s.Scale(turns=2, counted=4, sequences=4, evaluate_every=1)
    found = study.turns.measure(size, 0, folder, scale, said.append)
    for name, run in found["systems"].items():
        assert len(run["losses"]) == scale.steps == 24
        assert [len(turn) for turn in run["steps_ms"]] == [4, 4]
        assert run["held_out"]["0"] == pytest.approx(found["systems"][s.NO_OFFLOAD]["held_out"]["0"], rel=1e-3)
        assert list(run["held_out"]) == ["0", "16", "24"]
        assert set(run["host_bytes"]) == (set() if name == s.NO_OFFLOAD else {"state", "log", "staging"})
    assert study.analysis.first_losses([found]).holds
