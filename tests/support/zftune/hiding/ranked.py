"""A rank of trainings on an emulated accelerator of its own: `python -m MODULE RANK FOLDER`."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zenflow import ZenFlowAdamW, ZenFlowConfig
from zftune.emulation import EmulatedAccelerator, Rig
from zftune.hiding import FIRST_STEPS, follow

RANKS = 2
STEPS = FIRST_STEPS + 12


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def train(rank: int, quality: Any) -> dict[str, Any]:
    handler, logger = _Lines(), logging.getLogger("zftune")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Tanh(), nn.Linear(64, 8, bias=False))
    rates = {"link_d2h_gbps": 0.01, "link_h2d_gbps": 0.01, "host_gbps": 0.02 / (1 + rank)}
    rig = Rig("made up", "", forward_ms=1.0, backward_ms=1.0, scale=1.0, device_gbps=None, **rates)
    device = EmulatedAccelerator(rig)
    config = ZenFlowConfig.zero_offload(pipeline="bucket")
    optimizer = ZenFlowAdamW(module.parameters(), lr=1e-5, config=config, module=module, device=device)
    device.attach(module)
    follow(optimizer, quality)
    batches, changed = torch.Generator().manual_seed(rank), 0
    for _ in range(STEPS):
        module(torch.randn(16, 32, generator=batches)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        changed = changed or (optimizer.config != config.resolved() and optimizer.steps)
    knobs = dataclasses.asdict(optimizer.config)
    optimizer.close()
    device.close()
    logger.removeHandler(handler)
    weights = [parameter.tolist() for parameter in module.parameters()]
    return {"lines": handler.lines, "knobs": knobs, "changed": changed, "weights": weights}


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    found = {quality: train(rank, quality) for quality in ("exact", "published")}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
