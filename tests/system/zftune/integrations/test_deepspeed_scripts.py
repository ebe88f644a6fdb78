"""The same DeepSpeed scripts on several ranks with `zftune run` and without: at stages 2 and 3 losses are the same."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support import fork_server, upstream_ops
from tests.support.once import once
from tests.support.tiers import fast, pairs
from tests.support.zftune.integrations.ds_scripts import BATCH, LR, SAVED_AFTER, STEPS

Seen = list[dict[str, Any]]
"""What each rank saw, by case."""
ADAMW = {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1}}
OWN = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
ON_CPU = {"device": "cpu", "pin_memory": False}
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"config": {"bf16": {"enabled": True}}},
    "fp16": {"config": {"fp16": {"enabled": True, "initial_scale_power": 8}}},
    "accumulated": {"config": {"gradient_accumulation_steps": 3}},
    "own optimizer": {"config": OWN, "optimizer": True},
    "made under zero.Init": {"init": True},
    "made under zero.Init in bf16": {"config": {"bf16": {"enabled": True}}, "init": True},
}
"""What of the ds_config is another, and what of the script."""
OF_STAGE_3 = ("made under zero.Init", "made under zero.Init in bf16")
NEAR = {"bf16": 1e-2, "fp16": 1e-2, "made under zero.Init in bf16": 1e-2}
"""Losses in 16 bits, relative; others are within 1e-4."""
STAGES = (2, 3)
SCRIPTS = fast(("plain loop",), all_of=("plain loop", "minimal client", "Trainer"))
RANKS = fast((2,), all_of=(2, 4))
TRIED = fast(("fp32",), all_of=tuple(KINDS))
ON_FOUR = ("fp32", "accumulated", "made under zero.Init in bf16")
TRIED_ON = [(kind, ranks) for ranks in RANKS for kind in TRIED if ranks == 2 or kind in ON_FOUR]


AUTO = {"enabled": "auto"}
PRECISIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bf16": ({"bf16": {"enabled": True}}, {"bf16": True}),
    "fp16": ({"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 8}}, {"fp16": True}),
    '"auto"': ({"bf16": AUTO, "fp16": AUTO}, {"bf16": True}),
}
"""What the ds_config has of it, and what the Trainer is told."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"optimizer": ADAMW},
    'AdamW of "auto"': {"optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "weight_decay"), "auto")}},
    "no optimizer": {},
}
WARMUP = {"warmup_min_lr": 0.0, "warmup_max_lr": LR, "warmup_num_steps": 2}
SCHEDULERS: dict[str, dict[str, Any]] = {
    "no scheduler": {},
    "WarmupLR": {"scheduler": {"type": "WarmupLR", "params": WARMUP}},
}
PUBLIC = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
"""What public configs with weights and optimizer on the CPU have in common."""
SHAPES = pairs(precision=PRECISIONS, optimizer=OPTIMIZERS, scheduler=SCHEDULERS)


def case_of(kind: str, stage: int, ranks: int, **more: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": ON_CPU}
    if stage == 3:
        # Else DeepSpeed keeps weights as small as these whole.
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
    case = {**KINDS[kind], **more}
    config = {
        "train_micro_batch_size_per_gpu": BATCH // ranks,
        "gradient_clipping": 0.5,
        "zero_optimization": zero,
        **({} if case.get("optimizer") else {"optimizer": ADAMW}),
        **case.get("config", {}),
    }
    return {**case, "config": config}


def cases_of(ranks: int) -> dict[str, Any]:
    return {
        f"{kind} at {stage}": case_of(kind, stage, ranks)
        for kind, tried_on in TRIED_ON
        for stage in STAGES
        if tried_on == ranks
        if stage == 3 or kind not in OF_STAGE_3
    }


def saving(ranks: int, folder: Path) -> dict[str, Any]:
    """Two that save; the last one does not survive it, at stage 3 on two ranks and at stage 2 on four."""
    order = STAGES if ranks == 2 else STAGES[::-1]
    return {
        f"saved at {stage}": case_of(
            "fp32", stage, ranks, save=str(folder / f"saved on {ranks} at {stage}"), dies=stage == order[-1]
        )
        for stage in order
    }


def resuming(ranks: int, folder: Path) -> dict[str, Any]:
    return {
        f"at {stage} from {source}": case_of("fp32", stage, ranks, load=str(folder / f"saved on {source} at {stage}"))
        for stage in STAGES
        for source in RANKS
    }


def run(
    folder: Path, name: str, script: str, cases: Mapping[str, Any], *, ranks: int, ours: bool = False, status: int = 0
) -> Seen:
    given, out = folder / f"{name}.json", folder / name
    given.write_text(json.dumps(cases))
    if script == "Trainer" and not (folder / "model").exists():
        save = (
            "from tests.support.zftune.integrations.trainers import tiny_model; tiny_model().save_pretrained('model')"
        )
        path = os.pathsep.join([str(upstream_ops.ROOT), os.environ.get("PYTHONPATH", "")])
        fork_server.run(["-c", save], cwd=folder, env={**os.environ, "PYTHONPATH": path}, check=True)
    words: list[str | Path] = ["-m", "tests.support.zftune.integrations.ds_scripts", script, given, out]
    if ours:
        words = ["-c", fork_server.MAIN, "run", "--backend", "zenflow", "--", sys.executable, *words]
    environment = {**os.environ, **upstream_ops.environment(), "ZFTUNE_DB": str(folder / "db"), "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        begun = fork_server.ranks(ranks, words, env=environment, exec_in_place=ours)
        for process in [stack.enter_context(one) for one in begun]:
            assert process.wait(500) == status, process.stdout[-3000:] + process.stderr[-6000:]
    return [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(ranks)]


def run_all(folder: Path, script: str) -> dict[str, Seen]:
    found = {}
    for ranks in RANKS:
        cases = cases_of(ranks)
        found[f"theirs on {ranks}"] = run(folder, f"theirs-{ranks}", script, cases, ranks=ranks)
        ours = fast(cases, all_of={**cases, **saving(ranks, folder)})
        status = fast(0, all_of=-signal.SIGKILL)
        found[f"ours on {ranks}"] = run(folder, f"ours-{ranks}", script, ours, ranks=ranks, ours=True, status=status)
    for ranks in fast((), all_of=RANKS):
        cases = resuming(ranks, folder)
        found[f"resumed on {ranks}"] = run(folder, f"resumed-{ranks}", script, cases, ranks=ranks, ours=True)
    return found


@pytest.fixture(scope="module", params=SCRIPTS)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    """What the ranks saw, by whose run it is and on how many."""
    upstream_ops.need()
    script: str = request.param
    if script == "Trainer":
        pytest.importorskip("transformers", reason="the huggingface extra is not installed")
    return once(tmp_path_factory, f"scripts-{script}", lambda folder: run_all(folder, script))


@pytest.mark.smoke
@pytest.mark.parametrize(("kind", "ranks"), TRIED_ON)
def test_losses_are_those_of_deepspeed(seen: dict[str, Seen], kind: str, ranks: int) -> None:
    """Of each rank, at each step."""
    for stage in STAGES:
        for ours, theirs in zip(seen[f"ours on {ranks}"], seen[f"theirs on {ranks}"], strict=True):
            name = f"{kind} at {stage}"
            if stage == 2 and kind in OF_STAGE_3:
                continue
            assert len(theirs[name]) == STEPS, theirs[name]
            assert ours[name] == pytest.approx(theirs[name], rel=NEAR.get(kind, 1e-4)), name


@pytest.mark.parametrize("source", RANKS)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_run_goes_on_on_any_number_of_ranks(
    seen: dict[str, Seen], stage: int, ranks: int, source: int
) -> None:
    """As if it had not ended: bitwise on as many."""
    for ours, resumed in zip(seen[f"ours on {ranks}"], seen[f"resumed on {ranks}"], strict=True):
        expected = ours[f"fp32 at {stage}"][SAVED_AFTER:]
        found = resumed[f"at {stage} from {source}"]
        assert found == (expected if ranks == source else pytest.approx(expected, rel=1e-4))


def shape(precision: str, optimizer: str, scheduler: str) -> dict[str, Any]:
    config, args = PRECISIONS[precision]
    whole = {**PUBLIC, **config, **OPTIMIZERS[optimizer], **SCHEDULERS[scheduler]}
    return {"config": whole, "args": args, "init": True}


def train_shapes(folder: Path) -> dict[str, Seen]:
    """Each, and what DeepSpeed makes in fp32 of the same training."""
    plain = {
        name: {"config": {**PUBLIC, "optimizer": ADAMW, **scheduler}, "init": True}
        for name, scheduler in SCHEDULERS.items()
    }
    cases = {str(one): shape(*one) for one in SHAPES}
    return {
        "theirs": run(folder, "theirs", "Trainer", plain, ranks=2),
        "ours": run(folder, "ours", "Trainer", cases, ranks=2, ours=True),
    }


@pytest.mark.parametrize("one", SHAPES, ids=", ".join)
def test_public_shapes_train_and_check_says_so(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, one: tuple[str, str, str]
) -> None:
    """Stage 3 with weights and optimizer on the CPU, by the Trainer on two ranks, which "auto" is for."""
    pytest.importorskip("transformers", reason="the huggingface extra is not installed")
    upstream_ops.need()
    seen = once(tmp_path_factory, "scripts-shapes", train_shapes)
    for ours, theirs in zip(seen["ours"], seen["theirs"], strict=True):
        losses = ours[str(one)]
        assert losses == pytest.approx(theirs[one[-1]], rel=1e-2)
        assert min(losses) < 0.9 * losses[0]
    config, told = tmp_path / "ds.json", tmp_path / "check.json"
    config.write_text(json.dumps(shape(*one)["config"]))
    fork_server.zftune("check", config, "--gpus", "2", "--json", told, check=True)
    assert json.loads(told.read_text())["run"]["does"] == "trains"
