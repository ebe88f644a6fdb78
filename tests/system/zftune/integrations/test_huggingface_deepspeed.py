"""A Trainer's checkpoints with DeepSpeed: the Trainer itself goes on under `zftune run` from what was made of them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("transformers", reason="the huggingface extra is not installed")

from tests.support import fork_server, upstream_ops
from tests.support.once import once
from tests.support.tiers import fast
from tests.support.zftune.integrations.trainer_run import SAVE_EVERY, STEPS
from tests.support.zftune.integrations.trainers import furthest, tiny_model
from zftune.checkpoint.converting import import_checkpoint

LR = 1e-2  # the trainers'
_AUTO = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
_BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
}
ALL = {
    "bf16": {**_BASE, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": _AUTO}},
    "own": {**_BASE, "zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True},
}
CONFIGS = fast({"bf16": ALL["bf16"]}, all_of=ALL)
"""DeepSpeed makes the optimizer; the Trainer makes it, and the scheduler, which it saves in a file of its own."""
NEAR = {"bf16": 5e-2, "own": 1e-4}
"""Of masters, in learning rates: bf16 gradients that are clipped are rounded once more by DeepSpeed."""
MIDDLE, LATER = f"checkpoint-{SAVE_EVERY}", f"checkpoint-{2 * SAVE_EVERY}"


def run(
    folder: Path,
    name: str,
    checkpoint: Path | None,
    *,
    ours: bool = False,
    ranks: int = 1,
    config: dict[str, Any] | None = None,
) -> None:
    """Train into a folder, under `zftune run` or as upstream does."""
    (folder / name).mkdir()
    words: list[str | Path] = ["-m", "tests.support.zftune.integrations.trainer_run", folder / name]
    words += [json.dumps(config or CONFIGS[folder.name]), *([checkpoint] if checkpoint else [])]
    if ours:
        words = ["-c", fork_server.MAIN, "run", "--backend", "zenflow", "--", sys.executable, *words]
    environment = {**os.environ, **upstream_ops.environment(), "ZFTUNE_DB": str(folder / "db"), "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        begun = fork_server.ranks(ranks, words, env=environment, exec_in_place=ours)
        for process in [stack.enter_context(one) for one in begun]:
            assert process.wait(300) == 0, process.stdout[-3000:] + process.stderr[-6000:]


def chain(folder: Path) -> Path:
    """Each configuration: begun and resumed by DeepSpeed; by us from its import and the Trainer's files."""
    for name in CONFIGS:
        place = folder / name
        place.mkdir()
        run(place, "begun", None)
        run(place, "plain", place / "begun" / MIDDLE)
        import_checkpoint(str(place / "begun" / MIDDLE), str(place / "imported"))
        for path in (place / "begun" / MIDDLE).glob("*.*"):
            shutil.copy(path, place / "imported")
        run(place, "ours", place / "imported", ours=True)
    return folder


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    upstream_ops.need()
    return once(tmp_path_factory, "trainer-with-deepspeed", chain)


def seen_by(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / name / "seen.pt", weights_only=True)
    return found


def column(seen: dict[str, Any], name: str) -> list[float]:
    return [entry[name] for entry in seen["log"]]


@pytest.mark.smoke
@pytest.mark.parametrize("name", CONFIGS)
def test_the_trainer_goes_on_as_deepspeed_does(trainings: Path, name: str) -> None:
    """From an import under `zftune run`: steps, rates, losses, weights."""
    folder = trainings / name
    begun, plain, ours = (seen_by(folder, run) for run in ("begun", "plain", "ours"))
    assert [one["optimizer"] for one in (plain, ours)] == ["DeepSpeedZeroOptimizer", "EngineOptimizer"]
    assert column(plain, "loss") == column(begun, "loss")  # so a resumed run can be known by its losses
    assert ours["step"] == STEPS
    assert column(ours, "step") == list(range(1, STEPS + 1))
    assert column(ours, "learning_rate") == column(plain, "learning_rate")
    assert column(ours, "loss") == pytest.approx(column(plain, "loss"), rel=1e-3 if name == "bf16" else 1e-6)
    assert furthest(ours["masters"], plain["masters"]) < NEAR[name] * LR
    state = torch.load(folder / "begun" / MIDDLE / f"global_step{SAVE_EVERY}" / "mp_rank_00_model_states.pt")
    assert furthest({n: state["module"][n] for n in plain["masters"]}, plain["masters"]) > LR


def by_script(folder: Path, out: Path) -> dict[str, torch.Tensor]:
    """As the script's own words say: `python zero_to_fp32.py . output_dir/`."""
    fork_server.run([folder / "zero_to_fp32.py", ".", out], cwd=folder, check=True)
    found: dict[str, torch.Tensor] = torch.load(out / "pytorch_model.bin", weights_only=True)
    return found


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], names: Iterable[str]) -> None:
    for name in names:
        assert found[name].dtype == torch.float32, name
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("name", CONFIGS)
def test_deepspeeds_script_in_the_folder_makes_the_masters(trainings: Path, tmp_path: Path, name: str) -> None:
    """Of a Trainer's folder that we saved, and of an imported one."""
    folder = trainings / name
    last = seen_by(folder, "ours")["masters"]
    equal(by_script(folder / "ours" / f"checkpoint-{STEPS}", tmp_path / "saved"), last, last)
    deepspeeds = by_script(folder / "begun" / MIDDLE, tmp_path / "begun")
    equal(by_script(folder / "imported", tmp_path / "imported"), deepspeeds, last)
    of_later = by_script(folder / "ours" / LATER, tmp_path / "later")
    assert not torch.equal(of_later["lm_head.weight"], deepspeeds["lm_head.weight"])


STAGE_3: dict[str, Any] = {
    **_BASE,
    "optimizer": {"type": "AdamW", "params": _AUTO},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
        "offload_param": {"device": "cpu"},
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}


STAGES = {2: {**_BASE, "optimizer": {"type": "AdamW", "params": _AUTO}}, 3: STAGE_3}


def on_two_ranks(folder: Path, config: dict[str, Any]) -> Path:
    """By stage 2 of DeepSpeed; by us at a stage on two ranks, and from a checkpoint of theirs on two and on one."""
    save = "from tests.support.zftune.integrations.trainers import tiny_model; tiny_model().save_pretrained('model')"
    path = os.pathsep.join([str(upstream_ops.ROOT), os.environ.get("PYTHONPATH", "")])
    fork_server.run(["-c", save], cwd=folder, env={**os.environ, "PYTHONPATH": path}, check=True)
    upstream = {name: value for name, value in STAGE_3.items() if name != "zero_optimization"} | {
        "zero_optimization": {"stage": 2}
    }
    run(folder, "theirs", None, ranks=2, config=upstream)
    run(folder, "ours", None, ours=True, ranks=2, config=config)
    run(folder, "again", folder / "ours" / MIDDLE, ours=True, ranks=2, config=config)
    run(folder, "on one", folder / "ours" / MIDDLE, ours=True, ranks=1, config=config)
    return folder


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks(tmp_path_factory: pytest.TempPathFactory, stage: int) -> None:
    folder = once(tmp_path_factory, f"trainer-at-stage-{stage}", lambda folder: on_two_ranks(folder, STAGES[stage]))
    theirs, ours, again, alone = (seen_by(folder, name) for name in ("theirs", "ours", "again", "on one"))
    assert (theirs["was cut up"], ours["was cut up"]) == (False, stage == 3)
    assert ours["optimizer"] == "EngineOptimizer"
    assert column(ours, "learning_rate") == column(theirs, "learning_rate")
    assert column(ours, "loss") == pytest.approx(column(theirs, "loss"), rel=1e-4)
    assert furthest(ours["masters"], theirs["masters"]) < 1e-2 * LR
    assert column(again, "loss") == column(ours, "loss")
    assert furthest(again["masters"], ours["masters"]) == 0.0
    assert alone["step"] == STEPS
    saved = load_file(folder / "ours" / LATER / "model.safetensors")
    assert {name: value.shape for name, value in saved.items()} == {
        name: value.shape for name, value in tiny_model().state_dict().items()
    }
