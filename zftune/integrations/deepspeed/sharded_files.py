"""Checkpoints of ranks that have rows: the optimizer by rows in a folder of the tag, the model in its usual file.

On any number of ranks, and resumed on any other.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zenflow import distributed
from zftune.checkpoint.sources import FOLDER
from zftune.errors import BadInputError
from zftune.integrations.fsdp2 import as_dtensor, own_rows, whole

if TYPE_CHECKING:
    from zftune.integrations.deepspeed.engine_optimizer import EngineOptimizer

_logger = logging.getLogger("zftune")


def whole_state_dict(module: nn.Module, *, trained_only: bool = False) -> dict[str, Any]:
    """A model's `state_dict` with whole weights, on the CPU; to be called on all ranks.

    Returns:
        On the first rank; elsewhere nothing.
    """
    found: dict[str, Any] = {}
    copies: dict[int, torch.Tensor] = {}  # what is tied stays tied
    is_first = torch.distributed.get_rank() == 0
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            found[name] = value
        elif not (trained_only and isinstance(value, nn.Parameter) and not value.requires_grad):
            if id(value) not in copies:
                values = whole(value.detach())
                copies[id(value)] = values.cpu() if is_first else torch.empty(0)
            found[name] = copies[id(value)]
    return found if is_first else {}


def load_whole(module: nn.Module, state_dict: Mapping[str, Any], *, strict: bool) -> None:
    """Load whole weights into a model whose weights may be DTensors; nothing is sent.

    Raises:
        RuntimeError: a name or a shape is another; as in torch.
    """
    own = module.state_dict()
    module.load_state_dict({name: _like(value, own.get(name)) for name, value in state_dict.items()}, strict=strict)


def _like(value: Any, own: Any) -> Any:
    """This rank's rows of a whole weight where the model has rows of it."""
    if not hasattr(own, "placements") or value.shape != own.shape:  # of another shape: torch says so
        return value
    return as_dtensor(own_rows(value, own), own)


def take_over(engine: Any, optimizer: EngineOptimizer, *, gathers: bool) -> None:
    """Let an engine save and load as one of stage 3 does.

    Args:
        gathers: whether the ds_config lets whole weights be saved in 16 bits.
    """
    _give_weights(engine, gathers)
    save_by_rows(engine, optimizer)
    _load_weights(engine)


def save_by_rows(engine: Any, optimizer: EngineOptimizer) -> None:
    """Let an engine save the optimizer in a folder of the tag, to which each rank writes its rows."""
    _save_in_folder(engine, optimizer)
    _name_latest_once_whole(engine)


def _give_weights(engine: Any, gathers: bool) -> None:
    original = engine.save_16bit_model

    def state_dict(*_: Any, exclude_frozen_parameters: bool = False, **__: Any) -> dict[str, Any]:
        return whole_state_dict(engine.module, trained_only=exclude_frozen_parameters)

    @functools.wraps(original)
    def save_16bit_model(save_dir: Any, save_filename: str = "pytorch_model.bin", *args: Any, **kwargs: Any) -> Any:
        if not gathers:
            _logger.warning(
                "%s was not saved: set stage3_gather_16bit_weights_on_model_save to true",
                Path(save_dir, save_filename),
            )
            return False
        return original(save_dir, save_filename, *args, **kwargs)

    engine.module_state_dict = state_dict
    engine._zero3_consolidated_16bit_state_dict = lambda exclude_frozen_parameters=False: (
        state_dict(exclude_frozen_parameters=exclude_frozen_parameters) or None
    )
    engine.zero_gather_16bit_weights_on_model_save = lambda: gathers
    engine.save_16bit_model = save_16bit_model


def _save_in_folder(engine: Any, optimizer: EngineOptimizer) -> None:
    original = engine._save_checkpoint

    @functools.wraps(original)
    def save(save_dir: Any, tag: Any, *args: Any, **kwargs: Any) -> Any:
        folder = Path(save_dir, str(tag), FOLDER)
        distributed.save(engine.module, optimizer, folder)
        with optimizer.kept_in(folder):
            return original(save_dir, tag, *args, **kwargs)

    engine._save_checkpoint = save


def _name_latest_once_whole(engine: Any) -> None:
    """Let the file `latest` change in one piece, when the files of all ranks are there."""
    original = engine.save_checkpoint

    @functools.wraps(original)
    def save_checkpoint(
        save_dir: Any, tag: Any = None, client_state: Any = None, save_latest: bool = True, **more: Any
    ) -> Any:
        import deepspeed

        tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
        done = original(save_dir, tag, client_state or {}, save_latest=False, **more)  # ends with a barrier
        if save_latest and engine.global_rank == 0:
            new = Path(save_dir, ".latest")
            new.write_text(tag)
            new.replace(Path(save_dir, "latest"))
        deepspeed.comm.barrier()
        return done

    engine.save_checkpoint = save_checkpoint


def load_from_folder(engine: Any, optimizer: EngineOptimizer) -> None:
    """Let an engine of any stage go on from what ranks have saved by rows."""
    original = engine._load_checkpoint

    @functools.wraps(original)
    def load(load_dir: Any, tag: Any, *args: Any, **kwargs: Any) -> Any:
        folder = Path(load_dir, str(tag), FOLDER)
        with _mapped(optimizer, True), optimizer.kept_in(folder):  # a rank reads no more than its rows
            return original(load_dir, tag, *args, **kwargs)

    engine._load_checkpoint = load


def _load_weights(engine: Any) -> None:
    def load_module_state_dict(checkpoint: Any, strict: bool = True, custom_load_fn: Any = None, **_: Any) -> None:
        import deepspeed

        if custom_load_fn is None:
            load_whole(engine.module, checkpoint["module"], strict=strict)
            return
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
            custom_load_fn(src=checkpoint["module"], dst=engine.module)

    engine.load_module_state_dict = load_module_state_dict


def load_folder(optimizer: EngineOptimizer, folder: Path | None, steps: int) -> None:
    """Go on from what lies in the folder of a tag.

    Args:
        folder: None: nobody said where it is.
        steps: that the optimizer had taken when the file beside it was written.

    Raises:
        BadInputError: it is not there, or is of another step.
        CheckpointError: it cannot be read, or is of another model.
        RankError: another rank could not load it.
    """
    if folder is None or not folder.is_dir():
        raise BadInputError(
            f"the optimizer's state lies in the folder {FOLDER} of the checkpoint, which is not there: call "
            "engine.load_checkpoint() on the whole folder of the tag"
        )
    assert optimizer.module is not None
    with _mapped(optimizer, False):  # streams are read, too
        distributed.load(optimizer.module, optimizer, folder)
    if optimizer.steps != steps:
        raise BadInputError(
            f"the checkpoint {folder.parent} is of two steps, {steps} and {optimizer.steps}: its "
            "saving was interrupted. Take an earlier tag"
        )


def _mapped(optimizer: EngineOptimizer, asked: bool) -> contextlib.AbstractContextManager[None]:
    """Whether torch maps the files that it loads; of a whole model it does as it is told elsewhere."""
    if not optimizer.is_sharded:
        return contextlib.nullcontext()
    from torch.utils.serialization import config  # of torch 2.6

    patched: contextlib.AbstractContextManager[None] = config.patch("load.mmap", asked)  # type: ignore[attr-defined]
    return patched
