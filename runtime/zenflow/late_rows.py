"""What reads the rows of a sharded weight: its tensors, and the gathers of FSDP2.

FSDP2 offers neither in public. Where torch has them elsewhere than here, nothing is found, and `step()` waits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from zenflow.sharded import Rows


def units_of(module: nn.Module) -> list[Any]:
    """What `fully_shard` was called on.

    Args:
        module: the model.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # who has not imported it has none
    unit = getattr(fsdp, "FSDPModule", ())
    return [part for part in module.modules() if isinstance(part, unit)]


def gathered_by(unit: Any) -> dict[int, Any]:
    """What FSDP2 has of each parameter that it gathers with a unit, by the parameter's id.

    Args:
        unit: of `units_of`.
    """
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.11
        group = getattr(state, "_fsdp_param_group", None)
        groups = [] if group is None else [group]
    return {id(one.sharded_param): one for group in groups for one in group.fsdp_params}


def readers_of(rows: Rows, gathered: Any) -> tuple[torch.Tensor, ...] | None:
    """The tensors by which a weight's rows are read.

    Args:
        rows: of the weight.
        gathered: what FSDP2 has of it.

    Returns:
        The parameter, its rows, and what all-gathers read; None where there may be others.
    """
    whole = cast(Any, rows.whole)
    local, source = whole._local_tensor, getattr(gathered, "_sharded_param_data", None)
    if type(local) is not torch.Tensor or type(source) is not torch.Tensor or gathered.sharded_param is not whole:
        return None
    storage = local.untyped_storage()
    held = [one for one in (rows, local, source, local._base, source._base) if one is not None]
    if any(one.untyped_storage()._cdata != storage._cdata for one in held):
        return None
    holders = int(torch._C._storage_Use_Count(storage._cdata)) - 1  # the Python object by which it is asked
    counts: list[Callable[[], int] | None] = [getattr(one, "_use_count", None) for one in (whole, local, source)]
    if holders > len({id(one) for one in held}) or any(count is None or int(count()) > 1 for count in counts):
        return None
    return None if local.device.type == "cpu" and local.is_shared() else (whole, local, source)
