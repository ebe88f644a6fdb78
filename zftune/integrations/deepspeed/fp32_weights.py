"""What DeepSpeed's engine saves: weights that lack no update, and the fp32 ones that `zero_to_fp32` reads."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zenflow.full_state import MASTER
from zenflow.sharded import local_rows
from zenflow.state import reread
from zftune.checkpoint.zero import masters_alone, optimizer_file
from zftune.integrations.fsdp2 import whole

if TYPE_CHECKING:
    from zftune.integrations.deepspeed.engine_optimizer import EngineOptimizer

_logger = logging.getLogger("zftune")

_SAVES = ("save_checkpoint", "save_16bit_model", "save_fp16_model")
_MARK = "__zftune_original__"


def save_whole(engine: Any, optimizer: EngineOptimizer) -> None:
    """Let the files with weights, which may be used alone, hold what is still pending; a resumed run knows it.

    Where ranks share out the state of a whole model, each has its part of what is pending: then only the checkpoint
    holds it, for which all ranks are there. Of the others a script may ask on one rank alone.
    """
    for name in _SAVES[:1] if optimizer.is_partitioned else _SAVES:
        original = getattr(engine, name, None)
        if original is not None:
            setattr(engine, name, _with_flushed(original, optimizer))
    accelerate = sys.modules.get("accelerate.accelerator")
    if accelerate is not None and not optimizer.is_partitioned:  # whose Trainer saves the final model by way of it
        _hook_accelerate(accelerate.Accelerator)


def _with_flushed(original: Callable[..., Any], optimizer: EngineOptimizer) -> Callable[..., Any]:
    @functools.wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        with optimizer.flushed_weights() as steps:
            if steps:
                number = f"{steps} step{'' if steps == 1 else 's'}"
                _logger.warning("the saved weights hold the updates of %s that training has yet to see", number)
            return original(*args, **kwargs)

    return save


def _hook_accelerate(accelerator: Any) -> None:
    original = getattr(accelerator.get_state_dict, _MARK, accelerator.get_state_dict)

    @functools.wraps(original)
    def get_state_dict(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        from zftune.integrations.deepspeed.engine_optimizer import EngineOptimizer

        optimizer = getattr(model, "optimizer", None)
        if not isinstance(optimizer, EngineOptimizer) or optimizer.is_partitioned:
            return original(self, model, *args, **kwargs)
        return _with_flushed(original, optimizer)(self, model, *args, **kwargs)

    setattr(get_state_dict, _MARK, original)
    accelerator.get_state_dict = get_state_dict


def save_with_fp32(engine: Any, optimizer: EngineOptimizer) -> None:
    """Let `engine.save_checkpoint` write them too, with the script that DeepSpeed drops beside them."""
    original = engine._save_checkpoint

    @functools.wraps(original)
    def save(
        save_dir: Any, tag: Any, client_state: Mapping[str, Any] | None = None, exclude_frozen_parameters: bool = False
    ) -> Any:
        by_rows = optimizer.is_sharded
        if by_rows or engine.save_non_zero_checkpoint:  # this rank writes the model
            rank, ranks = (engine.global_rank, engine.world_size) if by_rows else (0, 1)
            document = masters_alone(_masters(optimizer), engine.config, _version(), ranks)
            name = optimizer_file(rank, bf16=engine.bfloat16_enabled())
            engine.checkpoint_engine.save(document, str(Path(save_dir, str(tag), name)))
            if engine.global_rank == 0:
                engine._copy_recovery_script(
                    save_dir
                )  # which DeepSpeed does where it saves ZeRO's parts, thus not here
        about = _about_model(engine, optimizer, frozen=not exclude_frozen_parameters)
        return original(
            save_dir,
            tag,
            client_state={**about, **(client_state or {})},
            exclude_frozen_parameters=exclude_frozen_parameters,
        )

    engine._save_checkpoint = save


def _masters(optimizer: EngineOptimizer) -> list[torch.Tensor]:
    """Each group's masters behind each other, as one rank of ZeRO has them; of sharded ones this rank's rows."""
    flats = []
    for group in _groups(optimizer):
        shown = [optimizer.own_rows(parameter, parameter.detach()) for parameter in group]
        lengths = [rows.numel() for rows in shown]
        flat = torch.empty(sum(lengths), dtype=torch.float32, device="cpu")
        parts = flat.split(lengths)
        for part, parameter, rows in zip(parts, group, shown, strict=True):
            master = local_rows(optimizer.full_state(parameter)[MASTER])
            part.copy_(reread(master, rows.cpu()).reshape(-1))  # with what is pending, as the weights
        flats.append(flat)
    return flats


def _groups(optimizer: EngineOptimizer) -> list[list[Any]]:
    groups = [group["params"] for group in optimizer.param_groups]
    return [[parameter] for group in groups for parameter in group] if optimizer.is_sharded else groups


def _about_model(engine: Any, optimizer: EngineOptimizer, *, frozen: bool) -> dict[str, Any]:
    """What ZeRO's engine adds to the file with the model: whose masters these are, and the weights that have none."""
    names = engine.param_names
    trained = [{names[parameter]: parameter.shape for parameter in group} for group in _groups(optimizer)]
    known = {name for of_group in trained for name in of_group}
    rest = {name: parameter for parameter, name in names.items() if name not in known} if frozen else None
    return {
        "param_shapes": trained,
        "frozen_param_shapes": rest and {name: parameter.shape for name, parameter in rest.items()},
        "frozen_param_fragments": rest and {name: whole(parameter.detach()) for name, parameter in rest.items()},
        "shared_params": _tied(engine.module),
    }


def _tied(module: nn.Module) -> dict[str, str]:
    """The first name of each parameter that has several, by the others; DeepSpeed goes by address: rows have none."""
    first: dict[int, str] = {}
    named = [(name, first.setdefault(id(one), name)) for name, one in module.named_parameters(remove_duplicate=False)]
    return {name: holder for name, holder in named if name != holder}


def _version() -> str:
    import deepspeed

    return str(deepspeed.__version__)
