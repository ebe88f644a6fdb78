"""DeepSpeed's own ZeRO, in processes of its own: trains, saves, goes on, and its engine from what we made of it.

python -m tests.support.zftune.checkpoint.upstream FOLDER RANK RANKS PORT
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from tests.support.tiers import fast
from tests.support.upstream_ops import ROOT, allow_fp16, environment
from tests.support.zftune.checkpoint.tiny import BETAS, EPS, LR, Tiny, groups_of, loss_of

FIRST, MORE = range(3), range(3, 6)

CASES: dict[str, dict[str, Any]] = {
    "zero1_bf16": {"stage": 1, "dtype": "bf16"},
    "zero2_bf16": {"stage": 2, "dtype": "bf16"},
    "zero2_fp32": {"stage": 2, "dtype": "fp32"},
    "zero2_fp16": {"stage": 2, "dtype": "fp16"},
    "zero1_client": {"stage": 1, "dtype": "bf16", "client": True},
    "zero2_robin": {"stage": 2, "dtype": "bf16", "round_robin_gradients": True},
    "zenflow": {
        "stage": 2,
        "dtype": "bf16",
        "zenflow": {"topk_ratio": 0.3, "update_interval": 2, "select_interval": 4, "select_strategy": "step"},
    },
}
CASES_OF = fast(
    {1: ["zero1_bf16", "zero2_bf16"], 2: ["zero2_bf16"]},
    all_of={1: [name for name in CASES if name != "zero2_robin"], 2: ["zero2_bf16", "zero2_robin"]},
)
"""By the number of ranks."""
BACK = fast(("zero2_bf16",), all_of=("zero2_bf16", "zero2_fp32", "zero1_client"))
"""Those that go on, and whose import DeepSpeed's engine goes on with."""


def start(folder: Path) -> None:
    """Run all cases; those of n ranks leave NAME.pt beside their checkpoint NAME in a folder called n."""
    from tests.support import fork_server

    words: list[str | Path] = ["-m", "tests.support.zftune.checkpoint.upstream", folder]
    done = fork_server.run(words, cwd=ROOT, env={**os.environ, **environment(), "OMP_NUM_THREADS": "1"}, timeout=250)
    if done.returncode:
        raise RuntimeError(done.stdout[-3000:] + done.stderr[-3000:])


def _config(
    stage: int, dtype: str, *, client: bool = False, zenflow: dict[str, Any] | None = None, **zero: Any
) -> dict[str, Any]:
    document: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 24,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, **zero},
    }
    if client:
        document["zero_allow_untested_optimizer"] = True
    else:
        document["optimizer"] = {"type": "AdamW", "params": {"lr": LR, "betas": list(BETAS), "eps": EPS}}
        document["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    if zenflow is not None:
        document["zero_optimization"]["zenflow"] = zenflow
    if dtype != "fp32":
        document[dtype] = {"enabled": True}
    if dtype == "fp16":
        document["fp16"]["initial_scale_power"] = 8
    return document


def _engine(case: dict[str, Any], *, seed: int = 0) -> Any:
    import deepspeed

    model = Tiny(seed)
    groups = groups_of(model)
    client = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS) if case.get("client") else None
    given = {"optimizer": client} if client is not None else {"model_parameters": groups}
    return deepspeed.initialize(model=model, config=_config(**case), **given)[0]


def _train(engine: Any, steps: range, rank: int) -> list[dict[str, torch.Tensor]]:
    seen = []
    for step in steps:
        engine.backward(loss_of(engine, step, rank))
        engine.step()
        seen.append({n: p.detach().clone() for n, p in engine.module.named_parameters() if p.requires_grad})
    return seen


def _state(engine: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Masters and moments by DeepSpeed's own account of them."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    engine.optimizer._hp_optimizer_states_linked = False  # done after the first group's step, it misses the second's
    engine.optimizer._lazy_init_hp_params_optimizer_state()
    return {
        name: {
            "master": safe_get_full_fp32_param(p).clone(),
            **{key: safe_get_full_optimizer_state(p, key).clone() for key in ("exp_avg", "exp_avg_sq")},
        }
        for name, p in engine.module.named_parameters()
        if p.requires_grad
    }


def _run(name: str, folder: Path, rank: int, ranks: int) -> None:
    case = CASES[name]
    found: dict[str, Any] = {}
    engine = _engine(case)
    _train(engine, FIRST, rank)
    if "zenflow" not in case:
        found["state"] = _state(engine)
    engine.save_checkpoint(str(folder / name))
    if name in BACK:
        found["weights"] = _train(engine, MORE, rank)
    if name in BACK and ranks == 1:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        from zftune.checkpoint.converting import import_checkpoint

        import_checkpoint(str(folder / name), str(folder / f"{name}_ours"))
        found["fp32"] = dict(get_fp32_state_dict_from_zero_checkpoint(str(folder / f"{name}_ours")))
        found["under_engine"] = _under_engine(folder, name)
    if rank == 0:
        torch.save(found, folder / f"{name}.pt")


def _under_engine(folder: Path, name: str) -> list[dict[str, torch.Tensor]]:
    """Ours, loaded by DeepSpeed's engine at stage 0, and gone on with by it."""
    import deepspeed

    import zenflow

    model = Tiny(2)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, {"bf16": "bfloat16"}.get(CASES[name]["dtype"], "float32")))
    knobs = zenflow.ZenFlowConfig(topk_ratio=0.3, update_interval=1, overlap_step=False)
    optimizer = zenflow.ZenFlowAdamW(groups_of(model), config=knobs)
    document = {"train_micro_batch_size_per_gpu": 24, "gradient_clipping": 0.0}
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=document)[0]
    engine.enable_backward_allreduce = False  # gradients have left for the host by then
    engine.load_checkpoint(str(folder / f"{name}_ours"))
    assert engine.global_steps == len(FIRST)
    weights = _train(engine, MORE, 0)
    optimizer.close()
    return weights


def main(folder: Path) -> None:
    """All ranks are forks of one process, which has imported what takes seconds."""
    import deepspeed  # noqa: F401

    forks = multiprocessing.get_context("fork")
    for ranks in CASES_OF:
        (folder / str(ranks)).mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children = [
            forks.Process(target=_rank, args=(folder / str(ranks), rank, ranks, port), daemon=True)
            for rank in range(ranks)
        ]
        for child in children:
            child.start()
        for child in children:
            child.join(100)
            if child.exitcode != 0:
                sys.exit(f"rank {children.index(child)} of {ranks} ended with {child.exitcode}")


def _rank(folder: Path, rank: int, ranks: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    allow_fp16()
    for name in CASES_OF[ranks]:
        _run(name, folder, rank, ranks)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
