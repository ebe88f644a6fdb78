"""The model's dtype under the backend zenflow, and what a refusal of a setting is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zenflow.late_weights import Untraced, leave_no_trace
from zftune.ds_config.reading import enabled, shown, truth
from zftune.integrations.deepspeed.section import Refusal, require_none
from zftune.text import either, near

SWITCHED = ("bf16", "bfloat16", "fp16")
"""Sections that switch a dtype on."""


@dataclass(frozen=True, slots=True)
class Precision:
    """What a ds_config says of dtypes."""

    dtype: torch.dtype | None
    """Of the weights; None: they stay as they are."""
    loss_scaling: Mapping[str, Any] | None
    """The fields of the "fp16" section, with DeepSpeed's defaults; None: the loss is not scaled."""
    buffers: torch.dtype | None
    """Of floating buffers; None: they stay as they are."""

    @classmethod
    def of(cls, config: Mapping[str, Any], *, scales: bool = True) -> Precision:
        """Read it.

        Args:
            scales: whether the loss is scaled here; else nothing but its being switched on is read of "fp16".

        Raises:
            BadInputError: a field has a value that is not allowed.
        """
        found, wrong = _read(config, scales)
        require_none(wrong)
        return found

    @property
    def word(self) -> str:
        """As the store has it."""
        return str(self.dtype or torch.float32).removeprefix("torch.")

    @property
    def casts_inputs(self) -> bool:
        """Whether floating inputs of the model are cast to its dtype."""
        return self.loss_scaling is not None and self.loss_scaling["auto_cast"] is True

    def cast(
        self, module: nn.Module, kept: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> dict[nn.Parameter, torch.Tensor]:
        """Cast a model in place.

        Args:
            kept: what of a trained parameter's fp32 values is to be returned; None: all.

        Returns:
            What the trained parameters held in fp32, on the CPU where that takes no more memory of a GPU.
        """
        masters: dict[nn.Parameter, torch.Tensor] = {}
        for parameter in module.parameters() if self.dtype is not None else ():
            if parameter.is_floating_point() and parameter.dtype != self.dtype:
                whole = parameter.data
                parameter.data = whole.to(self.dtype)
                if parameter.requires_grad and whole.dtype == torch.float32:
                    masters[parameter] = whole.cpu() if kept is None else kept(whole).to("cpu", copy=True)
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


def refusals(config: Mapping[str, Any], *, scales: bool = True) -> list[Refusal]:
    """Each setting that `Precision.of` refuses, which takes the same."""
    return _read(config, scales)[1]


def _read(config: Mapping[str, Any], scales: bool) -> tuple[Precision, list[Refusal]]:
    sections = {name: config.get(name) for name in SWITCHED}
    wrong = [
        Refusal(name, shown(section), f'a JSON object, such as {{"enabled": {"true" if truth(section) else "false"}}}')
        for name, section in sections.items()
        if not (section is None or isinstance(section, Mapping))
    ]
    bf16, fp16 = enabled(config, "bf16", "bfloat16"), enabled(config, "fp16")
    if bf16 and fp16:
        wrong.append(Refusal("fp16.enabled", "True", "false where bf16.enabled is true"))
    section = config.get("fp16")
    scaling = _scaling(section, wrong) if fp16 and scales and isinstance(section, Mapping) else None
    types = config.get("data_types")
    buffers = types.get("buffer_dtype") if isinstance(types, Mapping) else None
    if buffers is not None and buffers not in list(_DTYPES):
        wrong.append(
            Refusal.of("data_types.buffer_dtype", buffers, f"{either(list(_DTYPES))}{near(buffers, list(_DTYPES))}")
        )
        buffers = None
    dtype = torch.bfloat16 if bf16 else torch.float16 if fp16 else None
    return Precision(dtype, scaling, None if buffers is None else _DTYPES[buffers]), wrong


def dtype_named(word: Any) -> torch.dtype | None:
    """What DeepSpeed means by a word; None: nothing, or what it does not know."""
    return _DTYPES.get(word) if isinstance(word, str) else None


def cast_inputs(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating tensors that a model is called with, as `fp16.auto_cast` has it."""

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

    module.register_forward_pre_hook(Untraced(before), with_kwargs=True)
    leave_no_trace(module._forward_pre_hooks)


def loss_scaler(fields: Mapping[str, Any]) -> Any:
    """DeepSpeed's own loss scaler, as it makes it from the "fp16" section."""
    from deepspeed.runtime.fp16 import loss_scaler as upstream

    dynamic = fields["loss_scale"] == 0
    arguments = {
        upstream.INITIAL_LOSS_SCALE: math.pow(2, fields["initial_scale_power"]),
        upstream.SCALE_WINDOW: fields["loss_scale_window"],
        upstream.DELAYED_SHIFT: fields["hysteresis"],
        upstream.CONSECUTIVE_HYSTERESIS: fields["consecutive_hysteresis"],
        upstream.MIN_LOSS_SCALE: fields["min_loss_scale"],
    }
    return upstream.CreateLossScaler(torch.half, fields["loss_scale"], dynamic, arguments if dynamic else None)


_FP16: dict[str, bool | int] = {
    "enabled": False,
    "auto_cast": False,
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "consecutive_hysteresis": False,
    "min_loss_scale": 1,
    "fp16_master_weights_and_grads": False,
}
"""What DeepSpeed takes where the "fp16" section leaves it out, or says "auto"."""
_POWERS = 127
"""Of 2, either way, that fp32 has numbers for: in it the loss is multiplied."""


def _scaling(section: Mapping[str, Any], wrong: list[Refusal]) -> dict[str, Any]:
    """The fields of a section that is switched on, as DeepSpeed reads them: numbers may be words."""
    said = {name: value for name, value in section.items() if value != "auto"}  # DeepSpeed drops the word
    dynamic = _number(said.get("loss_scale", 0)) == 0
    found: dict[str, Any] = dict(_FP16)
    read: float | bool | None
    for name, value in said.items():
        if name not in _FP16:
            read, allowed = None, f"left out: the fields are {', '.join(_FP16)}"
        elif isinstance(_FP16[name], bool):
            read, allowed = truth(value), "true or false"
        elif name == "loss_scale":
            read, allowed = _number(value, 0), "a number >= 0"
        elif name == "initial_scale_power":
            read, allowed = _whole(value, -_POWERS, _POWERS), f"an integer from -{_POWERS} to {_POWERS}"
        elif dynamic and name in ("loss_scale_window", "min_loss_scale"):
            read, allowed = _whole(value, 1), "an integer >= 1"
        else:
            read, allowed = _whole(value), "an integer"
        found[name] = read
        if read is None:
            wrong.append(Refusal.of(f"fp16.{name}", value, allowed))
    return found


def _number(value: Any, least: float = -math.inf, most: float = math.inf) -> float | None:
    """A finite number within limits; None: it is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) and least <= number <= most else None


def _whole(value: Any, least: float = -math.inf, most: float = math.inf) -> int | None:
    number = _number(value, least, most)
    return None if number is None or not number.is_integer() else int(number)
