"""What cannot be converted ends in one sentence and exit code 2, and nothing is written."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

import zenflow
from tests.support.zftune.checkpoint.tiny import Tiny, groups_of, train
from zftune.checkpoint.sources import MODEL_STATES
from zftune.cli.main import app


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])


def refused(result: Result, *parts: str) -> None:
    """One sentence that says what is allowed."""
    assert result.exit_code == 2, result.output
    (sentence,) = (line for line in result.stderr.splitlines() if line.startswith("zftune: "))
    assert "Traceback" not in result.output
    for part in parts:
        assert part in sentence, sentence


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    model = Tiny()
    optimizer = torch.optim.AdamW(groups_of(model, named=True))
    list(train(model, optimizer, range(2)))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "plain.pt")
    return tmp_path / "plain.pt"


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    model = Tiny()
    optimizer = zenflow.ZenFlowAdamW(groups_of(model, named=True), config=zenflow.ZenFlowConfig(topk_ratio=0.3))
    list(train(model, optimizer, range(2)))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "ours.pt")
    optimizer.close()
    return tmp_path / "ours.pt"


def test_a_conversion_says_what_it_made(plain: Path, tmp_path: Path) -> None:
    result = run("import", plain, "-o", tmp_path / "ours.pt")
    assert "ours.pt: a checkpoint of zftune, made from a plain checkpoint. " in result.stdout, result.output


def test_a_conversion_says_what_it_did(plain: Path, tmp_path: Path) -> None:
    result = run("import", plain, "-o", tmp_path / "new.pt", "--json", "-")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document == {
        "schema": "zftune.checkpoint/1",
        "from": "plain",
        "to": "ours",
        "path": str(tmp_path / "new.pt"),
        "rule": "adamw",
        "steps": 2,
        "groups": 2,
        "weights": 6,
        "elements": 342,
        "copied": [],
        "notes": [],
    }
    assert "6 weights of 342 elements in 2 groups, rule adamw, after 2 steps." in result.stderr
    result = run("export", tmp_path / "new.pt", "-o", tmp_path / "back.pt")
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back.pt", "new.pt", "plain.pt"]


@pytest.mark.parametrize("command", ["import", "export"])
def test_paths(plain: Path, ours: Path, tmp_path: Path, command: str) -> None:
    source = plain if command == "import" else ours
    refused(run(command, tmp_path / "none", "-o", tmp_path / "new"), "none': is not there")
    refused(run(command, source, "-o", source), "--output", "where nothing is yet")
    refused(run(command, source, "-o", tmp_path / "no" / "folder"), "--output", "in a folder that exists")
    refused(run(command, source, "-o", "x" * 300), "--output")
    (tmp_path / "empty").mkdir()
    refused(run(command, tmp_path / "empty", "-o", tmp_path / "new"), f"holds no {MODEL_STATES}")
    (tmp_path / "empty" / "latest").write_text("global_step9")
    refused(
        run(command, tmp_path / "empty", "-o", tmp_path / "new"), "its latest is 'global_step9', which is not there"
    )
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("words", ["..", "../ours/global_step2", "global_step2/../global_step2", "/tmp"])
def test_an_inner_folder_elsewhere_is_refused(plain: Path, tmp_path: Path, words: str) -> None:
    assert run("import", plain, "-o", tmp_path / "ours").exit_code == 0
    (tmp_path / "ours" / "latest").write_text(words)
    result = run("export", tmp_path / "ours", "-o", tmp_path / "new.pt")
    refused(result, f"its latest is '{words}'; it must be the name of a folder in it")


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_truncated_files(plain: Path, ours: Path, tmp_path: Path, share: float) -> None:
    for command, source in (("import", plain), ("export", ours)):
        whole = source.read_bytes()
        (tmp_path / "part.pt").write_bytes(whole[: int(share * len(whole))])
        refused(run(command, tmp_path / "part.pt", "-o", tmp_path / "new.pt"), "truncated or damaged")
    assert not list(tmp_path.glob("*new*"))


def test_the_other_direction_is_named(plain: Path, ours: Path, tmp_path: Path) -> None:
    refused(run("import", ours, "-o", tmp_path / "new.pt"), "is a checkpoint of ours already")
    refused(run("export", plain, "-o", tmp_path / "new.pt"), "is not a checkpoint of ours")
    refused(run("import", plain, "-o", tmp_path / "new.pt", "--ds-config", tmp_path / "no.json"), "--ds-config")


class _Harmful:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def test_code_in_a_file_runs_only_where_it_is_trusted(plain: Path, tmp_path: Path) -> None:
    document = torch.load(plain, weights_only=True)
    torch.save({**document, "more": _Harmful(tmp_path / "made")}, tmp_path / "harmful.pt")
    result = run("import", tmp_path / "harmful.pt", "-o", tmp_path / "new.pt")
    refused(result, "holds an object of posix.mkdir", "--trust")
    assert not (tmp_path / "made").exists()
    assert run("import", tmp_path / "harmful.pt", "-o", tmp_path / "new.pt", "--trust").exit_code == 0
    assert (tmp_path / "made").exists()
    (tmp_path / "old.pt").write_bytes(pickle.dumps(_Harmful(tmp_path / "too")))
    refused(run("import", tmp_path / "old.pt", "-o", tmp_path / "newer.pt"))
    assert not (tmp_path / "too").exists()


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda d: d.pop("model"), ('holds no "model"',)),
        (lambda d: d.pop("optimizer"), ('"optimizer"',)),
        (lambda d: d["optimizer"].pop("param_groups"), ('"optimizer"',)),
        (lambda d: d["optimizer"]["param_groups"][1].update(amsgrad=True), ("amsgrad is True", "param_groups[1]")),
        (lambda d: d["optimizer"]["param_groups"][0].pop("betas"), ("has no betas",)),
        (lambda d: d["optimizer"]["state"][2].pop("exp_avg_sq"), ("'down.weight'", "exp_avg_sq")),
        (lambda d: d["optimizer"]["state"][2].pop("step"), ("KeyError",)),
        (lambda d: d["model"].pop("up.weight"), ("'up.weight' is not in the model",)),
        (lambda d: d["model"].update({"up.weight": torch.ones(3, 3)}), ("'up.weight' has the shape [3, 3]",)),
        (lambda d: d["model"].update({"up.bias": torch.ones(13).half()}), ("torch.float16", "an fp32 master")),
        (lambda d: d["optimizer"]["param_groups"][0]["param_names"].pop(), ("2 param_names for 3 parameters",)),
    ],
)
def test_plain_documents_that_are_none(plain: Path, tmp_path: Path, change: Any, parts: tuple[str, ...]) -> None:
    document = torch.load(plain, weights_only=True)
    change(document)
    torch.save(document, tmp_path / "changed.pt")
    refused(run("import", tmp_path / "changed.pt", "-o", tmp_path / "new.pt"), *parts)
    assert not (tmp_path / "new.pt").exists()


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda d: d["optimizer"]["param_groups"][0].update(zenflow="{}"), ("cannot be read",)),
        (lambda d: d["optimizer"]["state"].pop(3), ("state[3]",)),
        (lambda d: d["optimizer"]["state"][1].pop("exp_avg"), ('state[1]["exp_avg"] is missing',)),
        (lambda d: d["optimizer"]["state"][1].update(log=()), ('state[1]["log"]',)),
        (lambda d: d["model"].pop("up.weight"), ("'up.weight' is not in the model",)),
        (lambda d: d["model"].update({"up.weight": torch.ones(7, 13)}), ("'up.weight' has the shape [7, 13]",)),
        (lambda d: d["optimizer"]["param_groups"].reverse(), ("zenflow",)),
    ],
)
def test_documents_of_ours_that_are_none(ours: Path, tmp_path: Path, change: Any, parts: tuple[str, ...]) -> None:
    document = torch.load(ours, weights_only=True)
    change(document)
    torch.save(document, tmp_path / "changed.pt")
    result = run("export", tmp_path / "changed.pt", "-o", tmp_path / "new.pt")
    refused(result, *(parts if "zenflow" not in parts else ("is not a checkpoint of ours",)))
    assert not (tmp_path / "new.pt").exists()


def test_the_model_of_another_moment_is_refused_where_names_are_guessed(tmp_path: Path) -> None:
    model, other = nn.Linear(4, 6), nn.Linear(4, 6)
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), config=zenflow.ZenFlowConfig.zero_offload())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    for name, weights in (("right", model), ("wrong", other)):
        torch.save({"model": weights.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / f"{name}.pt")
    refused(run("export", tmp_path / "wrong.pt", "-o", tmp_path / "new.pt"), "of the same moment")
    assert run("export", tmp_path / "right.pt", "-o", tmp_path / "new.pt").exit_code == 0
    optimizer.close()


@pytest.mark.parametrize(
    ("names", "part"),
    [
        (["zero_pp_rank_0_mp_rank_00_model_states.pt"], "stage 3"),
        ([MODEL_STATES, "mp_rank_01_model_states.pt"], "tensor, pipeline or expert parallel"),
        (["layer_00-model_00-model_states.pt", MODEL_STATES], "tensor, pipeline or expert parallel"),
    ],
)
def test_folders_of_other_parallelism(tmp_path: Path, names: list[str], part: str) -> None:
    (tmp_path / "run").mkdir()
    for name in names:
        torch.save({}, tmp_path / "run" / name)
    refused(run("import", tmp_path / "run", "-o", tmp_path / "new"), part)


def test_a_disk_that_is_full_leaves_nothing(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for target in ("new.pt", "new"):
        result = run("import", plain, "-o", tmp_path / target)
        assert result.exit_code == 1
        assert "cannot be written (No space left on device)" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain.pt"]
