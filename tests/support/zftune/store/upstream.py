"""Trains a small model with stock DeepSpeed: `python upstream.py ds_config.json ..` prints the losses under each."""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

STEPS = 24


def train(path: str) -> dict[str, Any]:
    import deepspeed
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8)).bfloat16()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=path)
    inputs = torch.randn(32, 16).bfloat16()
    wanted = inputs.float()[:, :8] + 1
    losses = []
    for _ in range(STEPS):
        loss = torch.nn.functional.mse_loss(engine(inputs).float(), wanted)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    finite = all(bool(torch.isfinite(parameter).all()) for parameter in engine.module.parameters())
    worker = getattr(engine.optimizer, "process", None)  # DeepSpeed leaves it behind
    if worker is not None:
        worker.terminate()
    interval = getattr(engine, "update_interval", None)
    return {"losses": losses, "finite": finite, "interval": interval, "overlapped": worker is not None}


def main(paths: list[str]) -> None:
    import torch

    torch.set_num_threads(1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    told = [train(path) for path in paths]
    sys.stdout.write("\n" + json.dumps(told) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
