"""DeepSpeed's own ZenFlow on the same batches, each run in a process of its own: `python upstream.py FILE.json`."""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # an overlapped update's process begins by reading this file again
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import deepspeedkit

if TYPE_CHECKING:
    from convergence.setting import Setting
    from convergence.train import World

LIMIT_S = 300.0

# The tutorial's section (deepspeed.ai/tutorials/zenflow). "auto" selects once, at the first step. The repaired one does
# what a setting can do: no overlap, a first synchronous step, and a selection every 32 steps as in the other runs.
SECTIONS: dict[str, dict[str, Any]] = {
    "deepspeed": {
        "topk_ratio": 0.05,
        "select_strategy": "auto",
        "select_interval": "auto",
        "update_interval": 4,
        "full_warm_up_rounds": 0,
        "overlap_step": True,
    },
    "deepspeed repaired": {
        "topk_ratio": 0.05,
        "select_strategy": "step",
        "select_interval": 32,
        "update_interval": 4,
        "full_warm_up_rounds": 1,
        "overlap_step": False,
    },
}


def document(setting: Setting, batch: int) -> dict[str, Any]:
    """DeepSpeed's configuration for a setting."""
    from convergence.train import ADAMW

    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": 0.0,  # left out, DeepSpeed clips the norm to 1
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": setting.lr, **ADAMW, "betas": [0.9, 0.999]}},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
            "zenflow": SECTIONS[setting.method],
        },
    }


def run_apart(world: World, setting: Setting) -> dict[str, Any]:
    """A run in another process, which is ended with all that it started.

    Returns:
        held_out, training, document, versions, seconds; or `ended`, how the process ended without a result.
    """
    from convergence.train import pretrained

    pretrained(world, setting.seed)  # made here, read there
    ask = {"setting": asdict(setting), "scale": asdict(world.scale), "cache": str(world.cache)}
    return deepspeedkit.run_apart(Path(__file__), ask, LIMIT_S)


def main(file: Path) -> None:
    """The other process: one run, whose result takes the place of what was asked for."""
    import torch

    from convergence.data import texts
    from convergence.setting import Setting
    from convergence.train import Scale, World

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ask = json.loads(file.read_text(encoding="utf-8"))
    setting = Setting(**ask["setting"])
    world = World(Scale(**ask["scale"]), texts(), Path(ask["cache"]))
    deepspeedkit.prepare()
    file.write_text(json.dumps(_train(world, setting)), encoding="utf-8")


def _train(world: World, setting: Setting) -> dict[str, Any]:
    import deepspeed

    from convergence.train import feed_of, held_out_loss, start

    model, scale = start(world, setting.regime, setting.seed), world.scale
    asked = document(setting, scale.batch)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=asked)
    feed, losses = feed_of(world, setting), []
    for _ in range(scale.steps):
        loss = engine(next(feed))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    sequences = world.texts[setting.regime].evaluation(scale.sequences)
    return {
        "held_out": held_out_loss(engine.module, sequences),
        "training": [sum(losses[i : i + 20]) / 20 for i in range(0, len(losses) - 19, 20)],
        "document": asked,
        "versions": deepspeedkit.versions(),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
