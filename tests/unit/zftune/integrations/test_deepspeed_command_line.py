"""Which ds_config a command names."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from zftune.ds_config.reading import Source
from zftune.errors import BadInputError
from zftune.integrations.deepspeed.command_line import named_by

CONFIG = {"train_batch_size": 1, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
ACCELERATE = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 1\n  offload_optimizer_device: cpu\n"
BASE64 = base64.urlsafe_b64encode(json.dumps(CONFIG).encode()).decode()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current one, with a file of each kind."""
    files = {
        "ds.json": json.dumps(CONFIG),
        "args.json": json.dumps({"output_dir": "out", "deepspeed": "ds.json"}),
        "recipe.yaml": "model: m\ndeepspeed: ds.json\n",
        "acc.yaml": ACCELERATE,
        "file.yaml": "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n",
        "gpus.yaml": "distributed_type: MULTI_GPU\n",
        "data.json": "[1, 2]",
        "model.yaml": "layers: 2\n",
        "broken.json": "{]",
        "broken.yaml": "a: [",
        "config.json": json.dumps({"model_type": "m"}),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "cache/accelerate").mkdir(parents=True)
    (tmp_path / "cache/accelerate/default_config.yaml").write_text(ACCELERATE.replace("1", "3"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def found(line: str, *more: str, home: str = "nowhere") -> list[Source]:
    return list(named_by([*line.split(), *more], {"HF_HOME": home}))


@pytest.mark.parametrize(
    "line",
    [
        "python train.py --deepspeed ds.json --lr 1",
        "python train.py --lr 1 --deepspeed=ds.json",
        "deepspeed --num_gpus 2 train.py --deepspeed --deepspeed_config ds.json",
        "deepspeed train.py --deepspeed --deepspeed-config=ds.json",
        "deepspeed train.py --deepspeed data.json --deepspeed_config ds.json",
        "python -m torch.distributed.run --nproc_per_node 2 train.py --deepspeed ds.json",
        "torchrun --standalone train.py --ds_config ds.json",
        "accelerate launch --multi_gpu train.py --deepspeed ds.json",
        "accelerate launch --config_file acc.yaml train.py --deepspeed ds.json",
        "torchrun train.py args.json",
        "llamafactory-cli train recipe.yaml",
        "accelerate launch -m axolotl.cli.train recipe.yaml",
        "accelerate launch --config_file acc.yaml train.py --config=recipe.yaml",
        "accelerate launch --config_file file.yaml train.py",
        "accelerate-launch --use_deepspeed --deepspeed-config-file ds.json train.py",
    ],
)
def test_a_file_is_found(folder: Path, line: str) -> None:
    (source,) = found(line)
    assert (source.config, source.path) == (CONFIG, "ds.json")


@pytest.mark.parametrize("value", [json.dumps(CONFIG), BASE64], ids=["JSON", "base64"])
def test_one_may_stand_there_itself(value: str) -> None:
    for words in (["--deepspeed", value], [f"--deepspeed_config={value}"]):
        (source,) = found("python train.py", *words)
        assert (source.config, source.path, source.through) == (CONFIG, None, words[0].partition("=")[0])


@pytest.mark.parametrize(
    ("line", "stage", "place"),
    [
        ("accelerate launch --config_file acc.yaml train.py", 1, "deepspeed_config.zero_stage"),
        ("python -m accelerate.commands.launch --config-file=acc.yaml train.py", 1, "deepspeed_config.zero_stage"),
        ("conda run -n accelerate accelerate launch --config_file acc.yaml -m train", 1, "deepspeed_config.zero_stage"),
        ("accelerate launch --config_file acc.yaml --zero_stage 2 train.py --zero_stage 0", 2, "--zero_stage"),
        ("accelerate launch --use_deepspeed --config_file gpus.yaml --zero-stage=3 train.py", 3, "--zero_stage"),
        ("accelerate launch train.py data.json model.yaml", 3, "deepspeed_config.zero_stage"),
        ("accelerate launch train.py --deepspeed", 3, "deepspeed_config.zero_stage"),
    ],
)
def test_accelerate_makes_one(folder: Path, line: str, stage: int, place: str) -> None:
    (source,) = found(line, home="cache")
    assert source.config["zero_optimization"]["stage"] == stage
    assert source.places is not None
    assert source.places["zero_optimization.stage"].name == place


@pytest.mark.parametrize(
    "line",
    [
        "python train.py",
        "python",
        "python train.py --deepspeed",
        "python train.py --deepspeed nowhere.json",
        "python train.py --deepspeed train.py",
        "python train.py --deepspeed model.yaml",
        "python train.py --deepspeed --data data.json --model config.json broken.json model.yaml broken.yaml",
        "python train.py --deepspeed_config " + "a" * 5000,
        "accelerate launch --config_file gpus.yaml train.py",
        "accelerate launch --config_file acc.yaml --multi_gpu train.py",
        "accelerate launch --config_file nowhere.yaml train.py",
        "accelerate launch --use_deepspeed --deepspeed_config_file nowhere.json train.py",
        "accelerate launch train.py --use_deepspeed",
        "accelerate config",
    ],
)
def test_nothing_is_named(folder: Path, line: str) -> None:
    assert found(line) == []


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("python train.py --deepspeed broken.json", "ds_config 'broken.json' cannot be read: it is neither JSON"),
        (
            "python train.py --deepspeed_config data.json",
            "ds_config 'data.json' cannot be read: it holds no JSON object",
        ),
        ("python train.py --deepspeed config.json", "'config.json' is a model's config.json"),
        ("accelerate launch --config_file broken.yaml train.py", "'broken.yaml' is not YAML"),
        (
            "accelerate launch --config_file file.yaml --use_deepspeed --deepspeed_config_file broken.json t.py",
            "ds_config 'broken",
        ),
    ],
)
def test_what_is_none_is_refused(folder: Path, line: str, sentence: str) -> None:
    with pytest.raises(BadInputError, match=f"^{sentence}"):
        found(line)
