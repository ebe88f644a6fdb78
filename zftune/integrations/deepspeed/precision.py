"""The model's dtype under the backend zenflow: weights are cast, their fp32 values become the masters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zftune.errors import BadInputError
from zftune.integrations.deepspeed.reading import enabled


@dataclass(frozen=True, slots=True)
class Precision:
    """What a ds_config says of dtypes."""

    dtype: torch.dtype | None
    """Of the weights; None: they stay as they are."""
    loss_scaling: Mapping[str, Any] | None
    """The "fp16" section; None: the loss is not scaled."""
    buffers: torch.dtype | None
    """Of floating buffers; None: they stay as they are."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Precision:
        """Read it.

        Raises:
            BadInputError: a field has a value that is not allowed.
        """
        bf16, fp16 = enabled(config, "bf16", "bfloat16"), enabled(config, "fp16")
        if bf16 and fp16:
            raise BadInputError("bf16.enabled and fp16.enabled are both true, allowed is one of them")
        section = config.get("fp16")
        types = config.get("data_types")
        buffers = types.get("buffer_dtype") if isinstance(types, Mapping) else None
        if buffers is not None and buffers not in _DTYPES:
            raise BadInputError(f"data_types.buffer_dtype is {buffers!r}, allowed are {', '.join(_DTYPES)}")
        return cls(
            torch.bfloat16 if bf16 else torch.float16 if fp16 else None,
            dict(section) if fp16 and isinstance(section, Mapping) else None,
            None if buffers is None else _DTYPES[buffers],
        )

    @property
    def word(self) -> str:
        """As the store has it."""
        return str(self.dtype or torch.float32).removeprefix("torch.")

    @property
    def casts_inputs(self) -> bool:
        """Whether floating inputs of the model are cast to its dtype."""
        return self.loss_scaling is not None and self.loss_scaling.get("auto_cast") is True

    def cast(self, module: nn.Module) -> dict[nn.Parameter, torch.Tensor]:
        """Cast a model in place.

        Args:
            module: its parameters stay the same objects.

        Returns:
            What the trained parameters held in fp32, on the CPU where that takes no more memory of a GPU.
        """
        masters: dict[nn.Parameter, torch.Tensor] = {}
        for parameter in module.parameters() if self.dtype is not None else ():
            if parameter.is_floating_point() and parameter.dtype != self.dtype:
                whole = parameter.data
                parameter.data = whole.to(self.dtype)
                if parameter.requires_grad and whole.dtype == torch.float32:
                    masters[parameter] = whole.cpu()
        for buffer in module.buffers() if self.buffers is not None else ():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(self.buffers)
        return masters


_DTYPES = {
    name: dtype
    for dtype, names in {
        torch.float32: ("fp32", "float32", "float"),
        torch.bfloat16: ("bf16", "bfloat16"),
        torch.float16: ("fp16", "float16", "half"),
    }.items()
    for name in names
}


def cast_inputs(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating tensors that a model is called with, as `fp16.auto_cast` has it.

    Args:
        module: the model.
        dtype: its weights'.
    """

    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(dtype) if value.is_floating_point() else value
        if isinstance(value, Mapping):
            return {key: cast(one) for key, one in value.items()}
        if type(value) in (list, tuple):
            return type(value)(cast(one) for one in value)
        return value

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return cast(args), cast(kwargs)

    module.register_forward_pre_hook(before, with_kwargs=True)


def loss_scaler(section: Mapping[str, Any]) -> Any:
    """DeepSpeed's own loss scaler, as it makes it from the "fp16" section.

    Args:
        section: of the ds_config.

    Raises:
        BadInputError: a field has a value that is not allowed.
    """
    from deepspeed.runtime.fp16 import loss_scaler as upstream

    fields = _fields(section)
    dynamic = fields["loss_scale"] == 0
    arguments = {
        upstream.INITIAL_LOSS_SCALE: math.pow(2, fields["initial_scale_power"]),
        upstream.SCALE_WINDOW: fields["loss_scale_window"],
        upstream.DELAYED_SHIFT: fields["hysteresis"],
        upstream.CONSECUTIVE_HYSTERESIS: fields["consecutive_hysteresis"],
        upstream.MIN_LOSS_SCALE: fields["min_loss_scale"],
    }
    return upstream.CreateLossScaler(torch.half, fields["loss_scale"], dynamic, arguments if dynamic else None)


_SCALING = {
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "consecutive_hysteresis": False,
    "min_loss_scale": 1,
}
"""What DeepSpeed takes where the "fp16" section leaves it out."""


def _fields(section: Mapping[str, Any]) -> dict[str, Any]:
    try:
        from deepspeed.runtime.precision_config import DeepSpeedFP16Config
    except ImportError:  # before 0.18, which checks nothing
        return {name: section.get(name, value) for name, value in _SCALING.items()}
    try:
        fields = DeepSpeedFP16Config(**section)
    except ValueError as error:
        raise BadInputError(f"fp16 is {dict(section)!r}, allowed is what DeepSpeed takes: {error}") from error
    return {name: getattr(fields, name) for name in _SCALING}
