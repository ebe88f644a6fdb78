"""What is compared, on what, and for how long. Loads neither torch nor DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

METHOD = 1  # raise it when a change elsewhere changes what a run computes or how it is timed

LR, BETAS, EPS, WEIGHT_DECAY = 5e-5, (0.9, 0.999), 1e-8, 0.01
UPDATE_INTERVAL, SELECT_INTERVAL, WARM_UP, TOPK_RATIO = 4, 32, 4, 0.1
RESERVED_SHARE = 0.5  # pt_reserved_cores_perc
TOKENS = 16  # in a micro-batch of one sequence
SEEDS = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class Size:
    """A Llama over bytes: heads of 64, a perceptron 2.75 times as wide, separate embeddings."""

    name: str
    hidden: int
    layers: int
    pretrain_steps: int


SIZES = (Size("3M", 256, 4, 400), Size("13M", 512, 4, 300), Size("58M", 768, 8, 200))
QUICK_SIZES = (Size("1M", 128, 4, 100),)


@dataclass(frozen=True, slots=True)
class Scale:
    """How long everything is; a short study differs in nothing else."""

    turns: int = 5
    counted: int = 16
    """Steps of a turn that count, whole windows."""
    settling: int = UPDATE_INTERVAL
    """Steps of a turn before these: they fill caches, and the pipeline as it is in a run without turns."""
    opening: int = WARM_UP + UPDATE_INTERVAL
    """Steps before the first turn."""
    sequences: int = 64
    """Held-out sequences of an evaluation."""
    evaluate_every: int = 2
    """Turns from one evaluation to the next."""

    @property
    def steps(self) -> int:
        """Of a whole run."""
        return self.opening + self.turns * self.turn

    @property
    def turn(self) -> int:
        """Steps of a turn."""
        return self.settling + self.counted


FULL, QUICK = Scale(), Scale(turns=2, counted=8, sequences=8, evaluate_every=1)


@dataclass(frozen=True, slots=True)
class System:
    """One of those that are compared."""

    name: str
    kind: Literal["plain", "upstream", "ours"]
    torch_threads: int
    """Threads of forward and backward."""
    host_threads: int
    """Threads of the host update; they work beside the others only where `overlapped`."""
    overlapped: bool = False
    knobs: Mapping[str, Any] = field(default_factory=dict)
    """Upstream: the section `zenflow`, none for ZeRO-Offload. Ours: `ZenFlowConfig`."""


# Two cores each. With pt_reserved_cores_perc = 0.5 both runtimes bind the host update to the second of them. Upstream
# binds the training process to the first, where two threads of torch would wait for each other in a busy loop.
_ZENFLOW: dict[str, Any] = {
    "topk_ratio": TOPK_RATIO,
    "select_strategy": "step",
    "select_interval": SELECT_INTERVAL,
    "update_interval": UPDATE_INTERVAL,
    "full_warm_up_rounds": WARM_UP,
    "pt_reserved_cores_perc": RESERVED_SHARE,
}
_EXACT: dict[str, Any] = {
    "topk_ratio": 0.0,
    "update_interval": 1,
    "overlap_step": False,
    "pipeline": "bucket",
    "pt_reserved_cores_perc": 0.0,
}
NO_OFFLOAD = "no offload"
ZERO_OFFLOAD, SEQUENTIAL, OVERLAPPED = "ZeRO-Offload", "ZenFlow, sequential", "ZenFlow, overlapped"
EXACT, MEAN, REPLAY, REPLAY_SPLIT = "this, exact", "this, mean", "this, replay", "this, replay, 1 + 1 threads"
UPSTREAM_ZENFLOW = (SEQUENTIAL, OVERLAPPED)

SYSTEMS = {
    system.name: system
    for system in (
        System(NO_OFFLOAD, "plain", 2, 2),
        System(ZERO_OFFLOAD, "upstream", 2, 2),
        System(SEQUENTIAL, "upstream", 2, 2, knobs={**_ZENFLOW, "overlap_step": False}),
        System(OVERLAPPED, "upstream", 1, 1, overlapped=True, knobs={**_ZENFLOW, "overlap_step": True}),
        System(EXACT, "ours", 2, 2, knobs=_EXACT),
        System(MEAN, "ours", 2, 1, overlapped=True, knobs={**_ZENFLOW, "deferred_update": "mean"}),
        System(REPLAY, "ours", 2, 1, overlapped=True, knobs={**_ZENFLOW, "deferred_update": "replay"}),
        System(REPLAY_SPLIT, "ours", 1, 1, overlapped=True, knobs={**_ZENFLOW, "deferred_update": "replay"}),
    )
}


def document(system: System) -> dict[str, Any]:
    """DeepSpeed's configuration of a system."""
    zero: dict[str, Any] = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}}
    if system.knobs:
        zero["zenflow"] = dict(system.knobs)
    params = {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": WEIGHT_DECAY}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,  # left out, DeepSpeed clips the norm to 1
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": params},
        "zero_optimization": zero,
    }
