"""Gives ds_configs to DeepSpeed and Accelerate: `python -m MODULE IN OUT`, both JSON.

IN: a list of {"config", "proof", "mended"}; with a version under "mended" the config is mended first, for that one.
OUT: for each what was raised, None for nothing, and some figures of the trained.
"""

from __future__ import annotations

import copy
import functools
import importlib
import json
import logging
import os
import socket
import sys
import warnings
from collections.abc import Callable
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.support import upstream_ops
from zftune.ds_config.reading import MISSING, Source, at
from zftune.integrations.deepspeed import asking
from zftune.integrations.deepspeed.check.checking import check, fix

STEPS = 5


def main() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text())
    warnings.simplefilter("ignore")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ.update(alone if "RANK" not in os.environ else {})
    cpuinfo: Any = importlib.import_module("cpuinfo")  # before DeepSpeed takes the function
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)  # 1.4 s, at every engine
    import deepspeed
    import torch

    logging.getLogger("DeepSpeed").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    runs: dict[str, Callable[[Any], Any]] = {
        "parse": parse,
        "accelerate": accelerate,
        "moves": moves,
        "selection": selection,
        "border": border,
        "initialize": initialize,
    }
    results = [attempt(runs.get(job["proof"], train), prepared(job)) for job in jobs]
    if os.environ["RANK"] == "0":
        Path(sys.argv[2]).write_text(json.dumps(results))


def prepared(job: Any) -> Any:
    config = job["config"]
    if job.get("mended"):
        config, _, _ = fix(Source(config), backend="deepspeed", version=job["mended"], ask=asking.refusals)
    return small(config)


def small(config: Any) -> Any:
    """With buffers for a small model, and memory that is not pinned: no rule but of speed looks at these."""
    zero = config.get("zero_optimization")
    if isinstance(zero, dict):
        zero |= {name: 100_000 for name in ("reduce_bucket_size", "allgather_bucket_size") if zero.get(name) != "auto"}
        offload = zero.get("offload_optimizer")
        if isinstance(offload, dict) and offload.get("pin_memory") is True:
            offload["pin_memory"] = False
    return config


def attempt(run: Callable[[Any], Any], config: Any) -> dict[str, Any]:
    try:
        return {"raised": None, "message": "", **(run(copy.deepcopy(config)) or {})}
    except Exception as error:  # noqa: BLE001 - which one is what is asked
        return {"raised": type(error).__name__, "message": str(error)[:300]}


def parse(config: Any) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    DeepSpeedConfig(config)


def accelerate(config: Any) -> None:
    """As `Accelerator.prepare` does, which the Trainer calls too."""
    from accelerate.utils import DeepSpeedPlugin

    from zftune.ds_config.reading import FILLED

    plugin = DeepSpeedPlugin(hf_ds_config=config)
    plugin.deepspeed_config_process(must_match=False, **FILLED)


def initialize(config: Any) -> dict[str, Any]:
    """What `check` finds to crash, and whether DeepSpeed makes an engine of it and takes a step."""
    report = check(
        config, backend="deepspeed", version=metadata.version("deepspeed"), ask=asking.refusals, world_size=1
    )
    crashes = [one.rule for one in report.findings if one.severity == "crashes"]
    made = attempt(made_engine, config)
    return {
        "crashes": crashes,
        "made": made,
        "trained": None if made["raised"] or not crashes else attempt(train, config),
    }


def made_engine(config: Any) -> None:
    import deepspeed
    import torch

    upstream_ops.allow_fp16()
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    given: dict[str, Any] = {"model_parameters": list(model.parameters())}
    if at(config, ("optimizer", "type")) in (None, MISSING):  # then it is the script's: the one that offloading takes
        given["optimizer"] = deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters())
    deepspeed.initialize(model=model, config=config, **given)


def train(config: Any) -> dict[str, Any]:
    """A few steps of a small model with DeepSpeed's own runtime."""
    import deepspeed
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    for _ in range(STEPS):
        batch = torch.randn(2, 8).to(next(model.parameters()).dtype)
        engine.backward(engine(batch).float().square().mean())
        engine.step()
    return figures(engine, optimizer)


def moves(config: Any) -> dict[str, Any]:
    """How far plain SGD moves a weight whose gradient is always 1/4, and the loss scale, step by step."""
    import deepspeed
    import torch

    upstream_ops.allow_fp16()
    config |= {
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "gradient_clipping": 0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    model = torch.nn.Linear(4, 4, bias=False)
    torch.nn.init.zeros_(model.weight)
    engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=[model.weight], config=config)
    far, scales = [0.0], []
    for _ in range(STEPS):
        scales.append(float(optimizer.cur_scale if hasattr(optimizer, "cur_scale") else optimizer.loss_scale))
        engine.backward(engine(torch.ones(1, 4).half()).float().mean())
        engine.step()
        far.append(-float(model.weight[0, 0]))
    return {"moves": [round(after - before, 6) for before, after in pairwise(far)], "scales": scales}


def selection(config: Any) -> dict[str, Any]:
    """The columns that are selected, and those with the largest gradients, of a model without biases and one with."""
    import deepspeed
    import torch

    found = {}
    config["zero_optimization"]["zenflow"]["topk_ratio"] = 0.25
    for name, bias in (("matrices", False), ("biases", True)):
        torch.manual_seed(0)
        layers = (torch.nn.Linear(8, 16, bias=bias), torch.nn.ReLU(), torch.nn.Linear(16, 4, bias=bias))
        model, x = torch.nn.Sequential(*layers), torch.randn(2, 8)
        first: Any = model[0].weight
        model(x).square().mean().backward()
        largest = first.grad.abs().sum(0).topk(2).indices.sort()[0].tolist()
        first.grad = None
        parameters = list(model.parameters())
        engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=parameters, config=copy.deepcopy(config))
        engine.backward(engine(x).square().mean())
        found[name] = {"largest": largest, "selected": first.selected_indices.tolist()}
    return found


def border(config: Any) -> dict[str, Any]:
    """A step on two ranks, whose border lies in the middle of the norm's weight, or between its weight and its bias."""
    import deepspeed
    import torch

    has_bias = config.pop("has_bias")
    norm = torch.nn.LayerNorm(8, bias=has_bias)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), norm, torch.nn.Linear(8, 8, bias=False))
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    engine.backward(engine(torch.randn(2, 8)).square().mean())
    engine.step()
    return {}


def figures(engine: Any, optimizer: Any) -> dict[str, Any]:
    import torch

    own = getattr(optimizer, "selective_optimizer", None)
    second = getattr(optimizer, "backup_optimizer", None)
    states = [value for state in own.state.values() for value in state.values()] if own is not None else []
    return {
        "finite": all(bool(torch.isfinite(weight.float()).all()) for weight in engine.module.parameters()),
        "accumulation": engine.gradient_accumulation_steps(),
        "clipping": engine.gradient_clipping(),
        "topk_ratio": getattr(optimizer, "topk_ratio", None),
        "select_interval": getattr(engine, "select_interval", None),
        "selected_is": None if own is None else [base.__name__ for base in type(own).__mro__],
        "selected_decay": None if own is None else own.param_groups[0]["weight_decay"],
        "selected_dtypes": sorted({str(value.dtype) for value in states if isinstance(value, torch.Tensor)}),
        "decay": optimizer.optimizer.param_groups[0].get("weight_decay"),
        "lr": optimizer.optimizer.param_groups[0]["lr"],
        "second_lr": None if second is None else second.param_groups[0]["lr"],
        "splits": len(set(getattr(optimizer, "subgroup_to_device", {}).values())),
        "masters_on": sorted({str(part.device) for part in getattr(optimizer, "single_partition_of_fp32_groups", [])}),
    }


if __name__ == "__main__":
    main()
