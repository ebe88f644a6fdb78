"""A script without a guard under upstream's overlapped ZenFlow, which would wait for ten minutes, is refused before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from zftune.cli.main import app
from zftune.errors import BadInputError
from zftune.integrations.deepspeed import named

ROOT = Path(__file__).parents[3]
OVERLAPPED: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu"},
        "zenflow": {"topk_ratio": 0.1, "update_interval": 4, "overlap_step": True},
    },
}
BARE = "import deepspeed\nengine, *_ = deepspeed.initialize(config='ds.json')\nfor _ in range(9):\n    engine.step()\n"
IN_MAIN = "def main():\n    trainer.train()\n\n\n{}main()\n"


def written(folder: Path, text: str) -> Path:
    script = folder / "train.py"
    script.write_text(text)
    return script


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (BARE, 2),
        (IN_MAIN.format(""), 5),
        (IN_MAIN.format("if True:\n    "), 6),
        ("with ranks():\n    model = accelerator.prepare(model)\n", 2),
        ("if __name__ == '__main__':\n    pass\nelse:\n    initialize()\n", 4),
        ("loop = SFTTrainer(model)\nmodel.train()\nloop.train()\n", 3),
        ("Seq2SeqTrainer(model).train()\n", 1),
    ],
)
def test_what_trains_when_it_is_read_is_found(tmp_path: Path, text: str, line: int) -> None:
    found = named.unguarded(written(tmp_path, text))
    assert found is not None
    assert found.line == line


@pytest.mark.parametrize(
    "text",
    [
        IN_MAIN.format("if __name__ == '__main__':\n    "),
        "def main():\n    initialize()\n",
        "class Training:\n    def train(self):\n        self.train()\n",
        "import torch\ntorch.manual_seed(0)\n",
        "def a():\n    b()\ndef b():\n    a()\na()\n",
        "model = Net()\nmodel.train()\nengine.module.train(False)\n",
        "not Python (",
        "",
    ],
)
def test_what_only_defines_is_left_alone(tmp_path: Path, text: str) -> None:
    assert named.unguarded(written(tmp_path, text)) is None


def test_every_example_has_a_guard() -> None:
    examples = sorted(ROOT.glob("examples/*.py"))
    assert examples
    assert [one.name for one in examples if named.unguarded(one)] == []


@pytest.mark.parametrize(
    ("place", "value"), [("overlap_step", False), ("zenflow", None), ("stage", 0), ("offload_optimizer", None)]
)
def test_without_a_process_of_its_own_nothing_is_asked(tmp_path: Path, place: str, value: Any) -> None:
    script, zero = written(tmp_path, BARE), dict(OVERLAPPED["zero_optimization"])
    with pytest.raises(BadInputError, match="reads the script again"):
        named.require_guard(OVERLAPPED, script)
    zero[place] = value
    if place == "overlap_step":
        zero = {**OVERLAPPED["zero_optimization"], "zenflow": {"overlap_step": value}}
    named.require_guard({"zero_optimization": zero}, script)


def test_check_says_it_with_the_script_and_without(tmp_path: Path) -> None:

    config = tmp_path / "ds.json"
    config.write_text(json.dumps(OVERLAPPED))
    asked = ["check", str(config), "--backend", "deepspeed"]
    told = CliRunner().invoke(app, asked)
    assert "what trains in the script has to stand under" in " ".join(told.output.split())
    told = CliRunner().invoke(app, [*asked, "--script", str(written(tmp_path, BARE))])
    assert told.exit_code == 1
    assert "whose line 2 calls deepspeed.initialize()." in " ".join(told.output.split())
    written(tmp_path, IN_MAIN.format("if __name__ == '__main__':\n    "))
    told = CliRunner().invoke(app, [*asked, "--script", str(tmp_path / "train.py")])
    assert "calls" not in told.output


def test_run_refuses_it_before_anything_starts(tmp_path: Path) -> None:

    config = tmp_path / "ds.json"
    config.write_text(json.dumps(OVERLAPPED))
    command = ["run", "--backend", "deepspeed", "--", "deepspeed", str(written(tmp_path, BARE)), "--deepspeed"]
    told = CliRunner().invoke(app, [*command, str(config)])
    assert told.exit_code == 2
    assert 'under `if __name__ == "__main__":`' in told.output
