"""Study 003: what names a run, what a killed study keeps, the arithmetic of its claims, and the study in small."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.tiers import by_day, everything
from zftune import quality

STUDY = Path(__file__).parents[2] / "studies" / "003-convergence"
PARTS = ("analysis", "data", "model", "plot", "predict", "probe", "report", "setting", "store", "train", "upstream")


@pytest.fixture(scope="module")
def study() -> Any:
    """The study's modules."""
    before = list(sys.path)
    sys.path[:0] = [str(STUDY), str(STUDY.parent)]
    try:
        spec = importlib.util.spec_from_file_location("study_convergence", STUDY / "run.py")
        assert spec is not None
        assert spec.loader is not None
        run = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(run)
        yield SimpleNamespace(run=run, **{part: importlib.import_module(f"convergence.{part}") for part in PARTS})
    finally:
        sys.path[:] = before


@pytest.fixture(scope="module")
def world(study: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs of twelve steps."""
    scale = study.train.Scale(steps=12, batch=2, pretrain_steps=4, sequences=16, on_the_way=8)
    return study.train.World(scale, study.data.texts(), tmp_path_factory.mktemp("pretrained"))


def late(study: Any, **changes: Any) -> Any:
    return replace(study.setting.published("fine-tuning", "replay", 1e-3), **changes)


# --- settings ----------------------------------------------------------------------------------------------------


def test_every_field_of_a_setting_is_in_its_key(study: Any) -> None:
    base = late(study)
    changes = {
        "regime": "from scratch",
        "method": "mean",
        "lr": 2e-3,
        "ratio": 0.1,
        "interval": 8,
        "lag": 1,
        "warm_up": 5,
        "schedule": "decay",
        "seed": 1,
    }
    assert set(changes) == {field.name for field in fields(base)}
    keys = {replace(base, **{name: value}).key for name, value in changes.items()}
    assert len(keys | {base.key}) == len(changes) + 1


def test_the_grid_is_full(study: Any) -> None:
    found = list(study.setting.grid("fine-tuning"))
    # Of each learning rate: synchronous, a probe, and for each k one at S = 1 and four at each other S.
    assert len(found) == len({setting.key for setting in found}) == 3 * (2 + 3 * (1 + 3 * 4))
    assert all(setting.lag in (1, setting.interval) for setting in found if setting.lag)
    assert {setting.seed for setting in found} == {0}


def test_a_late_run_is_compared_with_the_synchronous_one_of_its_seed(study: Any) -> None:
    setting = late(study, seed=3, schedule="decay", warm_up=9)
    assert setting.synchronous() == study.setting.Setting(
        regime="fine-tuning", method="synchronous", lr=1e-3, seed=3, schedule="decay"
    )
    assert (setting.staleness, setting.synchronous().staleness) == (4.0, 0.0)


# --- what is kept ------------------------------------------------------------------------------------------------


def test_finished_runs_are_found_again_and_a_torn_line_is_not(study: Any, tmp_path: Path) -> None:
    file, setting = tmp_path / "runs.jsonl", late(study)
    first = study.store.Store(file, {"method": 1})
    first.put(setting, {"held_out": 2.123456789}, {"when": "then"})
    first.put(replace(setting, seed=1), {"held_out": 3.0}, {"when": "then"})
    with file.open("a") as stream:
        stream.write('{"world": "cut sho')
    second = study.store.Store(file, {"method": 1})
    assert second.get(setting) == {"held_out": 2.123457}
    assert second.get(replace(setting, seed=2)) is None
    second.put(replace(setting, seed=2), {"held_out": 4.0}, {"when": "now"})
    second.put(setting, {"held_out": 5.0}, {"when": "now"})  # measured again
    third = study.store.Store(file, {"method": 1})
    assert [third.get(replace(setting, seed=seed))["held_out"] for seed in range(3)] == [5.0, 3.0, 4.0]
    records = [json.loads(line) for line in file.read_text().splitlines() if "cut sho" not in line]
    assert [record["session"] for record in records if "provenance" in record] == [0, 1]
    assert [record["session"] for record in records if "key" in record] == [0, 0, 1, 1]
    assert sum("description" in record for record in records) == 1


def test_runs_of_another_world_are_not_taken(study: Any, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    study.store.Store(file, {"method": 1}).put(late(study), {"held_out": 1.0}, {})
    assert study.store.Store(file, {"method": 2}).runs == {}


# --- arithmetic --------------------------------------------------------------------------------------------------


def test_intervals(study: Any) -> None:
    found = study.analysis.interval([1.0, 2.0, 3.0])
    assert (found.mean, found.n) == (2.0, 3)
    assert found.half == pytest.approx(4.303 / 3**0.5)
    assert found.low == pytest.approx(2.0 - found.half)
    assert study.analysis.interval([7.0]) == study.analysis.Interval(7.0, None, 1)


def test_excess_is_paired_by_seed(study: Any) -> None:
    setting = late(study)
    losses = {0: (2.0, 2.02), 1: (4.0, 4.08), 2: (5.0, float("nan"))}
    runs: dict[str, Any] = {}
    for seed, (synchronous, replay) in losses.items():
        own = replace(setting, seed=seed)
        runs |= {own.synchronous().key: {"held_out": synchronous}, own.key: {"held_out": replay}}
    found = study.analysis.over_seeds(runs, setting, range(5))
    assert (found.n, found.mean) == (2, pytest.approx(1.5))
    assert study.analysis.over_seeds({}, setting, range(5)) is None


def test_crossings(study: Any) -> None:
    assert study.analysis.crossing([(1e-3, 1.0), (1e-5, -1.0)]) == pytest.approx(1e-4)
    assert study.analysis.crossing([(1e-5, -1.0), (1e-4, 1.0), (1e-3, -1.0)]) == pytest.approx(3.2e-5)
    assert study.analysis.crossing([(1e-5, 1.0), (1e-3, -1.0)]) is None
    assert study.analysis.crossing([(1e-5, -1.0)]) is None


def test_where_replay_hurts_and_where_the_mean_overtakes_it(study: Any) -> None:
    runs: dict[str, Any] = {}
    for lr, replay, mean in ((1e-5, 2.0, 2.2), (1e-3, 2.4, 2.2)):
        own = late(study, lr=lr)
        runs |= {own.synchronous().key: {"held_out": 2.0}, own.key: {"held_out": replay}}
        runs[replace(own, method="mean").key] = {"held_out": mean}
    assert study.analysis.rule_rate(runs, "fine-tuning", (1e-5, 1e-3)) == pytest.approx(1e-4)
    hurts = study.analysis.hurting_rate(runs, "fine-tuning", (1e-5, 1e-3))
    assert hurts == pytest.approx(1e-5 * 100 ** (0.3 / 20), rel=0.05)
    assert study.analysis.hurting_rate(runs, "from scratch", (1e-5, 1e-3)) is None


def test_rank_correlation_and_separation(study: Any) -> None:
    assert study.analysis.ranks([5.0, 1.0, 5.0, 2.0]) == [3.5, 1.0, 3.5, 2.0]
    assert study.analysis.rank_correlation([1, 2, 3], [10, 100, 1000]) == pytest.approx(1)
    assert study.analysis.rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert study.analysis.separation([1, 2, 3, 4], [False, False, True, True]) == 1
    assert study.analysis.separation([1, 4, 2, 3], [False, False, True, True]) == 0.5
    assert study.analysis.separation([1, 1], [False, True]) == 0.5
    assert study.analysis.separation([1, 2], [True, True]) is None


def test_a_probed_quantity_between_two_distances(study: Any) -> None:
    probes = {str(d): {"moved": 0.1 * d, "cosine": 1 - 0.1 * d} for d in (1, 2, 4, 8)}
    assert study.analysis.at_staleness(probes, "moved", 4.5) == pytest.approx(0.45)
    assert study.analysis.at_staleness(probes, "cosine", 0.5) == pytest.approx(0.95)
    with pytest.raises(ValueError, match="8, the farthest"):
        study.analysis.at_staleness(probes, "moved", 9)


def test_a_bound_is_chosen_on_some_settings_and_judged_on_others(study: Any) -> None:
    def point(moved: float, excess: float, **changes: Any) -> Any:
        probes = {str(place): {"1": {"moved": moved}} for place in study.predict.SETTLED}
        return study.predict.Point(late(study, ratio=0.5, **changes), excess, {"probes": probes})

    points = [point(1e-3, 0.08), point(2e-3, 0.64, lr=1e-4), point(1e-3, 0.2, interval=2, lag=2)]
    assert [study.predict.late_percent(one) for one in points] == pytest.approx([0.2, 0.4, 0.1])
    assert study.predict.bound(points[:1], points[1:]) == study.predict.Bound(
        pytest.approx(2.0), chosen=1, judged=2, above=2, worst=pytest.approx(10.0)
    )
    halves = list(study.predict.halves(points, 20))
    assert {(one.chosen, one.judged) for one in halves} == {(1, 2), (2, 1)}  # a trajectory is never on both sides
    short = {"probes": {"0": {"1": {"moved": 1e-3}}}}
    assert study.predict.movement_percent(short) is None


def test_the_product_has_the_coefficient_that_the_records_give(study: Any) -> None:
    runs = study.store.Store(STUDY / "results" / "runs.jsonl", {})
    for line in runs.file.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if "key" in record:
            runs.runs[record["key"]] = record["figures"]
    found = study.predict.points(runs.runs, study.report.every_late(runs.runs))
    tuned, scratch = ([one for one in found if one.setting.regime == regime] for regime in study.setting.REGIMES)
    assert (len(tuned), len(scratch)) == (90, 75)
    bound = study.predict.bound(tuned, scratch)
    assert bound.above == 0
    assert quality.expected_loss_percent(1.0) == pytest.approx(bound.coefficient, rel=0.005)
    assert int(max(one.excess for one in tuned)) == quality.MOST_MEASURED_LOSS_PERCENT
    assert dict(quality.EXPECTED_LOSS_PERCENT) == {"exact": 0.0, **study.predict.PROMISED}


# --- runs --------------------------------------------------------------------------------------------------------


def test_what_is_held_out_is_not_trained_on(study: Any) -> None:
    chunks = [bytes([number % 256]) * study.data.CHUNK for number in range(20)]
    text = study.data.split("t", b"".join(chunks))
    assert sorted(set(text.held_out.tolist())) == [0, 8, 16]
    assert set(text.train.tolist()).isdisjoint(text.held_out.tolist())
    assert text.train.numel() + text.held_out.numel() == 20 * study.data.CHUNK
    assert text.evaluation(5).shape == (5, study.model.CONTEXT + 1)


def test_the_learning_rate_goes_up_and_down(study: Any) -> None:
    rates = [study.train.rate_at(late(study, lr=1.0, schedule="decay"), step, 20) for step in range(1, 21)]
    assert rates[:2] == [0.5, 1.0]
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-1] == pytest.approx(1 / 19)
    assert study.train.rate_at(late(study, lr=1.0), 7, 20) == 1.0


def test_synchronous_is_adamw_and_a_full_warm_up_is_synchronous(study: Any, world: Any) -> None:
    setting = late(study)
    synchronous = study.train.train(world, setting.synchronous())
    replay = study.train.train(world, setting)
    warm = study.train.train(world, replace(setting, warm_up=world.scale.steps))
    adamw = study.probe.probe(world, setting.probe())
    assert warm["held_out"] == synchronous["held_out"]
    assert replay["held_out"] != synchronous["held_out"]
    assert synchronous["held_out"] < synchronous["start"] - 0.05
    assert adamw["held_out"] == pytest.approx(synchronous["held_out"], abs=5e-3)  # fp32 against bf16 weights
    assert replay["flushed"] != replay["visible"]
    assert replay["staleness"] == pytest.approx(setting.staleness, abs=0.5)


def test_a_probe_of_what_does_not_move_sees_nothing(study: Any, world: Any) -> None:
    still = study.probe.probe(world, late(study, lr=0.0).probe())["probes"]["0"]
    assert still["8"] == {"moved": 0.0, "turned": 0.0, "cosine": pytest.approx(1.0), "gained": 0.0}
    moving = study.probe.probe(world, late(study).probe())["probes"]["0"]
    assert sorted(moving, key=int) == ["1", "2", "4", "8"]
    assert moving["8"]["moved"] > moving["1"]["moved"] > 0
    assert moving["8"]["cosine"] < 1


def test_the_runtime_reports_the_movement_that_torch_has(study: Any, world: Any) -> None:
    setting = study.setting.Setting(regime="from scratch", method="instrument", lr=1e-4, ratio=0.05)
    found = study.probe.instrument(world, setting)
    assert 0.1 < found["movement_percent"] < 1
    assert found["movement_percent"] == pytest.approx(found["whole_percent"], rel=0.1)
    assert found["movement_percent"] != found["whole_percent"]


def test_deepspeed_starts_from_the_same_weights_with_the_tutorials_section(study: Any, world: Any) -> None:
    document = study.upstream.document(late(study, method="deepspeed"), 8)
    section = document["zero_optimization"]["zenflow"]
    assert (section["topk_ratio"], section["update_interval"], section["overlap_step"]) == (0.05, 4, True)
    assert document["optimizer"]["params"]["lr"] == 1e-3
    parameters = study.train.start(world, "fine-tuning", 0).parameters()
    assert all(torch.equal(parameter, parameter.bfloat16().float()) for parameter in parameters)


def test_a_short_study_resumes_and_reports(
    study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        study.run, "QUICK", study.train.Scale(steps=8, batch=2, pretrain_steps=2, sequences=8, on_the_way=4)
    )
    monkeypatch.setattr(study.run, "CACHE", tmp_path / "pretrained")
    if not everything():  # three runs instead of 21, and no pictures
        of_one_seed = list(study.setting.four_of("fine-tuning", 1e-3, (0,)))[:2]
        monkeypatch.setattr(study.run, "quick", lambda _: [*of_one_seed, late(study).probe()])
        monkeypatch.setattr(study.run, "draw", lambda *_: "")
    arguments = ["--quick", "--results", str(tmp_path / "r"), "--json", str(tmp_path / "all.json")]
    assert study.run.main(arguments) == 0
    runs = tmp_path / "r" / "runs.jsonl"
    lines = runs.read_text().splitlines()
    document = json.loads((tmp_path / "all.json").read_text())
    assert len(document["runs"]) == sum('"key"' in line for line in lines) == by_day(3, all_of=21)
    runs.write_text("\n".join(lines[:-3]) + "\n" + lines[-3][:50])  # killed while it wrote the third last
    assert study.run.main(arguments) == 0
    assert json.loads((tmp_path / "all.json").read_text())["runs"].keys() == document["runs"].keys()
    again = runs.read_text().splitlines()
    assert again[: len(lines) - 3] == lines[:-3]
    assert sum('"key"' in line for line in again) == len(document["runs"]) + 1  # the torn one is a line too
    assert "## What tells that replay" in capsys.readouterr().out
    for picture in by_day((), all_of=("intervals", "rates", "telling")):
        assert (tmp_path / "r" / f"{picture}.svg").read_text().rstrip().endswith("</svg>")
