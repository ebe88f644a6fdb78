"""A small training with real DeepSpeed that does everything that a trial must keep it from doing."""

from __future__ import annotations

import json
import os
import socket
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests import upstream_ops

SCRIPT = textwrap.dedent('''
    """Train, save, and note down in `outputs/` what the engine ran with."""

    import argparse, json, os, sys, time
    from pathlib import Path

    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    WIDTH = 64


    def main():
        parser = argparse.ArgumentParser()
        parser.add_argument("--local_rank", type=int, default=int(os.environ["LOCAL_RANK"]))
        parser.add_argument("--deepspeed_config")
        parser.add_argument("--notes")
        parser.add_argument("--steps", type=int, default=400)
        args = parser.parse_args()
        import deepspeed

        torch.manual_seed(0)
        torch.set_num_threads(1)
        data = torch.tensor(json.loads(Path("data/tokens.json").read_text()))
        model = nn.Sequential(nn.Embedding(50, WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 50))
        engine, *_ = deepspeed.initialize(
            args=args, model=model, model_parameters=model.parameters(), dist_init_required=True
        )
        zenflow = engine.zenflow_config()
        Path("outputs").mkdir(exist_ok=True)
        Path("outputs/log.txt").write_text("changed")
        with open(args.notes, "a") as notes:
            notes.write(json.dumps({
                "cwd": os.getcwd(), "pid": os.getpid(), "rank": engine.global_rank,
                "wandb": os.environ.get("WANDB_MODE"), "key": "WANDB_API_KEY" in os.environ,
                "zenflow": None if zenflow is None else zenflow.model_dump(),
            }, default=str) + "\\n")
        sleeps = json.loads(os.environ.get("TEST_SLEEPS", "{}"))
        interval = "none" if zenflow is None else str(zenflow.update_interval)
        step = 0
        loader = DataLoader(TensorDataset(data), batch_size=4)
        while step < args.steps:
            for (ids,) in loader:
                logits = engine(ids[:, :-1]).float()
                loss = nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:])
                if interval == os.environ.get("TEST_CRASHES"):
                    raise RuntimeError("these knobs do not work")
                if interval == os.environ.get("TEST_NAN"):
                    loss = loss * float("nan")
                engine.backward(loss)
                time.sleep(sleeps.get(interval, 0))
                engine.step()
                step += 1
                if step % 5 == 0:
                    engine.save_checkpoint("outputs/checkpoint")
                    engine.save_16bit_model("outputs/model")


    if __name__ == "__main__":
        main()
''')

ZENFLOW = {
    "topk_ratio": 0.1,
    "select_strategy": "step",
    "select_interval": 8,
    "update_interval": 2,
    "overlap_step": False,
    "full_warm_up_rounds": 0,
}


def ds_config(zenflow: Mapping[str, Any] | None = ZENFLOW) -> dict[str, Any]:
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0}},
        "bf16": {"enabled": True},
        "zero_optimization": {**offload, **({} if zenflow is None else {"zenflow": dict(zenflow)})},
    }


def project(folder: Path, config: Mapping[str, Any]) -> Path:
    """A working directory with a script, its data, its configuration and earlier outputs."""
    (folder / "data").mkdir(parents=True)
    (folder / "outputs").mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "ds.json").write_text(json.dumps(config))
    tokens = [[(7 * row + 3 * column) % 50 for column in range(17)] for row in range(64)]
    (folder / "data" / "tokens.json").write_text(json.dumps(tokens))
    (folder / "outputs" / "log.txt").write_text("of an earlier run")
    return folder


def content(folder: Path) -> dict[str, bytes]:
    """All files with what they hold."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def environment(**more: str) -> dict[str, str]:
    """For a process that starts such a training; one rank where no launcher says otherwise."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    base = {name: value for name, value in os.environ.items() if not name.startswith("ZFTUNE_")}
    ranks = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    return {**base, **upstream_ops.environment(), **ranks, "OMP_NUM_THREADS": "1", "WANDB_API_KEY": "secret", **more}


def notes(path: Path) -> list[dict[str, Any]]:
    """What the trainings noted down, one line a rank and run."""
    return [json.loads(line) for line in path.read_text().splitlines()]
