"""What the backend zenflow does not do under DeepSpeed, a sentence each; and the versions it was tested with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zftune.errors import BadInputError
from zftune.integrations.deepspeed.reading import enabled, offload_device, stage_of

TESTED = ("0.19.6", "0.19.7", "0.19.8")
"""Versions of DeepSpeed that the backend zenflow was tested with."""
TESTED_UPSTREAM = ("0.19.6",)
"""Versions whose own ZenFlow and Twin-Flow were."""
SCRAMBLING = ("0.19.7", "0.19.8")
"""Versions that scramble every 2-D weight at initialisation, under ZenFlow at ZeRO stages 1 and 2."""
INSTEAD = 'or "zftune": {"backend": "deepspeed"}'

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


def require_supported(config: Mapping[str, Any]) -> None:
    """Refuse what the backend zenflow does not do.

    Args:
        config: a ds_config that offloads.

    Raises:
        BadInputError: one sentence with the field, its value, and what to use instead.
    """
    for sentence in refusals(config):
        raise BadInputError(sentence)


def refusals(config: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each setting that the backend zenflow does not do.

    Args:
        config: a ds_config that offloads.
    """
    stage, device = stage_of(config), offload_device(config)
    if stage not in (0, 1, 2) or isinstance(stage, bool):
        yield (
            f"zero_optimization.stage is {stage!r}, allowed are 0, 1 and 2 with the backend zenflow, which keeps all "
            f"weights on each GPU: use stage 2, {INSTEAD}"
        )
    if device == "nvme":
        yield (
            'zero_optimization.offload_optimizer.device is "nvme", allowed is "cpu" with the backend zenflow: '
            f"use that, {INSTEAD}"
        )
    zero = config.get("zero_optimization")
    zero = zero if isinstance(zero, Mapping) else {}
    for name in _ZERO_FEATURES:
        if zero.get(name) is True or zero.get(name) not in _NOTHING:
            yield f"zero_optimization.{name} is {zero[name]!r}, allowed is none with the backend zenflow, {INSTEAD}"
    for name, instead in _SWITCHES.items():
        if enabled(config, name):
            yield f"{name}.enabled is True, allowed is false with the backend zenflow: {instead}, {INSTEAD}"
    compiled = config.get("compile")
    if isinstance(compiled, Mapping) and compiled.get("deepcompile"):
        yield f"compile.deepcompile is True, allowed is false: use torch.compile on the model's blocks, {INSTEAD}"
    if config.get("compression_training"):
        yield f"compression_training is there, allowed is none with the backend zenflow, {INSTEAD}"
    for name in _ABOVE_ONE:
        if config.get(name) not in (None, 1):
            yield f"{name} is {config[name]!r}, allowed is 1 with the backend zenflow, {INSTEAD}"
    tensor = config.get("tensor_parallel")
    if isinstance(tensor, Mapping) and tensor.get("autotp_size", 0) not in (0, 1):
        yield (
            f"tensor_parallel.autotp_size is {tensor['autotp_size']!r}, allowed is 1 with the backend zenflow, "
            f"{INSTEAD}"
        )
    yield from _about_gradients(config)


def _about_gradients(config: Mapping[str, Any]) -> Iterator[str]:
    if config.get("sparse_gradients"):
        yield f"sparse_gradients is True, allowed is false with the backend zenflow, {INSTEAD}"
    if config.get("gradient_allreduce_op", "mean") != "mean":
        yield f'gradient_allreduce_op is {config["gradient_allreduce_op"]!r}, allowed is "mean", {INSTEAD}'
    if config.get("managed_gradient_accumulation") is False:
        yield f"managed_gradient_accumulation is False, allowed is true with the backend zenflow, {INSTEAD}"
    autocast = config.get("torch_autocast")
    if (
        isinstance(autocast, Mapping)
        and autocast.get("enabled")
        and "dtype" in autocast
        and autocast["dtype"] != "bfloat16"
    ):
        yield f'torch_autocast.dtype is {autocast["dtype"]!r}, allowed is "bfloat16" with the backend zenflow'
    types = config.get("data_types")
    accumulated = types.get("grad_accum_dtype") if isinstance(types, Mapping) else None
    passes = config.get("gradient_accumulation_steps", 1)
    if accumulated not in (None, _dtype_word(config)) and passes not in (None, 1):
        yield (
            f"data_types.grad_accum_dtype is {accumulated!r}, allowed is the model's own where the backend zenflow "
            f"accumulates gradients, {INSTEAD}"
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
