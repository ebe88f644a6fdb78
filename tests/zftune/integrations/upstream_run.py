"""A program: DeepSpeed's ZenFlow on a CPU, fed with given gradients, whose knobs change in between.

It reads a list of cases from a file and writes what the weights were after each step of each case to another.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROWS, COLUMNS = 3, 8
LR = 1e-2


def gradient(step: int) -> Tensor:
    """Of the matrix in the step with this number, from 1: columns matter the less the later they stand."""
    generator = torch.Generator().manual_seed(step)
    size = 2.0 ** -torch.arange(COLUMNS).float()
    return size * (0.75 + 0.5 * torch.rand(ROWS, COLUMNS, generator=generator))


def turned(step: int) -> Tensor:
    """The same with the columns the other way round."""
    return gradient(step).flip(1)


class Given(nn.Module):
    """A matrix and a vector whose gradients are what the caller passes to forward."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(ROWS, COLUMNS, dtype=dtype))
        self.vector = nn.Parameter(torch.ones(ROWS, dtype=dtype))

    def forward(self, given: Tensor) -> Tensor:
        return (self.matrix.float() * given).sum() + (self.vector.float() * given[:, 0]).sum()


def config(case: dict[str, Any]) -> dict[str, Any]:
    """The ds_config of a case."""
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}},
        "zero_optimization": {
            "stage": case.get("stage", 2),
            "overlap_comm": bool(case["zenflow"].get("offload")),
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
            "zenflow": {"select_strategy": "step", **case["zenflow"]},
        },
    }
    if case.get("bf16"):
        made["bf16"] = {"enabled": True}
    return made


def refused(engine: Any, case: dict[str, Any]) -> list[str]:
    """The sentences for calls that must not do anything."""
    import deepspeed

    from zftune.errors import BadInputError
    from zftune.integrations.upstream_knobs import set_upstream_knobs

    sentences = []
    for one in case.get("refused", []):
        knobs = one[int(os.environ["RANK"])] if isinstance(one, list) else one
        if knobs.pop("boundary", False):
            engine.set_gradient_accumulation_boundary(True)
        version = deepspeed.__version__
        deepspeed.__version__ = knobs.pop("version", version)
        try:
            set_upstream_knobs(engine, **knobs)
            sentences.append("")
        except BadInputError as error:
            sentences.append(str(error))
        deepspeed.__version__ = version
        engine._is_gradient_accumulation_boundary = None
    return sentences


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Train; call `set_upstream_knobs` after the steps that the case names."""
    import deepspeed

    from zftune.integrations.upstream_knobs import set_upstream_knobs

    torch.manual_seed(0)
    model = Given(torch.bfloat16 if case.get("bf16") else torch.float32)
    engine, optimizer, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config(case)
    )
    found: dict[str, Any] = {"matrix": [], "vector": [], "selected": [], "updates": [], "holds": []}
    found["refused"] = refused(engine, case)
    for number in range(1, case["steps"] + 1):
        given = turned(number) if number > case.get("turns_after", 1 << 30) else gradient(number)
        before = engine.global_steps
        engine.backward(engine(given))
        if number == 1 and case.get("asks_early"):
            found["refused"] += refused(engine, {"refused": [{"topk_ratio": 0.5}]})
        engine.step()
        for knobs in case.get("changes", {}).get(str(number), []):
            found["holds"].append(set_upstream_knobs(engine, **knobs))
        if engine.global_steps > before:
            found["updates"].append(number)
        found["matrix"].append(engine.module.matrix.detach().float().tolist())
        found["vector"].append(engine.module.vector.detach().float().tolist())
        indices = getattr(engine.module.matrix, "selected_indices", None)
        found["selected"].append(None if indices is None else indices.tolist())
    found["config"] = engine.zenflow_config().model_dump(mode="json")
    worker = getattr(optimizer, "process", None)
    if worker is not None:
        worker.terminate()
        worker.join(20)
    return found


def main() -> None:
    import deepspeed

    cores = os.sched_getaffinity(0)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    cases = json.loads(Path(sys.argv[1]).read_text())
    found = {}
    for name, case in cases.items():
        found[name] = run(case)
        os.sched_setaffinity(0, cores)
    Path(f"{sys.argv[2]}.{os.environ['RANK']}").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
