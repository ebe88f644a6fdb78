"""Models whose parameters are parts of something that torch or DeepSpeed holds, and what is said about each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from zenflow import UnsupportedError, ZenFlowAdamW

CPU = torch.device("cpu")
ALLOWED = (
    r"; it must be one of fully_shard \(FSDP2\), or whole and the same on all ranks, as under "
    "DistributedDataParallel"
)
FSDP1 = r"a parameter of shape \([0-9, ]+\) is a part of torch's FullyShardedDataParallel \(FSDP1\)" + ALLOWED
ZERO3 = r"a parameter of shape \(20, 13\) is partitioned by DeepSpeed's ZeRO stage 3" + ALLOWED
PLACED = (
    r"a parameter of shape \(\d+, 1\d\) is a DTensor \({placements} over {ranks} ranks\); it must be sharded by "
    r"fully_shard \(FSDP2\), by rows over all {ranks} ranks, with replicas \(HSDP\) or without"
)
REPLICATED = PLACED.replace("{placements}", r"Replicate\(\)")
COLUMNS = PLACED.replace("{placements}", r"Shard\(dim=1\)")
MIXED = (
    r"a parameter of shape \(6, 20\) is whole and others are sharded; all must be sharded by one fully_shard "
    r"\(FSDP2\) or all whole \(a frozen one may be either\)|a parameter of shape \(20, 13\) is a DTensor "
    r"\(Shard\(dim=0\) over {ranks} ranks\) and others of the optimizer are whole: call fully_shard\(\) on the "
    "model before the optimizer is made"
)
ELSEWHERE = (
    r"a parameter of shape \(20, 13\) is on meta and its mesh on cpu; it must be on the mesh's device, or on the "
    r"host \(CPUOffloadPolicy\)"
)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(13, 20), nn.Tanh(), nn.Linear(20, 6))


def _flat() -> list[nn.Parameter]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return list(FullyShardedDataParallel(_model(), device_id=CPU).parameters())


def _views() -> list[nn.Parameter]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return list(FullyShardedDataParallel(_model(), device_id=CPU, use_orig_params=True).parameters())


def _columns() -> list[nn.Parameter]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    layer = nn.Linear(14, 20, bias=False)
    fully_shard(layer, mesh=_mesh(), shard_placement_fn=lambda _: Shard(1))
    return list(layer.parameters())


def _rows_elsewhere() -> list[nn.Parameter]:
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        layer = nn.Linear(13, 20, bias=False)
    fully_shard(layer, mesh=_mesh())
    return list(layer.parameters())


def _tensor_parallel() -> list[nn.Parameter]:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    return list(parallelize_module(_model(), _mesh(), {"0": ColwiseParallel()}).parameters())


def _replicated() -> list[nn.Parameter]:
    from torch.distributed.tensor import Replicate, distribute_tensor

    whole = distribute_tensor(torch.randn(4, 13), _mesh(), [Replicate()])
    return [nn.Parameter(whole, requires_grad=False), *_model().parameters()]


def _of_zero3() -> list[nn.Parameter]:
    parameters = list(_model().parameters())
    parameters[0].ds_id = 0  # type: ignore[attr-defined]
    return parameters


def _mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))


SHARDED: dict[str, tuple[Callable[[], list[nn.Parameter]], str]] = {
    "flat": (_flat, FSDP1),
    "views of flat": (_views, FSDP1),
    "columns": (_columns, COLUMNS),
    "rows elsewhere": (_rows_elsewhere, ELSEWHERE),
    "tensor parallel": (_tensor_parallel, MIXED),
    "replicated": (_replicated, REPLICATED),
    "zero 3": (_of_zero3, ZERO3),
}
"""By name: makes the parameters, and what their refusal is, but for `ranks`."""


def _rows() -> list[nn.Parameter]:
    from torch.distributed.fsdp import fully_shard

    model = _model()
    fully_shard(model, mesh=_mesh())
    return list(model.parameters())


def what_is_said() -> dict[str, dict[str, Any]]:
    """Of each case: the sentences of the constructor, of `add_param_group` and of a first step, and what moved."""
    said = {name: _said(make) for name, (make, _) in SHARDED.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "__version__", "2.8.1+cu128")
        return {**said, "older torch": _said(_rows)}


def _said(make: Callable[[], list[nn.Parameter]]) -> dict[str, Any]:
    sharded = make()
    before = [_local(parameter).clone() for parameter in sharded]
    said = [_refusal(lambda: ZenFlowAdamW(sharded))]
    plain = [nn.Parameter(torch.ones(5, 3))]
    optimizer = ZenFlowAdamW(plain)
    said.append(_refusal(lambda: optimizer.add_param_group({"params": sharded})))
    groups = len(optimizer.param_groups)
    optimizer.param_groups[0]["params"] = sharded  # as Accelerate does between constructor and first step
    said.append(_refusal(optimizer.step))
    optimizer.abandon()
    kept = all(old.is_meta or torch.equal(old, _local(new)) for old, new in zip(before, sharded, strict=True))
    return {"said": said, "kept": kept, "groups": groups}


def _local(parameter: nn.Parameter) -> torch.Tensor:
    detached: Any = parameter.detach()
    local: torch.Tensor = detached.to_local() if hasattr(detached, "to_local") else detached
    return local


def _refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except UnsupportedError as error:
        return str(error)
    return "nothing"
