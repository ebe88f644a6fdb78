"""Bytes on the link of this runtime, counted by itself over k and S, beside what they should be."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from studykit import Job, code_digest

from claims.rigs import MODEL, NEVER, SIMULATED_CODE, task_for
from zenflow import ZenFlowConfig
from zftune.planner.model import ModelFacts
from zftune.profile.measure import measure

RIG = "llama2-7b-4xa100"
TOPK, WINDOWS = (0.0, 0.05, 0.1, 0.2), (1, 2, 4, 8)
CODE = (*SIMULATED_CODE, "studies/024-claims/claims/traffic.py")


def job(topk: Sequence[float] = TOPK, windows: Sequence[int] = WINDOWS) -> Job:
    """Some settings."""
    inputs = {"topk": topk, "windows": windows, "rig": RIG, "code": code_digest(*CODE)}
    return Job("traffic", inputs, figures, (topk, windows))


def figures(topks: Sequence[float] = TOPK, windows: Sequence[int] = WINDOWS) -> dict[str, Any]:
    """Bytes a step over the model's: counted, and (1 - k) (1 + 1 / S)."""
    torch.set_num_threads(1)
    settings = {"ZeRO-Offload": (0.0, 1, ZenFlowConfig.zero_offload())}
    for topk, window in product(topks, windows):
        config = ZenFlowConfig(topk_ratio=topk, update_interval=window, select_interval=NEVER)
        settings[f"k = {topk:g}, S = {window}"] = topk, window, config
    return {
        name: {"over_model_bytes": counted(config), "should_be": (1 - topk) * (1 + 1 / window)}
        for name, (topk, window, config) in settings.items()
    }


def counted(config: ZenFlowConfig) -> float:
    """Everything that crosses the link in a step of whole windows, over the bytes of the weights that have columns."""
    run = measure(task_for(RIG), config.resolved(), 2 * config.longest_window, lambda _done, _all: None)
    each = (one.d2h_bytes + one.h2d_bytes + one.index_bytes + one.migrated_bytes for one in run.stats)
    model = ModelFacts.from_name(MODEL)
    return statistics.fmean(each) / (model.element_bytes * model.parameters)
