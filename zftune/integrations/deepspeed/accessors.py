"""DeepSpeed's accessors (`deepspeed.utils.safe_get_full_fp32_param` and so on), where the runtime has the state.

From 0.16 on they ask a parameter for the attributes that ZeRO stages 1 and 2 set: `_hp_mapping`, and four methods. The
accessors of ZeRO-3's local parts ask for `ds_id`, which whole parameters have not: they refuse as at stages 1 and 2.
"""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from zenflow.full_state import MASTER
from zenflow.optimizer import ZenFlowOptimizer
from zenflow.sharded import Rows, local_rows, model_parameter
from zftune.integrations.fsdp2 import as_dtensor, gathered, now, own_rows, whole, whole_parameter

_logger = logging.getLogger("zftune")


class Gathered(DTensor):
    """What a parameter is while it is gathered: whatever a script does with it is done with the whole weight."""

    __slots__ = ()
    whole: nn.Parameter

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in _OF_THE_PARAMETER:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        gathered = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, cls)]
        args, kwargs = pytree.tree_map_only(cls, lambda one: one.whole, (args, kwargs or {}))
        found = func(*args, **kwargs)
        return next((one for one in gathered if one.whole is found), found)  # of what is done in place


_OF_THE_PARAMETER = {
    method
    for name in ("grad", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
    for method in (getattr(torch.Tensor, name).__get__, getattr(torch.Tensor, name).__set__)
} | {torch.Tensor.requires_grad_, torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook}


def mark(module: nn.Module) -> None:
    """Give parameters what scripts and DeepSpeed ask those of ZeRO stage 3 for, but for the optimizer's state."""
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
    from torch.distributed.fsdp import FSDPModule

    for number, (name, parameter) in enumerate(module.named_parameters()):
        given: dict[str, Any] = {
            "ds_id": number,
            "ds_shape": parameter.shape,
            "ds_numel": parameter.numel(),
            "ds_status": ZeroParamStatus.NOT_AVAILABLE,  # so the engine leaves out what it would send to all ranks
            "ds_active_sub_modules": set(),
            "ds_persist": False,
            "ds_process_group": deepspeed.comm.get_world_group(),
            "all_gather": _AllGather(module, name),
            "partition": _Partition(module, name),
        }
        for attribute, value in given.items():
            setattr(parameter, attribute, value)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            _mark_once_whole(part)


def _mark_once_whole(unit: nn.Module) -> None:
    """Mark what a unit of FSDP2 has in place of its rows in its forward, which is made in the first one, and stays."""

    def mark(_unit: nn.Module, _args: Any) -> None:
        handle.remove()
        mark_whole(unit)

    handle = unit.register_forward_pre_hook(mark)


def mark_whole(module: nn.Module) -> None:
    """Answer scripts that ask whether ZeRO stage 3 has parameters on this rank: yes, those that are whole.

    They get no `ds_id`, by which scripts and DeepSpeed tell what is cut up.
    """
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor):
            whole: Any = parameter
            whole.ds_shape, whole.ds_numel = parameter.shape, parameter.numel()
            whole.ds_status, whole.ds_active_sub_modules = _Available(), set()


class _Available:
    """Equals DeepSpeed's `ZeroParamStatus.AVAILABLE`."""

    name = "AVAILABLE"

    def __eq__(self, other: object) -> bool:
        return getattr(other, "name", None) == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()  # of a copy of the parameter: loads anywhere, with weights_only too


class ParameterOffload:
    """Stands for what gathers parameters in hooks under ZeRO stage 3, and has none here.

    Trainers take those hooks off before they generate, and put them on again. One rank has its parameters whole; those
    of several are gathered by FSDP2, in whatever way the model is called.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        given: Any = module
        given.ds_external_parameters = tuple  # called, it gives none; a pickle of the model has it by its name
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, _module: nn.Module) -> None:
        """Put no hook on."""

    _register_hooks_recursively = _register_deepspeed_module  # before 0.16.4


def reduce_unused(module: Any) -> None:
    """Let ranks use different experts of a model whose leaf modules a script has named: what is unused has zeros.

    As under ZeRO (`deepspeed.utils.set_z3_leaf_modules`); else ranks reduce other gradients than others, and wait.
    """
    from deepspeed.utils import z3_leaf_module

    if not any(z3_leaf_module(part) for part in module.modules()):
        return
    if hasattr(module, "set_reduce_scatter_unused_params"):
        module.set_reduce_scatter_unused_params(True)
    else:  # before torch 2.13
        _logger.warning(
            "z3_leaf_modules are named, and torch is %s: all ranks have to use all experts", torch.__version__
        )


class _OfParameter:
    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name = weakref.ref(module), name

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()  # of a copy of the parameter: loads anywhere, with weights_only too

    def _asked(self, parameters: Iterable[Any] | None) -> list[Any]:
        if parameters is not None:
            return list(map(now, parameters))
        module = self._module()
        return [] if module is None else [module.get_parameter(self._name)]


class _AllGather(_OfParameter):
    def __call__(self, param_list: Iterable[nn.Parameter] | None = None, async_op: bool = False, **_: Any) -> Any:
        """Let parameters be whole; waits, whatever `async_op` says."""
        for parameter in self._asked(param_list):
            if not isinstance(parameter, Gathered):
                whole = whole_parameter(parameter)
                parameter.__class__ = Gathered
                parameter.whole = whole
                parameter.ds_status = type(parameter.ds_status).AVAILABLE
        return [] if async_op else None


class _Partition(_OfParameter):
    def __call__(
        self, param_list: Iterable[nn.Parameter] | None = None, has_been_updated: bool = False, **_: Any
    ) -> None:
        """Leave each rank its rows of them; of what was written, too, where it says that something was."""
        for parameter in self._asked(param_list):
            if isinstance(parameter, Gathered):
                _give_back(parameter, has_been_updated)


def _give_back(parameter: Any, updated: bool) -> None:
    whole = parameter.whole.detach()
    del parameter.whole
    parameter.__class__ = DTensor
    parameter.ds_status = type(parameter.ds_status).NOT_AVAILABLE
    held = local_rows(parameter.detach())
    rows = own_rows(whole, parameter).to(held.device)
    if updated and not torch.equal(rows, held):  # most say so to save memory
        held.copy_(rows)


_One = TypeVar("_One")
_NO_GRADIENT = "Gradients are only available immediately after backward and before engine step"  # DeepSpeed's sentence


def link(optimizer: ZenFlowOptimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Let DeepSpeed's accessors find parameters' state.

    Args:
        optimizer: has it; is not kept alive.
    """
    for parameter in parameters:
        for name, kind in _attributes_of(parameter).items():
            setattr(parameter, name, kind(optimizer, parameter))


def unlink(optimizer: ZenFlowOptimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Undo it, unless another optimizer has the parameters by now."""
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
        return self._optimizer() is optimizer

    @property
    def optimizer(self) -> ZenFlowOptimizer:
        return _alive(self._optimizer)


def _alive(one: weakref.ref[_One]) -> _One:
    found = one()
    if found is None:
        raise ValueError("the parameter's optimizer is gone")
    return found


class _Whole(_Link):
    def __init__(self, optimizer: ZenFlowOptimizer, parameter: nn.Parameter) -> None:
        super().__init__(optimizer, parameter)
        self._parameter = weakref.ref(parameter)

    @property
    def parameter(self) -> nn.Parameter:
        return _alive(self._parameter)


class _Fragment(_Whole):
    """Stands for ZeRO's part of the flat fp32 parameters: all of one parameter."""

    def get_optim_state_keys(self) -> list[str]:
        return [name for name in self.optimizer.state[self.parameter] if name != "step"]

    def _require(self, optim_state_key: str | None) -> None:
        if optim_state_key not in (None, *self.get_optim_state_keys()):
            raise ValueError(f"{optim_state_key} not found in optimizer state fragment")  # as DeepSpeed says it

    def get_hp_fragment(self, optim_state_key: str | None = None) -> torch.Tensor:
        """A copy of the master, or of a moment, flat, on the parameter's device."""
        self._require(optim_state_key)
        state = self.optimizer.full_state(self.parameter)
        return whole(state[optim_state_key or MASTER]).to(self.parameter.device).flatten()


class _GetState(_Fragment):
    def __call__(self, optim_state_key: str | None = None) -> torch.Tensor:
        return self.get_hp_fragment(optim_state_key).view(self.parameter.shape)


class _SetState(_Fragment):
    def __call__(self, value: torch.Tensor, optim_state_key: str | None = None) -> None:
        self._require(optim_state_key)
        self.optimizer.set_full_state(self.parameter, optim_state_key or MASTER, value)


class _Gradient(_Whole):
    """Is asked where `.grad` is None."""

    def _of_a_backward(self) -> nn.Parameter:
        """The parameter, or this rank's rows of it, where others have a gradient."""
        rows, parameter = self.optimizer.rows, self.parameter
        if all(one.grad is None for one in rows):
            raise ValueError(_NO_GRADIENT)
        return next(one for one in rows if model_parameter(one) is parameter)


class _GetGradient(_Gradient):
    def __call__(self) -> torch.Tensor:
        rows = self._of_a_backward()
        values = torch.zeros_like(rows, dtype=torch.float32) if rows.grad is None else rows.grad.float()
        return whole(rows.wrapped(values)) if isinstance(rows, Rows) else values.detach()


class _SetGradient(_Gradient):
    def __call__(self, value: torch.Tensor) -> None:
        rows = self._of_a_backward()
        own = self.optimizer.own_rows(self.parameter, value.detach())
        rows.grad = own.to(rows.device, rows.dtype, copy=True).view(rows.shape)


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
