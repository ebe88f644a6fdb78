"""One run: a problem, a variant of the optimizer, a seed; and what all runs of the study share."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from accuracy.encoder import Classification, Encoder
from accuracy.language import LanguageScale, continuation
from accuracy.tasks import TASKS, Task, small_task

Variant = Literal[
    "AdamW", "replay", "guess", "guess-k0", "guess-k0-S8", "guess-k0-S16", "mean", "Twin-Flow", "DeepSpeed",
    "replay-S1", "replay-S2",
]  # fmt: skip
AHEAD: dict[Variant, dict[str, Any]] = {
    "guess": {},
    "guess-k0": {"topk_ratio": 0.0},
    "guess-k0-S8": {"topk_ratio": 0.0, "update_interval": 8},
    "guess-k0-S16": {"topk_ratio": 0.0, "update_interval": 16},
}
"""Replay in staggered windows with `look_ahead="guess"`; how each differs from the section of `document`."""
VARIANTS: tuple[Variant, ...] = ("AdamW", "replay", *AHEAD, "mean", "Twin-Flow", "DeepSpeed")
SHORTER: dict[Variant, int] = {"replay-S1": 1, "replay-S2": 2}
"""Replay with shorter windows, and a lag as long; measured where it is asked for."""
METHOD = 1  # raise it when a change here, in the models or in the tasks changes what a run computes
ADAMW: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
LANGUAGE = "language"
LOOKS, LOOK_EVERY = (0, 12, 24), 60
STALENESS = 4  # (S + L) / 2 of the section below


@dataclass(frozen=True, slots=True)
class Scale:
    """How long everything is; a short study differs in nothing else."""

    steps: int = 120
    batch: int = 16
    lr: float = 1e-4
    length: int = 32
    """Most tokens of an example."""
    trained: int = 3
    """The encoder's last layers, which are trained; the others and the embeddings are frozen."""
    language_steps: int = 50
    language_batch: int = 8
    language_lr: float = 1e-4
    dtype: str = "bfloat16"
    """Of weights, gradients and arithmetic; masters and moments are fp32."""
    language: LanguageScale = field(default_factory=LanguageScale)


class Problem(Protocol):
    """What is trained and judged."""

    def model(self, seed: int) -> Any:
        """In fp32, before the first step; its forward takes a batch and gives the loss."""

    def batches(self, size: int, seed: int) -> Iterator[tuple[Tensor, ...]]:
        """Endless batches."""

    def evaluate(self, model: Any) -> dict[str, float]:
        """Held-out figures."""


@dataclass(frozen=True)
class World:
    """What all runs of a study share."""

    scale: Scale
    cache: Path
    """Where encoded tasks and the pretrained language model are kept."""
    encoder: Path | None = None
    """The pretrained encoder's folder; None: a small one that was never trained, on a small task."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        found: torch.dtype = getattr(torch, self.scale.dtype)
        return found

    @property
    def encoder_digest(self) -> str | None:
        """Of the file of its weights."""
        if self.encoder is None:
            return None
        with (self.encoder / "model.safetensors").open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]

    def task(self, name: str) -> Task:
        """A task's text, from the cache where it has been made before."""
        file = self.cache / f"task-{name}-{METHOD}.pt"
        if not file.exists():
            self.cache.mkdir(parents=True, exist_ok=True)
            torch.save(small_task() if name == "small" else TASKS[name](), file.with_suffix(".part"))
            file.with_suffix(".part").replace(file)
        found: Task = torch.load(file, weights_only=False)  # our own file
        return found

    def problem(self, name: str, say: Callable[[str], None] = lambda _: None) -> Problem:
        """A task for the encoder, or the language model; made once and then read from the cache."""
        if name == LANGUAGE:
            return continuation(self.scale.language, self.dtype, self.cache, say)
        asked = (METHOD, name, self.scale.length, self.scale.trained, self.scale.dtype, self.encoder_digest)
        file = self.cache / f"encoded-{hashlib.sha256(repr(asked).encode()).hexdigest()[:16]}.pt"
        if not file.exists():
            task = self.task(name)
            texts = [one.first for one in task.train]
            encoder = Encoder.drawn(texts) if self.encoder is None else Encoder.read(self.encoder)
            say(f"encoding {name}")
            made = Classification.of(task, encoder, self.scale.length, self.scale.trained, self.dtype)
            torch.save(made, file.with_suffix(".part"))
            file.with_suffix(".part").replace(file)
        found: Classification = torch.load(file, weights_only=False)  # our own file
        return found

    def size(self, name: str) -> tuple[int, int, float]:
        """Steps, sequences a step and the learning rate of a problem."""
        scale = self.scale
        if name == LANGUAGE:
            return scale.language_steps, scale.language_batch, scale.language_lr
        return scale.steps, scale.batch, scale.lr


def document(batch: int, lr: float, dtype: str) -> dict[str, Any]:
    """The ds_config of the variants that are late, DeepSpeed's own too: the section of DeepSpeed's tutorial."""
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": 0.0,  # left out, DeepSpeed clips the norm to 1
        "bf16": {"enabled": dtype == "bfloat16"},
        "optimizer": {"type": "AdamW", "params": {"lr": lr, **ADAMW, "betas": list(ADAMW["betas"])}},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
            "zenflow": {
                "topk_ratio": 0.05,
                "select_strategy": "auto",
                "select_interval": "auto",
                "update_interval": 4,
                "full_warm_up_rounds": 0,
                "overlap_step": True,
            },
        },
    }


def rate_at(lr: float, step: int, steps: int) -> float:
    """The rate of a step, from 1 on: up over a tenth of the steps and then down to 0, linearly, as is usual on GLUE."""
    rise = max(1, steps // 10)
    return lr * min(step / rise, (steps - step + 1) / (steps - rise + 1))


class Movement:
    """How far the matrices move in `STALENESS` steps, relative to their norm, at some places of a run."""

    def __init__(self, model: nn.Module, steps: int) -> None:
        self._matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
        places = (*LOOKS, *range(LOOK_EVERY, steps, LOOK_EVERY))
        self._places = [place for place in places if place + STALENESS <= steps]
        self._before: dict[int, list[Tensor]] = {}
        self.found: dict[str, float] = {}

    def look(self, step: int) -> None:
        """After `step` steps."""
        if (place := step - STALENESS) in self._before:
            before = self._before.pop(place)
            moved = sum(
                float((a.detach().float() - b).square().sum()) for a, b in zip(self._matrices, before, strict=True)
            )
            self.found[str(place)] = math.sqrt(moved / sum(float(b.square().sum()) for b in before))
        if step in self._places:
            self._before[step] = [parameter.detach().float().clone() for parameter in self._matrices]


class Late:
    """`zenflow.ZenFlowAdamW` with the section of `document`, or synchronous with half of the state on the host."""

    def __init__(self, model: nn.Module, variant: Variant, asked: dict[str, Any], lr: float) -> None:
        from zenflow import ZenFlowAdamW, ZenFlowConfig

        if variant == "Twin-Flow":
            config = ZenFlowConfig.zero_offload(offload_ratio=0.5, host_threads=1)
        else:
            rule: Literal["replay", "mean"] = "mean" if variant == "mean" else "replay"
            config = replace(ZenFlowConfig.from_ds_config(asked), deferred_update=rule, host_threads=1)
            if variant in AHEAD:
                config = replace(config, look_ahead="guess", window_phase="staggered", **AHEAD[variant])
            if variant in SHORTER:
                config = replace(config, update_interval=SHORTER[variant], apply_lag=SHORTER[variant])
        self._optimizer = ZenFlowAdamW(model.parameters(), lr=lr, config=config, **ADAMW)
        self.knobs = config.to_python()

    def step(self, lr: float) -> None:
        """With the gradients that are there."""
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad()

    def finish(self) -> dict[str, Any]:
        """Apply what is pending; what the runtime says of the run: means over the steps where it knows them."""
        self._optimizer.flush()
        history = self._optimizer.history(wait=True)
        self._optimizer.close()
        figures: dict[str, Any] = {"knobs": self.knobs, "host_engine": self._optimizer.host_engine[0]}
        for name, values in (
            ("coverage", [step.coverage for step in history if step.coverage is not None]),
            ("staleness", [step.staleness_mean_steps for step in history if step.staleness_mean_steps is not None]),
        ):
            figures[name] = math.fsum(values) / len(values) if values else None
        return figures


class Synchronous:
    """torch's AdamW on fp32 masters of the weights."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        self._weights = list(model.parameters())
        self._masters = [nn.Parameter(weight.detach().float().clone()) for weight in self._weights]
        self._optimizer = torch.optim.AdamW(self._masters, lr=lr, **ADAMW)

    def step(self, lr: float) -> None:
        """With the gradients that are there."""
        for master, weight in zip(self._masters, self._weights, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.step()
        with torch.no_grad():
            for master, weight in zip(self._masters, self._weights, strict=True):
                weight.copy_(master)

    def finish(self) -> dict[str, Any]:
        """Nothing is pending."""
        return {}


def started(problem: Problem, seed: int, dtype: torch.dtype) -> Any:
    """The model that a run begins with: in the dtype of the weights, so that every variant has the same masters."""
    return problem.model(seed).to(dtype)


def train(world: World, name: str, variant: Variant, seed: int, problem: Problem) -> dict[str, Any]:
    """A run in this process.

    Returns:
        The problem's held-out figures at the start and, after a flush, at the end; training: means of the loss over
        tenths of the run; moved: of `Movement`; coverage and staleness, of the runtime; seconds.
    """
    steps, batch, lr = world.size(name)
    began, model = time.perf_counter(), started(problem, seed, world.dtype)
    figures: dict[str, Any] = {}
    if variant == "AdamW":
        optimizer: Synchronous | Late = Synchronous(model, lr)
    else:
        optimizer = Late(model, variant, document(batch, lr, world.scale.dtype), lr)
    feed, losses, movement = problem.batches(batch, 2000 + seed), [], Movement(model, steps)
    for number in range(1, steps + 1):
        movement.look(number - 1)
        loss = model(*next(feed))
        loss.backward()
        optimizer.step(rate_at(lr, number, steps))
        losses.append(float(loss.detach()))
    movement.look(steps)
    figures |= optimizer.finish()
    figures |= problem.evaluate(model)
    return {**figures, "training": tenths(losses), "moved": movement.found, "seconds": time.perf_counter() - began}


def tenths(losses: list[float]) -> list[float]:
    """Means over ten parts of equal length."""
    size = max(1, len(losses) // 10)
    return [math.fsum(losses[i : i + size]) / size for i in range(0, len(losses) - size + 1, size)]


def describe(world: World, name: str) -> dict[str, Any]:
    """What a run's result depends on, besides the variant and the seed."""
    steps, batch, lr = world.size(name)
    shared = {"method": METHOD, "problem": name, "steps": steps, "batch": batch, "lr": lr, "dtype": world.scale.dtype}
    adamw = {**ADAMW, "betas": list(ADAMW["betas"])}
    if name == LANGUAGE:
        return {**shared, "adamw": adamw, "language": asdict(world.scale.language)}
    task = world.task(name)
    kept = {
        "length": world.scale.length,
        "trained": world.scale.trained,
        "text": task.digest,
        "encoder": world.encoder_digest,
    }
    return {**shared, "adamw": adamw, **kept, "examples": [len(task.train), len(task.test)]}
