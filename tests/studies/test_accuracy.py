"""Study 023: splits without near copies, pairs, the encoder's arithmetic, movement, intervals, and runs in small."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zftune import quality

STUDY = Path(__file__).parents[2] / "studies" / "023-accuracy"
PARTS = ("encoder", "language", "lateness", "report", "tasks", "training")


@pytest.fixture(scope="module")
def study() -> Any:
    """The study's modules."""
    before = list(sys.path)
    sys.path[:0] = [str(STUDY), str(STUDY.parent)]
    try:
        spec = importlib.util.spec_from_file_location("study_accuracy", STUDY / "run.py")
        assert spec is not None
        assert spec.loader is not None
        run = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = run  # its dataclass looks itself up
        spec.loader.exec_module(run)
        yield SimpleNamespace(run=run, **{part: importlib.import_module(f"accuracy.{part}") for part in PARTS})
    finally:
        sys.path[:] = before


@pytest.fixture(scope="module")
def world(study: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs of twelve steps in fp32, where a synchronous variant is AdamW to rounding."""
    scale = replace(study.run.QUICK, steps=12, language_steps=6, dtype="float32")
    return study.training.World(scale, tmp_path_factory.mktemp("encoded"))


# --- tasks --------------------------------------------------------------------------------------------------------


def test_a_group_is_on_one_side_of_a_split(study: Any) -> None:
    examples = [(f"file {i // 5}", study.tasks.Example(f"text {i}", "", i % 2)) for i in range(300)]
    task = study.tasks.split("any", ("a", "b"), examples)
    groups = [{group for group, example in examples if example in part} for part in (task.train, task.test)]
    assert all(groups)
    assert groups[0].isdisjoint(groups[1])
    assert len(task.train) + len(task.test) == 300
    assert task == study.tasks.split("any", ("a", "b"), examples[::-1])


def test_a_pair_is_labelled_by_whose_docstring_it_has(study: Any) -> None:
    every = [study.tasks.Documented("file.py", f"f{i}(x)", f"the summary of number {i}") for i in range(40)]
    own = {one.heading: one.summary for one in every}
    pairs = list(study.tasks.paired(every))
    assert [(own[first] == second) for first, second, _ in pairs] == [label == 1 for *_, label in pairs]
    assert 10 < sum(label for *_, label in pairs) < 30
    assert list(study.tasks.paired([one._replace(summary="all say the same thing") for one in every])) == []


def test_what_a_file_documents(study: Any) -> None:
    source = (
        'class A:\n  """One two three four."""\n'
        '  def f(self, x, *, y):\n    """Five six\n    seven eight.\n\n    Not this."""\n'
        '  def g(self):\n    """Too short."""\n  def __len__(self):\n    """One two three four five."""\n'
    )
    found = {(one.heading, one.summary) for one in study.tasks.documented(source, "a.py")}
    assert found == {("A()", "One two three four."), ("f(x, y)", "Five six seven eight.")}


def test_a_bag_of_words_learns_words_and_not_noise(study: Any) -> None:
    def task(of: Any) -> Any:
        examples = [(str(i), study.tasks.Example(f"{of(i)} and {i}", "", i % 2)) for i in range(120)]
        return study.tasks.split("any", ("a", "b"), examples)

    assert study.tasks.bag_of_words(task(lambda i: ("yes", "no")[i % 2])) == 1.0
    assert 0.3 < study.tasks.bag_of_words(task(lambda i: "neither")) < 0.7


# --- the encoder --------------------------------------------------------------------------------------------------


def test_a_layer_is_torchs_encoder_layer(study: Any) -> None:
    torch.manual_seed(0)
    theirs = nn.TransformerEncoderLayer(
        16, 4, 32, dropout=0.0, activation="gelu", batch_first=True, layer_norm_eps=1e-5
    )
    ours, attention = study.encoder.Block(16, 32, 4, 1e-5), theirs.self_attn
    with torch.no_grad():
        for part, weight, bias in zip(
            (ours.query, ours.key, ours.value),
            attention.in_proj_weight.chunk(3),
            attention.in_proj_bias.chunk(3),
            strict=True,
        ):
            part.weight.copy_(weight)
            part.bias.copy_(bias)
    for part, of in (
        (ours.out, attention.out_proj),
        (ours.up, theirs.linear1),
        (ours.down, theirs.linear2),
        (ours.norm1, theirs.norm1),
        (ours.norm2, theirs.norm2),
    ):
        part.load_state_dict(of.state_dict())
    x, there = torch.randn(3, 5, 16), torch.arange(5) < torch.tensor([5, 3, 1])[:, None]
    expected = theirs.train()(x, src_key_padding_mask=~there)
    torch.testing.assert_close(ours(x, there[:, None, None, :])[there], expected[there])


def test_padding_changes_nothing(study: Any, world: Any) -> None:
    problem = world.problem("small")
    model = problem.model(0)
    features, lengths, _ = problem.test[torch.arange(8)]
    alone = [model.logits(features[i : i + 1, : lengths[i]], lengths[i : i + 1]) for i in range(8)]
    torch.testing.assert_close(model.logits(features, lengths), torch.cat(alone))


# --- figures ------------------------------------------------------------------------------------------------------


def test_movement_is_the_relative_change_over_four_steps(study: Any) -> None:
    model = nn.Linear(3, 3)
    movement = study.training.Movement(model, 20)
    for step in range(21):
        movement.look(step)
        with torch.no_grad():
            model.weight.mul_(1.01)
            model.bias.mul_(5.0)  # no matrix
    assert movement.found == pytest.approx({"0": 1.01**4 - 1, "12": 1.01**4 - 1}, rel=1e-5)


def test_intervals_and_the_margin(study: Any) -> None:
    def of(*accuracies: float) -> dict[int, dict[str, float]]:
        return {seed: {"accuracy": accuracy} for seed, accuracy in enumerate(accuracies)}

    runs = {"task": {"AdamW": of(0.80, 0.82, 0.81), "replay": of(0.801, 0.818, 0.81), "mean": of(0.79, 0.81, 0.80)}}
    points = study.report.paired(runs, "task", "replay", "accuracy", 100.0)
    assert points == pytest.approx({0: 0.1, 1: -0.2, 2: 0.0})
    found = study.report.Interval.of(list(points.values()))
    assert (found.mean, found.half) == pytest.approx((-0.0333, 4.303 * 0.15275 / 3**0.5), abs=1e-3)
    assert found.no_worse(1.0)
    assert not found.no_worse(0.4)
    always = study.report.Interval.of([*study.report.paired(runs, "task", "mean", "accuracy", 100.0).values()])
    assert always.mean == pytest.approx(-1.0)
    assert not always.no_worse(1.0 - 1e-6)


# --- how much late updates cost -----------------------------------------------------------------------------------


def test_points_are_paired_by_seed_and_study_what_a_delay_is_of_the_run(study: Any, tmp_path: Path) -> None:
    def put(name: str, losses: dict[str, float]) -> None:
        more = {"training": [2.0, 1.9, 1.5, *[1.5] * 7], "moved": {"0": 2e-3, "12": 4e-3}}
        record = {
            "inputs": {"steps": 200, "lr": 1e-4},
            "figures": {"runs": {s: {"loss": x, **more} for s, x in losses.items()}},
        }
        (tmp_path / "long").mkdir(exist_ok=True)
        (tmp_path / "long" / f"{name}.json").write_text(json.dumps(record))

    put("task-AdamW", {"0": 1.0, "1": 2.0})
    put("task-replay", {"0": 1.01, "1": 2.06, "2": 9.0})
    put("task-replay-S2", {"1": 2.02})
    put("task-mean", {"0": 5.0})
    put("other-replay", {"0": 5.0})
    four, two = study.lateness.read(tmp_path)
    assert (four.problem, four.steps, four.variant, four.seeds) == ("task", 200, "replay", 2)
    assert (four.excess, four.moved) == pytest.approx((2.0, 0.1))
    assert (four.late_steps, four.late_percent, four.share) == pytest.approx((3.8, 0.38, 1.9))
    assert four.fall == pytest.approx((40 / 1.0 + 40 / 2.0) / 2 / 20)  # from the second tenth to the third
    assert (two.variant, two.excess, two.share) == ("replay-S2", pytest.approx(1.0), pytest.approx(0.95))


def test_a_coefficient_is_chosen_on_half_of_the_problems_and_judged_on_the_others(study: Any) -> None:
    def one(problem: str, excess: float) -> Any:
        return study.lateness.Point(problem, 190, 1e-4, "replay", 1, excess, moved=0.0, fall=1.0)  # 2% of the run

    easy, hard = one("a", 1.0), one("b", 3.0)
    assert study.lateness.bound([easy], [hard], "share of the run") == (pytest.approx(0.5), [pytest.approx(3.0)])
    assert [(name, chosen, judged) for name, chosen, judged in study.lateness.halves([easy, hard])] == [
        ("a", [easy], [hard]),
        ("b", [hard], [easy]),
    ]


def test_the_product_has_the_coefficient_that_the_records_give(study: Any) -> None:
    points = study.lateness.read(STUDY / "results")
    assert len({one.problem for one in points}) == 4
    least, _ = study.lateness.bound(points, points, "share of the run, beside movement")
    assert quality.expected_loss_percent(0.0, 1.0, 100) == pytest.approx(least, abs=0.05)
    assert all(
        one.excess <= quality.expected_loss_percent(one.late_percent, one.late_steps, one.steps) for one in points
    )
    assert sum(one.excess > quality.expected_loss_percent(one.late_percent) for one in points) > len(points) / 2
    assert (STUDY / "results" / "lateness.md").read_text(encoding="utf-8") == study.lateness.markdown(points)


# --- runs in small ------------------------------------------------------------------------------------------------


def test_variants_differ_from_adamw_as_they_should(study: Any, world: Any) -> None:
    problem = world.problem("small")
    runs = {v: study.training.train(world, "small", v, 0, problem) for v in ("AdamW", "replay", "mean", "Twin-Flow")}
    loss = {name: run["loss"] for name, run in runs.items()}
    assert loss["Twin-Flow"] == pytest.approx(loss["AdamW"], rel=1e-5)
    assert abs(loss["replay"] - loss["AdamW"]) > 1e-4 * loss["AdamW"]
    assert abs(loss["mean"] - loss["replay"]) > 1e-4 * loss["AdamW"]
    assert runs["replay"]["training"][0] == pytest.approx(runs["AdamW"]["training"][0], rel=1e-5)  # the same batches
    assert 3 <= runs["replay"]["staleness"] <= 7
    assert 0 < runs["replay"]["coverage"] < 1
    assert runs["AdamW"]["moved"]["0"] > 0


def test_a_killed_study_goes_on_where_it_was(study: Any, world: Any, tmp_path: Path, monkeypatch: Any) -> None:
    def one(_: Any, name: str, variant: str, seed: int, __: Any) -> dict[str, Any]:
        done.append((variant, seed))
        if len(done) == 6:
            raise KeyboardInterrupt
        return {"accuracy": 0.5, "loss": 1.0, "moved": {}}

    done: list[tuple[str, int]] = []
    plan = study.run.Plan({"small": (0, 1)}, study.training.VARIANTS[:-1], again=False)
    monkeypatch.setattr(study.run, "train", one)
    results = study.run.Results(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        study.run.measure(world, results, plan, lambda _: None)
    study.run.measure(world, results, plan, lambda _: None)
    every = [(variant, seed) for seed in (0, 1) for variant in study.training.VARIANTS[:-1]]
    assert done == [*every[:6], *every[5:]]


def test_a_language_model_is_pretrained_once_and_continued(study: Any, world: Any) -> None:
    said: list[str] = []
    problem = world.problem("language", said.append)
    assert problem.pretraining["held_out"] < 6.3  # chance: ln 512 = 6.24, untrained 6.25
    assert len(said) == 1
    run = study.training.train(world, "language", "replay", 0, problem)
    assert run["loss"] < problem.evaluate(problem.model(0))["loss"]
    world.problem("language", said.append)
    assert len(said) == 1
