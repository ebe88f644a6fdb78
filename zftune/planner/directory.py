"""The facts of a module, and of a model directory: its configuration, built on the meta device."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zenflow.layout import conv1d_weights
from zftune.errors import BadInputError
from zftune.planner.facts import ModelFacts


def facts_of_directory(directory: Path, dtype: str) -> ModelFacts:
    """Build the model without any memory and read its shapes.

    Args:
        directory: as `save_pretrained` writes it; only config.json is read.
        dtype: of its parameters when it trains.

    Raises:
        BadInputError: there is no configuration of a causal language model that can be built.
    """
    if not os.path.isfile(directory / "config.json"):  # noqa: PTH113 - Path.is_file() raises where a name is too long
        raise BadInputError(f"--model '{directory}': allowed is a directory that holds a config.json")
    return facts_of_module(directory.resolve().name, _meta_module(directory), dtype)


def facts_of_module(name: str, module: nn.Module, dtype: str) -> ModelFacts:
    """Read a module's shapes; only those of parameters that require a gradient are trained.

    Args:
        name: what to call it.
        module: on any device, the meta device too.
        dtype: of its parameters when it trains.

    Raises:
        BadInputError: nothing of it is trained.
    """
    layers = _layers(module)
    parameters = [(each, p) for each, p in module.named_parameters() if p.numel()]
    trainable = [(each, p) for each, p in parameters if p.requires_grad]
    if not trainable:
        raise BadInputError(f"--model '{name}': none of its parameters requires a gradient, allowed is at least one")
    config: Any = getattr(module, "config", None)
    columns_first = conv1d_weights(module)
    names = [each for each, _ in trainable]
    return ModelFacts(
        name=name,
        parameters=sum(p.numel() for _, p in parameters),
        trainable=sum(p.numel() for _, p in trainable),
        layers=layers[1],
        hidden=_number(config, "hidden_size", "n_embd", "d_model")
        or max((p.shape[-1] for _, p in trainable if p.dim()), default=1),
        weights=tuple(tuple(p.shape) for _, p in trainable),
        dtype=dtype,
        stages=_stages(names, layers),
        before_layers=_before(names, layers),
        transposed=frozenset(number for number, (_, p) in enumerate(trainable) if id(p) in columns_first),
        heads=_number(config, "num_attention_heads", "n_head") or 1,
        intermediate=_number(config, "intermediate_size", "ffn_dim", "n_inner") or 0,
        vocabulary=_number(config, "vocab_size") or 0,
        key_value_width=_key_value_width(config),
    )


def _meta_module(directory: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # whatever a configuration makes transformers raise is the directory's fault
        line = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise BadInputError(
            f"--model '{directory}': cannot be built ({line}), "
            "allowed is a directory with the config.json of a causal language model"
        ) from error


def _layers(module: nn.Module) -> tuple[str, int]:
    """Name and length of the list of layers with the most parameters."""
    found = [
        (sum(p.numel() for p in part.parameters()), name, len(part))
        for name, part in module.named_modules()
        if isinstance(part, nn.ModuleList) and len(part)
    ]
    _, name, length = max(found, default=(0, "", 1))
    return name, length


def _stages(names: list[str], layers: tuple[str, int]) -> tuple[int, ...]:
    """Of each parameter: its layer's number; what is registered behind the layers comes after all of them."""
    prefix, count = f"{layers[0]}.", layers[1]
    stages, passed = [], False
    for name in names:
        if layers[0] and name.startswith(prefix):
            passed = True
            stages.append(int(name[len(prefix) :].partition(".")[0]))
        else:
            stages.append(count if passed else 0)
    return tuple(stages)


def _before(names: list[str], layers: tuple[str, int]) -> int:
    """How many parameters are registered before all layers."""
    inside = (number for number, name in enumerate(names) if name.startswith(f"{layers[0]}."))
    return next(inside, 0) if layers[0] else 0


def _number(config: Any, *names: str) -> int | None:
    """The first of these that is an integer > 0."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _key_value_width(config: Any) -> int:
    heads = _number(config, "num_attention_heads", "n_head")
    few, hidden = _number(config, "num_key_value_heads"), _number(config, "hidden_size", "n_embd")
    return math.ceil(hidden / heads) * few if heads and few and hidden else 0
