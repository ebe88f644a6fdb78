"""What scripts do with the weights of ZeRO stages 1 and 2, which every rank has whole, between two steps."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn


def read_alone(engine: Any, model: nn.Module, x: torch.Tensor, folder: Path) -> dict[str, Any]:
    """On one rank, while the others are elsewhere."""
    model.eval()
    with torch.no_grad():
        output = model(x).clone()
    model.train()
    engine.save_16bit_model(str(folder), "alone.bin")
    return {
        "model": {name: value.clone() for name, value in model.state_dict().items()},
        "data": {name: parameter.data.clone() for name, parameter in model.named_parameters()},
        "part": {f"inner.{name}": one.clone() for name, one in model.get_submodule("inner").state_dict().items()},
        "copied": copy.deepcopy(model).state_dict(),
        "file": torch.load(folder / "alone.bin", weights_only=True),
        "output": output,
        "part's output": model.get_submodule("inner")(x).detach(),
        "kinds": sorted({type(value).__name__ for value in model.parameters()}),
    }


def gradients(engine: Any, model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of a batch that is given up, by DeepSpeed's accessor."""
    from deepspeed.utils import safe_get_full_grad

    engine.backward((engine(x) - x).square().mean())
    found = {name: safe_get_full_grad(model.get_parameter(name)) for name in ("outer.weight", "inner.bias", "scale")}
    found = {name: value.detach().clone() for name, value in found.items()}
    engine.zero_grad()
    return found


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    from deepspeed import utils

    parameter = model.get_parameter("outer.weight")
    found = {
        "master": utils.safe_get_full_fp32_param(parameter),
        "exp_avg": utils.safe_get_full_optimizer_state(parameter, "exp_avg"),
    }
    utils.safe_set_full_optimizer_state(parameter, found["exp_avg"] / 2, "exp_avg")
    utils.safe_set_full_fp32_param(parameter, found["master"] * 1.5)
    return found | {
        "set": utils.safe_get_full_optimizer_state(parameter, "exp_avg"),
        "shown": parameter.detach().clone(),
    }


def write(model: nn.Module) -> None:
    """By each way that writes to whole weights; on all ranks alike."""
    inner: Any = model.get_submodule("inner")
    inner.bias.data.copy_(torch.linspace(-0.5, 0.5, 13))
    with torch.no_grad():
        inner.weight.clamp_(-0.1, 0.1)
    norm = model.get_submodule("norm")
    norm.load_state_dict({name: value * 0.5 for name, value in norm.state_dict().items()})
    average = {name: parameter.data * 0.9 for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():  # an average is swapped in and stays
        average[name], parameter.data = parameter.data, average[name]


def visited(engine: Any, model: nn.Module, x: torch.Tensor, folder: Path) -> dict[str, Any]:
    alone = read_alone(engine, model, x, folder) if torch.distributed.get_rank() == 0 else {}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    found = {"alone": alone, "weights": weights, "gradients": gradients(engine, model, x), "state": state(model)}
    write(model)
    return found | {"written": {name: value.clone() for name, value in model.state_dict().items()}}
