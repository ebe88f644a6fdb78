"""Parameters of which somebody else holds the whole: what they are, and that they are refused."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch

from zenflow.errors import UnsupportedError


def require_whole(parameters: Iterable[torch.Tensor]) -> None:
    """Refuse parts of weights before anything is written to them: each rank's are its own.

    Args:
        parameters: of an optimizer, frozen ones too.

    Raises:
        UnsupportedError: one belongs to FSDP, a tensor parallel plan or ZeRO stage 3.
    """
    for parameter in parameters:
        kind = _kind(parameter)
        if kind is not None:
            raise UnsupportedError(
                f"a parameter of shape {tuple(parameter.shape)} is {kind}, allowed are whole parameters that all ranks "
                "have alike, as under DistributedDataParallel"
            )


def _kind(parameter: torch.Tensor) -> str | None:
    """What a parameter is; None: a whole one."""
    # FSDP1 marks its flat parameters and, with use_orig_params=True, their views; torch has no public question for it.
    if getattr(parameter, "_fsdp_flattened", False):
        return "a part of torch's FullyShardedDataParallel (FSDP1)"
    tensors = sys.modules.get("torch.distributed.tensor")  # who has not imported it has none of them
    if tensors is not None and isinstance(parameter, tensors.DTensor):
        placements = ", ".join(repr(placement) for placement in parameter.placements)
        ranks = parameter.device_mesh.size()
        return f"a DTensor ({placements} over {ranks} ranks) of fully_shard (FSDP2) or a tensor parallel plan"
    return "partitioned by DeepSpeed's ZeRO stage 3" if hasattr(parameter, "ds_id") else None
