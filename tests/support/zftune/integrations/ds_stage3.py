"""What scripts do with the weights of ZeRO stage 3, between two steps of a `ds_worker`."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zftune.integrations.fsdp2 import whole


def weights_in_context(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies, as scripts take them."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: parameter.data.cpu().clone() for name, parameter in model.named_parameters()}


def read(engine: Any, model: nn.Module) -> dict[str, Any]:
    """Whole weights in whichever way they are asked for."""
    import deepspeed

    parameter = model.get_parameter("inner.weight")
    found: dict[str, Any] = {"outside": whole(parameter.detach()).clone(), "context": weights_in_context(model)}
    with deepspeed.zero.GatheredParameters(parameter):
        buffer = io.BytesIO()
        torch.save(parameter, buffer)
        buffer.seek(0)
        found |= {
            "detached": parameter.detach().clone(),
            "copied": copy.deepcopy(parameter.data),
            "saved": torch.load(buffer, weights_only=True).detach(),
            "product": (parameter @ torch.ones(parameter.shape[1])).detach(),
            "is a parameter": isinstance(parameter, nn.Parameter),
            "is trained": parameter.requires_grad,
            "shape": list(parameter.shape),
        }
    return found


def written(engine: Any, model: nn.Module) -> dict[str, Any]:
    """What is written by one rank for all, and what is written by nobody's leave."""
    import deepspeed

    is_first = torch.distributed.get_rank() == 0
    weight, bias = model.get_parameter("inner.weight"), model.get_parameter("inner.bias")
    with deepspeed.zero.GatheredParameters([weight, bias], modifier_rank=0):
        if is_first:
            weight.data.mul_(0.5)
            nn.init.constant_(bias, 0.125)
            inner: Any = model.get_submodule("inner")
            with torch.no_grad():
                inner.bias += 0.125
    found = {"shown": weights_in_context(model)}
    if hasattr(bias, "ds_id"):
        with deepspeed.zero.GatheredParameters(bias):
            bias.data.add_(1.0)
    found["afterwards"] = weights_in_context(model)
    found["masters"] = {"inner.weight": deepspeed.utils.safe_get_full_fp32_param(weight)}
    return found


def loss_by_parts(model: nn.Module, early: list[nn.Parameter], x: torch.Tensor) -> torch.Tensor:
    """Of parts that are called on their own, and a decay of weights that the script has from before the engine."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(early):
        decay = torch.stack([parameter.square().sum() for parameter in early if parameter.requires_grad]).sum()
    hidden = model.get_submodule("norm")(model.get_submodule("inner")(x))
    loss: torch.Tensor = model.get_submodule("outer")(hidden).square().mean() + 1e-2 * decay
    return loss


def asked_as_zero(engine: Any, model: nn.Module) -> dict[str, Any]:
    """What trainers ask ZeRO-3 for before they generate: TRL's do so by a copy of the function that is called here."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
    from deepspeed.runtime.zero.stage3 import unwrap_model_for_generation

    def all_here() -> bool:
        parameters: list[Any] = list(model.parameters())
        return all(one.ds_status == ZeroParamStatus.AVAILABLE for one in parameters)

    found = {"outside": all_here()}
    x = torch.linspace(-1.0, 1.0, model.get_parameter("inner.weight").shape[1])[None]
    handle = model.register_forward_pre_hook(lambda *_: found.update({"in its forward": all_here()}))
    with torch.no_grad():
        before = model(x)
        with unwrap_model_for_generation(engine) as unwrapped:
            offload = engine.optimizer.parameter_offload
            found["gathered"] = all_here()
            found["on its modules"] = bool([*offload.module.ds_external_parameters(), *offload.forward_hooks])
            for parameter in offload.module.parameters():
                parameter.ds_active_sub_modules.clear()
            found["generates"] = torch.equal(unwrapped(x), before)
        found["goes on"] = torch.equal(model(x), before)
    handle.remove()
    return found


def refused(engine: Any) -> str:
    """What loading a file that lacks all weights says."""
    try:
        engine.load_module_state_dict({"module": {}}, strict=True)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def state(engine: Any, model: nn.Module) -> dict[str, Any]:
    from deepspeed import utils

    parameter = model.get_parameter("outer.weight")
    found: dict[str, Any] = {
        "master": utils.safe_get_full_fp32_param(parameter),
        "exp_avg": utils.safe_get_full_optimizer_state(parameter, "exp_avg"),
    }
    if hasattr(parameter, "ds_id"):
        found["local rows"] = len(utils.safe_get_local_fp32_param(parameter))
    utils.safe_set_full_optimizer_state(parameter, torch.full_like(found["exp_avg"], 0.5), "exp_avg")
    utils.safe_set_full_fp32_param(parameter, torch.full_like(found["master"], 0.125))
    found["set"] = utils.safe_get_full_optimizer_state(parameter, "exp_avg")
    found["shown"] = whole(parameter.detach()).clone()
    return found


def saved(engine: Any, model: nn.Module, folder: Path) -> dict[str, Any]:
    told = engine.save_16bit_model(str(folder), "model.bin")
    torch.distributed.barrier()
    consolidated = engine._zero3_consolidated_16bit_state_dict()
    return {
        "told": told,
        "file": torch.load(folder / "model.bin", weights_only=True) if told else None,
        "consolidated": consolidated,
        "gathers": engine.zero_gather_16bit_weights_on_model_save(),
    }


def visited(engine: Any, model: nn.Module, folder: Path) -> dict[str, Any]:
    found = {
        "zero": asked_as_zero(engine, model),
        "read": read(engine, model),
        "files": saved(engine, model, folder),
        "refused": refused(engine),
    }
    return found | {"state": state(engine, model), "written": written(engine, model)}
