"""What the three cases about checkpoints share: train, save, go on elsewhere."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor

from defects.case import matrix, random
from defects.peers import Ours
from defects.upstream import Upstream

SAVED_AFTER = 6


def trained(document: dict[str, object], steps: list[list[Tensor]]) -> Upstream:
    """An engine after the steps that come before the checkpoint."""
    run = Upstream([matrix().to(dtype_of(document))], document)
    run.run(steps[:SAVED_AFTER])
    return run


def dtype_of(document: dict[str, object]) -> torch.dtype:
    """The weights' dtype that a configuration asks for."""
    return torch.bfloat16 if "bf16" in document else torch.float32


def reloaded(document: dict[str, object], steps: list[list[Tensor]]) -> tuple[Upstream, Tensor]:
    """A new engine that has loaded the checkpoint, as a new process would, and the weights that were saved."""
    with tempfile.TemporaryDirectory() as folder:
        run = trained(document, steps)
        run.engine.save_checkpoint(folder)
        saved = run.weights()[0]
        again = Upstream([torch.zeros_like(matrix()).to(dtype_of(document))], document)
        again.engine.load_checkpoint(folder)
    return again, saved


def reloaded_by_us(document: dict[str, object], steps: list[list[Tensor]]) -> tuple[Ours, Tensor]:
    """The same with this runtime, in the middle of a window, with nothing flushed."""
    run = Ours([matrix().to(dtype_of(document))], document)
    for gradients in steps[:SAVED_AFTER]:
        run.step(gradients)
    again = Ours([torch.zeros_like(matrix()).to(dtype_of(document))], document)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        torch.save({"model": [p.detach() for p in run.parameters], "optimizer": run.optimizer.state_dict()}, path)
        checkpoint = torch.load(path, weights_only=True)
    with torch.no_grad():
        for parameter, weight in zip(again.parameters, checkpoint["model"], strict=True):
            parameter.copy_(weight)
    again.optimizer.load_state_dict(checkpoint["optimizer"])
    saved = run.weights()[0]
    run.optimizer.abandon()
    return again, saved


def exported(document: dict[str, object]) -> tuple[Tensor, Tensor]:
    """The weights after some steps, and what DeepSpeed's zero_to_fp32 makes of the checkpoint."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        run = trained(document, random(SAVED_AFTER))
        run.engine.save_checkpoint(folder)
        found = get_fp32_state_dict_from_zero_checkpoint(folder)
    return run.weights()[0], found["weights.0"].float()


def exported_by_us(document: dict[str, object]) -> tuple[Tensor, Tensor]:
    """The same with this runtime: flush, then the model's own state_dict."""
    run = Ours([matrix().to(dtype_of(document))], document)
    run.run(random(SAVED_AFTER))
    with tempfile.TemporaryDirectory() as folder:
        torch.save(dict(enumerate(run.parameters)), Path(folder) / "model.pt")
        found = torch.load(Path(folder) / "model.pt", weights_only=True)[0].detach().float()
    run.end()
    return run.weights()[0], found
