"""Gives ds_configs to DeepSpeed and Accelerate: `python -m tests.zftune.check.upstream_worker IN OUT`, both JSON.

IN: a list of {"config", "proof"}. OUT: for each what was raised, None for nothing, and some figures of the trained.
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
from pathlib import Path
from typing import Any

STEPS = 5


def main() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text())
    warnings.simplefilter("ignore")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    cpuinfo: Any = importlib.import_module("cpuinfo")  # before DeepSpeed takes the function
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)  # 1.4 s, at every engine
    import deepspeed
    import torch

    logging.getLogger("DeepSpeed").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    runs = {"parse": parse, "accelerate": accelerate}
    results = [attempt(runs.get(job["proof"], train), job["config"]) for job in jobs]
    Path(sys.argv[2]).write_text(json.dumps(results))


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

    from zftune.check.config import FILLED

    plugin = DeepSpeedPlugin(hf_ds_config=config)
    plugin.deepspeed_config_process(must_match=False, **FILLED)


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
