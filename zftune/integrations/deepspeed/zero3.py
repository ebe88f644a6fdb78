"""Weights of FSDP2 for scripts that expect those of ZeRO stage 3.

`deepspeed.zero.GatheredParameters`, and whoever asks whether a weight is cut up, look for attributes of the parameter:
`ds_id`, `ds_status`, `all_gather`, `partition` and others. With them a weight is whole within that context, and what
the script writes to it there comes to the rows, as under ZeRO.
"""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from zenflow.sharded import local_rows
from zftune.integrations.fsdp2 import now, own_rows, whole_parameter

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
    """Give parameters what scripts and DeepSpeed ask those of ZeRO stage 3 for, but for the optimizer's state.

    Args:
        module: that FSDP2 has sharded; the same on all ranks.
    """
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    for number, (name, parameter) in enumerate(module.named_parameters()):
        given: dict[str, Any] = {
            "ds_id": number,
            "ds_shape": parameter.shape,
            "ds_numel": parameter.numel(),
            "ds_status": ZeroParamStatus.NOT_AVAILABLE,  # so the engine leaves out what it would send to all ranks
            "ds_persist": False,
            "ds_process_group": deepspeed.comm.get_world_group(),
            "all_gather": _AllGather(module, name),
            "partition": _Partition(module, name),
        }
        for attribute, value in given.items():
            setattr(parameter, attribute, value)


def reduce_unused(module: Any) -> None:
    """Let ranks use different experts of a model whose leaf modules a script has named: what is unused has zeros.

    As under ZeRO (`deepspeed.utils.set_z3_leaf_modules`); else ranks reduce other gradients than others, and wait.

    Args:
        module: that FSDP2 has sharded.
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
    """Finds its parameter by name: a weak reference to it would keep `module.to()` from moving it."""

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
