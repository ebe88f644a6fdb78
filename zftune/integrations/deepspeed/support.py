"""What the backend zenflow does not do under DeepSpeed, a sentence each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zenflow.config import read_ds_config
from zftune.errors import BadInputError
from zftune.integrations.deepspeed import precision
from zftune.integrations.deepspeed.ds_config import enabled, offload_device, stage_of
from zftune.integrations.deepspeed.facts import SCRAMBLING, TESTED_UPSTREAM
from zftune.integrations.deepspeed.refusal import INSTEAD, Refusal

TAKEN_OVER = ("bf16", "bfloat16", "fp16", "data_types", "optimizer", "zero_optimization", "zftune")
"""Sections that the backend zenflow reads itself: the engine is made without them."""
_WITH = "with the backend zenflow"

_SWITCHES = {
    "amp": 'use "bf16"',
    "hybrid_engine": "leave it out",
    "elasticity": "leave it out",
    "eigenvalue": "leave it out",
    "expert_parallel": "leave it out",
}
_ABOVE_ONE = ("sequence_parallel_size", "pipeline_parallel_size")
_ZERO_FEATURES = ("zero_quantized_gradients", "zero_quantized_weights", "zero_hpz_partition_size", "mics_shard_size")
_NOTHING = (None, False, 0, 1, -1)


def refusals(config: Mapping[str, Any]) -> Iterator[Refusal]:
    """Each setting that the backend zenflow refuses, but for the optimizer, which the script may pass.

    Args:
        config: a ds_config that offloads.
    """
    knobs = (Refusal.of(*fault) for fault in read_ds_config(config)[1])
    told = set()
    for refusal in (
        *_about_zero(config),
        *_about_the_run(config),
        *_about_gradients(config),
        *precision.refusals(config),
        *knobs,
    ):
        if refusal.field not in told:
            told.add(refusal.field)
            yield refusal


def _about_zero(config: Mapping[str, Any]) -> Iterator[Refusal]:
    stage, zero = stage_of(config), config.get("zero_optimization")
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        yield Refusal.of("zero_optimization.stage", stage, f"are 0, 1, 2 and 3 {_WITH}, {INSTEAD}")
    if offload_device(config) == "nvme":
        yield Refusal("zero_optimization.offload_optimizer.device", '"nvme"', f'is "cpu" {_WITH}: use that, {INSTEAD}')
    zero = zero if isinstance(zero, Mapping) else {}
    weights = zero.get("offload_param")
    if isinstance(weights, Mapping) and weights.get("device") == "nvme":
        yield Refusal("zero_optimization.offload_param.device", '"nvme"', f'are "none" and "cpu" {_WITH}, {INSTEAD}')
    for name in _ZERO_FEATURES:
        if zero.get(name) is True or zero.get(name) not in _NOTHING:
            yield Refusal.of(f"zero_optimization.{name}", zero[name], f"is none {_WITH}, {INSTEAD}")


def _about_the_run(config: Mapping[str, Any]) -> Iterator[Refusal]:
    for name, instead in _SWITCHES.items():
        if enabled(config, name):
            yield Refusal(f"{name}.enabled", "True", f"is false {_WITH}: {instead}, {INSTEAD}")
    compiled = config.get("compile")
    if isinstance(compiled, Mapping) and compiled.get("deepcompile"):
        yield Refusal("compile.deepcompile", "True", f"is false: use torch.compile on the model's blocks, {INSTEAD}")
    if config.get("compression_training"):
        yield Refusal("compression_training", "there", f"is none {_WITH}, {INSTEAD}")
    for name in _ABOVE_ONE:
        if config.get(name) not in (None, 1):
            yield Refusal.of(name, config[name], f"is 1 {_WITH}, {INSTEAD}")
    tensor = config.get("tensor_parallel")
    if isinstance(tensor, Mapping) and tensor.get("autotp_size", 0) not in (0, 1):
        yield Refusal.of("tensor_parallel.autotp_size", tensor["autotp_size"], f"is 1 {_WITH}, {INSTEAD}")


def _about_gradients(config: Mapping[str, Any]) -> Iterator[Refusal]:
    if config.get("sparse_gradients"):
        yield Refusal("sparse_gradients", "True", f"is false {_WITH}, {INSTEAD}")
    if config.get("gradient_allreduce_op", "mean") != "mean":
        yield Refusal.of("gradient_allreduce_op", config["gradient_allreduce_op"], f'is "mean", {INSTEAD}')
    if config.get("managed_gradient_accumulation") is False:
        yield Refusal("managed_gradient_accumulation", "False", f"is true {_WITH}, {INSTEAD}")
    autocast = config.get("torch_autocast")
    if (
        isinstance(autocast, Mapping)
        and autocast.get("enabled")
        and "dtype" in autocast
        and autocast["dtype"] != "bfloat16"
    ):
        yield Refusal.of("torch_autocast.dtype", autocast["dtype"], f'is "bfloat16" {_WITH}')
    types = config.get("data_types")
    accumulated = types.get("grad_accum_dtype") if isinstance(types, Mapping) else None
    passes = config.get("gradient_accumulation_steps", 1)
    if accumulated not in (None, _dtype_word(config)) and passes not in (None, 1):
        yield Refusal.of(
            "data_types.grad_accum_dtype",
            accumulated,
            f"is the model's own where the backend zenflow accumulates gradients, {INSTEAD}",
        )


def _dtype_word(config: Mapping[str, Any]) -> str:
    return "bf16" if enabled(config, "bf16", "bfloat16") else "fp16" if enabled(config, "fp16") else "fp32"


def refuse_scrambling(config: Mapping[str, Any], version: str) -> None:
    """Refuse upstream's ZenFlow where it destroys the weights.

    Args:
        config: for upstream.
        version: of DeepSpeed.

    Raises:
        BadInputError: this version does.
    """
    zero = config.get("zero_optimization")
    if version in SCRAMBLING and isinstance(zero, Mapping) and zero.get("zenflow") is not None and zero["stage"] != 3:
        raise BadInputError(
            f'zftune.backend is "deepspeed" with ZenFlow on DeepSpeed {version}, allowed is {TESTED_UPSTREAM[-1]}: '
            f"{version} scrambles every 2-D weight at initialisation; the backend zenflow does not"
        )
