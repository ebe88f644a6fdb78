"""`"online": true`: the tuner follows the engine's optimizer, and hears of every loss."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from zftune.integrations.deepspeed.backend import Plan
    from zftune.integrations.deepspeed.engine_optimizer import EngineOptimizer


def attach(engine: Any, optimizer: EngineOptimizer, plan: Plan) -> None:
    """Tune the knobs while the engine trains.

    Args:
        engine: of DeepSpeed.
        optimizer: the engine's.
        plan: of the call.
    """
    from zftune.tuner.attach import attach as follow
    from zftune.tuner.attach import log_loss

    follow(optimizer, quality=plan.quality, micro_batch=engine.train_micro_batch_size_per_gpu())
    original = engine.backward

    @functools.wraps(original)
    def backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        log_loss(loss.detach())
        return original(loss, *args, **kwargs)

    engine.backward = backward
