"""DeepSpeed's accessors (`deepspeed.utils.safe_get_full_fp32_param` and so on), where the runtime has the state.

From 0.16 on they ask a parameter for the attributes that ZeRO stages 1 and 2 set: `_hp_mapping`, and four methods. The
accessors of ZeRO-3's local parts ask for `ds_id`, which stays away: they refuse as they do at stages 1 and 2.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from zenflow.full_state import MASTER
from zenflow.optimizer import ZenFlowOptimizer

_NO_GRADIENT = "Gradients are only available immediately after backward and before engine step"  # DeepSpeed's sentence


def link(optimizer: ZenFlowOptimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Let DeepSpeed's accessors find parameters' state.

    Args:
        optimizer: has it; is not kept alive.
        parameters: of the optimizer.
    """
    for parameter in parameters:
        for name, kind in _ATTRIBUTES.items():
            setattr(parameter, name, kind(optimizer, parameter))


def unlink(optimizer: ZenFlowOptimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Undo it, unless another optimizer has the parameters by now.

    Args:
        optimizer: whose links they were.
        parameters: of the optimizer.
    """
    for parameter in parameters:
        for name in _ATTRIBUTES:
            one = vars(parameter).get(name)
            if isinstance(one, _Link) and one.is_of(optimizer):
                delattr(parameter, name)


class _Link:
    """Keeps neither the optimizer nor the parameter alive; a copy of it, in a pickled parameter, is of nothing."""

    def __init__(self, optimizer: ZenFlowOptimizer, parameter: nn.Parameter) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._parameter = weakref.ref(parameter)

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()  # which loads anywhere, with weights_only too

    def is_of(self, optimizer: ZenFlowOptimizer) -> bool:
        """Whether it leads to this optimizer."""
        return self._optimizer() is optimizer

    def _both(self) -> tuple[ZenFlowOptimizer, nn.Parameter]:
        optimizer, parameter = self._optimizer(), self._parameter()
        if optimizer is None or parameter is None:
            raise ValueError("the parameter's optimizer is gone, allowed is one that an engine trains")
        return optimizer, parameter


class _Fragment(_Link):
    """Stands for ZeRO's part of the flat fp32 parameters: all of one parameter."""

    def get_optim_state_keys(self) -> list[str]:
        """Names of the moments."""
        optimizer, parameter = self._both()
        return [name for name in optimizer.state[parameter] if name != "step"]

    def get_hp_fragment(self, optim_state_key: str | None = None) -> torch.Tensor:
        """A copy of the master, or of a moment, flat, on the parameter's device."""
        optimizer, parameter = self._both()
        if optim_state_key not in (None, *self.get_optim_state_keys()):
            raise ValueError(f"{optim_state_key} not found in optimizer state fragment")  # as DeepSpeed says it
        return optimizer.full_state(parameter)[optim_state_key or MASTER].to(parameter.device).flatten()


class _GetState(_Fragment):
    def __call__(self, optim_state_key: str | None = None) -> torch.Tensor:
        return self.get_hp_fragment(optim_state_key).view(self._both()[1].shape)


class _SetState(_Fragment):
    def __call__(self, value: torch.Tensor, optim_state_key: str | None = None) -> None:
        optimizer, parameter = self._both()
        if optim_state_key not in (None, *self.get_optim_state_keys()):
            raise ValueError(f"{optim_state_key} not found in optimizer state fragment")
        optimizer.set_full_state(parameter, optim_state_key or MASTER, value)


class _Gradient(_Link):
    """Is asked where `.grad` is None."""

    def _of_a_backward(self) -> nn.Parameter:
        """The parameter, where others have a gradient.

        Raises:
            ValueError: none has.
        """
        optimizer, parameter = self._both()
        if all(one.grad is None for group in optimizer.param_groups for one in group["params"]):
            raise ValueError(_NO_GRADIENT)
        return parameter


class _GetGradient(_Gradient):
    def __call__(self) -> torch.Tensor:
        return torch.zeros_like(self._of_a_backward(), dtype=torch.float32, requires_grad=False)


class _SetGradient(_Gradient):
    def __call__(self, value: torch.Tensor) -> None:
        parameter = self._of_a_backward()
        parameter.grad = value.detach().to(parameter, copy=True).view_as(parameter)


_ATTRIBUTES: dict[str, type[_Link]] = {
    "_hp_mapping": _Fragment,
    "get_full_hp_param": _GetState,
    "set_full_hp_param": _SetState,
    "get_full_hp_grad": _GetGradient,
    "set_full_hp_grad": _SetGradient,
}
