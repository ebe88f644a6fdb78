"""Running `ds_worker`, and the ds_configs of its cases."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.support import fork_server, upstream_ops

ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}}
ZENFLOW = {"topk_ratio": 0.2, "update_interval": 4, "select_interval": 8, "overlap_step": True}


def ds_config(precision: str = "fp32", *, stage: int = 2, zenflow: Mapping[str, Any] | None = None, **more: Any) -> Any:
    zero: dict[str, Any] = {"stage": stage}
    if stage:
        zero["offload_optimizer"] = {"device": "cpu"}
    if zenflow is not None:
        zero["zenflow"] = dict(zenflow)
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "zero_optimization": zero, **more}
    if precision != "fp32":
        config[precision] = {"enabled": True, **({"initial_scale_power": 8} if precision == "fp16" else {})}
    return config


def run_cases(folder: Path, cases: Mapping[str, Any], *, ranks: int = 1, status: int = 0) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    given, out = folder / "cases.json", folder / "out.pt"
    given.write_text(json.dumps(cases))
    module = ["-m", "tests.support.zftune.integrations.ds_worker", str(given), str(out)]
    database = str(folder / "zftune.db")
    environment = {**os.environ, **upstream_ops.environment(), "ZFTUNE_DB": database, "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        begun = [stack.enter_context(one) for one in fork_server.ranks(ranks, module, env=environment)]
        for one in begun:
            assert one.wait(800) == status, one.stdout[-3000:] + one.stderr[-6000:]
    if status:
        return []
    files = [out, *(out.with_suffix(f".{rank}.pt") for rank in range(1, ranks))]
    return [torch.load(file, weights_only=True) for file in files]
