"""DeepSpeed's accessors (`deepspeed.utils.safe_get_full_fp32_param` and so on), where the runtime has the state.

From 0.16 on they ask a parameter for the attributes that ZeRO stages 1 and 2 set: `_hp_mapping`, and four methods. The
accessors of ZeRO-3's local parts ask for `ds_id`, which whole parameters have not: they refuse as at stages 1 and 2.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from zenflow.full_state import MASTER
from zenflow.optimizer import ZenFlowOptimizer
from zenflow.sharded import local_rows
from zftune.integrations.fsdp2 import as_dtensor, gathered, now, own_rows

_One = TypeVar("_One")
_NO_GRADIENT = "Gradients are only available immediately after backward and before engine step"  # DeepSpeed's sentence


def link(optimizer: ZenFlowOptimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Let DeepSpeed's accessors find parameters' state.

    Args:
        optimizer: has it; is not kept alive.
        parameters: of the optimizer.
    """
    for parameter in parameters:
        for name, kind in _attributes_of(parameter).items():
            setattr(parameter, name, kind(optimizer, parameter))


def unlink(optimizer: ZenFlowOptimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Undo it, unless another optimizer has the parameters by now.

    Args:
        optimizer: whose links they were.
        parameters: of the optimizer.
    """
    for parameter in parameters:
        for name in _attributes_of(parameter):
            one = vars(parameter).get(name)
            if isinstance(one, _Link) and one.is_of(optimizer):
                delattr(parameter, name)


def _attributes_of(parameter: nn.Parameter) -> Mapping[str, type[_Link]]:
    return _ATTRIBUTES_OF_ROWS if hasattr(parameter, "ds_id") else _ATTRIBUTES


class _Link:
    """Does not keep the optimizer alive; a copy of it, in a pickled parameter, is of nothing."""

    def __init__(self, optimizer: ZenFlowOptimizer, parameter: nn.Parameter) -> None:
        del parameter  # a weak reference to one that is sharded would keep `module.to()` from moving it
        self._optimizer = weakref.ref(optimizer)

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()  # which loads anywhere, with weights_only too

    def is_of(self, optimizer: ZenFlowOptimizer) -> bool:
        """Whether it leads to this optimizer."""
        return self._optimizer() is optimizer

    @property
    def optimizer(self) -> ZenFlowOptimizer:
        """The optimizer. ValueError: it is gone."""
        return _alive(self._optimizer)


def _alive(one: weakref.ref[_One]) -> _One:
    found = one()
    if found is None:
        raise ValueError("the parameter's optimizer is gone, allowed is one that an engine trains")
    return found


class _Whole(_Link):
    """Of a parameter that is whole, which it does not keep alive either."""

    def __init__(self, optimizer: ZenFlowOptimizer, parameter: nn.Parameter) -> None:
        super().__init__(optimizer, parameter)
        self._parameter = weakref.ref(parameter)

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter. ValueError: it is gone."""
        return _alive(self._parameter)


class _Fragment(_Whole):
    """Stands for ZeRO's part of the flat fp32 parameters: all of one parameter."""

    def get_optim_state_keys(self) -> list[str]:
        """Names of the moments."""
        return [name for name in self.optimizer.state[self.parameter] if name != "step"]

    def get_hp_fragment(self, optim_state_key: str | None = None) -> torch.Tensor:
        """A copy of the master, or of a moment, flat, on the parameter's device."""
        if optim_state_key not in (None, *self.get_optim_state_keys()):
            raise ValueError(f"{optim_state_key} not found in optimizer state fragment")  # as DeepSpeed says it
        state = self.optimizer.full_state(self.parameter)
        return state[optim_state_key or MASTER].to(self.parameter.device).flatten()


class _GetState(_Fragment):
    def __call__(self, optim_state_key: str | None = None) -> torch.Tensor:
        return self.get_hp_fragment(optim_state_key).view(self.parameter.shape)


class _SetState(_Fragment):
    def __call__(self, value: torch.Tensor, optim_state_key: str | None = None) -> None:
        if optim_state_key not in (None, *self.get_optim_state_keys()):
            raise ValueError(f"{optim_state_key} not found in optimizer state fragment")
        self.optimizer.set_full_state(self.parameter, optim_state_key or MASTER, value)


class _Gradient(_Whole):
    """Is asked where `.grad` is None."""

    def _of_a_backward(self) -> nn.Parameter:
        """The parameter, where others have a gradient.

        Raises:
            ValueError: none has.
        """
        if all(one.grad is None for group in self.optimizer.param_groups for one in group["params"]):
            raise ValueError(_NO_GRADIENT)
        return self.parameter


class _GetGradient(_Gradient):
    def __call__(self) -> torch.Tensor:
        return torch.zeros_like(self._of_a_backward(), dtype=torch.float32, requires_grad=False)


class _SetGradient(_Gradient):
    def __call__(self, value: torch.Tensor) -> None:
        parameter = self._of_a_backward()
        parameter.grad = value.detach().to(parameter, copy=True).view_as(parameter)


class _Rows(_Link):
    """Stands for the optimizer of ZeRO stage 3, which DeepSpeed's accessors ask for parameters that are cut up."""

    def get_full_hp_param(self, param: nn.Parameter, optim_state_key: str | None = None) -> torch.Tensor:
        return gathered(self.get_local_fp32_param(param, optim_state_key), param)

    def set_full_hp_param(self, value: torch.Tensor, param: nn.Parameter, optim_state_key: str | None = None) -> None:
        self.set_local_hp_param(own_rows(value, param), param, optim_state_key)

    def get_local_fp32_param(self, param: nn.Parameter, optim_state_key: str | None = None) -> torch.Tensor:
        state = self.optimizer.full_state(now(param))
        if optim_state_key is not None and (optim_state_key not in state or optim_state_key == "step"):
            raise ValueError(f"{optim_state_key} not found in optimizer state fragment")  # as DeepSpeed says it
        return local_rows(state[optim_state_key or MASTER])

    def set_local_hp_param(self, value: torch.Tensor, param: nn.Parameter, optim_state_key: str | None = None) -> None:
        self.optimizer.set_full_state(now(param), optim_state_key or MASTER, value)

    def get_fp32_grad_for_param(self, param: nn.Parameter) -> torch.Tensor:
        return gathered(self.get_local_fp32_grad_for_param(param), param)

    def get_local_fp32_grad_for_param(self, param: nn.Parameter) -> torch.Tensor:
        rows = local_rows(param.detach())
        return torch.zeros_like(rows, dtype=torch.float32) if param.grad is None else local_rows(param.grad).float()

    def set_fp32_grad_for_param(self, value: torch.Tensor, param: nn.Parameter) -> None:
        self.set_local_grad_for_param(own_rows(value, param), param)

    def set_local_grad_for_param(self, value: torch.Tensor, param: nn.Parameter) -> None:
        param.grad = as_dtensor(value.detach().to(param.device, param.dtype, copy=True), param)


_ATTRIBUTES: dict[str, type[_Link]] = {
    "_hp_mapping": _Fragment,
    "get_full_hp_param": _GetState,
    "set_full_hp_param": _SetState,
    "get_full_hp_grad": _GetGradient,
    "set_full_hp_grad": _SetGradient,
}
_ATTRIBUTES_OF_ROWS: dict[str, type[_Link]] = {"_z3_optimizer": _Rows}
