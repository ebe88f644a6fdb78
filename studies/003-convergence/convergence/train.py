"""Runs one setting with the runtime itself."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from convergence import model as sizes
from convergence.data import Text
from convergence.model import SmallGPT
from convergence.setting import RULES, Regime, Setting

if TYPE_CHECKING:
    from zenflow import ZenFlowConfig

METHOD = 1  # raise it when a change here, in the model or in the data changes what a run computes
ADAMW: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
SELECT_INTERVAL = 32
BUCKETS_OF = 20  # training losses are kept as means over so many steps


@dataclass(frozen=True, slots=True)
class Scale:
    """How long everything is; a short study differs in nothing else."""

    steps: int = 300
    batch: int = 8
    pretrain_steps: int = 2000
    pretrain_lr: float = 2e-3
    sequences: int = 512
    """Held-out sequences at the end of a run."""
    on_the_way: int = 128
    """Held-out sequences at a third and at two thirds."""


@dataclass(frozen=True)
class World:
    """What all runs of a study share."""

    scale: Scale
    texts: Mapping[Regime, Text]
    cache: Path
    """Where pretrained models are kept."""

    def describe(self) -> dict[str, Any]:
        """What a run's result depends on besides its setting."""
        return {
            "method": METHOD,
            "scale": asdict(self.scale),
            "adamw": {**ADAMW, "betas": list(ADAMW["betas"])},
            "select_interval": SELECT_INTERVAL,
            "model": {"width": sizes.WIDTH, "layers": sizes.LAYERS, "heads": sizes.HEADS, "context": sizes.CONTEXT},
            "texts": {text.name: text.digest for text in self.texts.values()},
        }


def rate_at(setting: Setting, step: int, steps: int) -> float:
    """Learning rate of a step, from 1 on: constant, or up over a tenth of the steps and then down to 0, linearly."""
    if setting.schedule == "constant":
        return setting.lr
    rise = max(1, steps // 10)
    return setting.lr * min(step / rise, (steps - step + 1) / (steps - rise + 1))


def held_out_loss(model: SmallGPT, sequences: Tensor) -> float:
    """Mean loss in nats a byte; sequences: [n, CONTEXT + 1]."""
    with torch.no_grad():
        parts = sequences.split(64)
        return math.fsum(float(model(part)) * len(part) for part in parts) / len(sequences)


def start(world: World, regime: Regime, seed: int) -> SmallGPT:
    """The model that a run begins with, in fp32 but rounded to bf16, so that every method has the same masters."""
    model = pretrained(world, seed) if regime == "fine-tuning" else SmallGPT(seed)
    return model.to(torch.bfloat16).float()


def pretrained(world: World, seed: int) -> SmallGPT:
    """A model trained with AdamW on the other regime's text: warm-up, then a cosine down to 0. Kept in `cache`."""
    scale, text, model = world.scale, world.texts["from scratch"], SmallGPT(seed)
    name = f"{text.digest}-{sizes.WIDTH}x{sizes.LAYERS}-{scale.pretrain_steps}x{scale.batch}-{METHOD}-{seed}.pt"
    file = world.cache / name
    if file.exists():
        model.load_state_dict(torch.load(file, weights_only=True))
        return model
    optimizer = torch.optim.AdamW(model.parameters(), lr=scale.pretrain_lr, weight_decay=0.01)
    feed, steps = text.batches(scale.batch, 1000 + seed), scale.pretrain_steps
    for step in range(steps):
        share = min((step + 1) / (0.05 * steps), 0.5 + 0.5 * math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = scale.pretrain_lr * min(1.0, share)
        model(next(feed)).backward()
        optimizer.step()
        optimizer.zero_grad()
    world.cache.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".part")
    torch.save(model.state_dict(), partial)
    partial.replace(file)
    return model


def feed_of(world: World, setting: Setting) -> Iterator[Tensor]:
    """The batches of a run: the same for every method."""
    return world.texts[setting.regime].batches(world.scale.batch, 2000 + setting.seed)


def config_of(setting: Setting) -> ZenFlowConfig:
    """The runtime's knobs for a setting."""
    import zenflow  # not where DeepSpeed runs

    late: dict[str, Any] = {"apply_lag": setting.lag} if setting.lag else {"overlap_step": False}
    if setting.method in RULES:
        late["deferred_update"] = setting.method
    elif setting.method in ("coast", "staggered", "guess"):
        late["look_ahead"] = "guess" if setting.method == "guess" else "coast"
        late["window_phase"] = "together" if setting.method == "coast" else "staggered"
    if setting.bucket_kib:
        late["bucket_bytes"] = setting.bucket_kib << 10
    return zenflow.ZenFlowConfig(
        topk_ratio=setting.ratio,
        update_interval=setting.interval,
        select_interval=SELECT_INTERVAL,
        full_warm_up_rounds=setting.warm_up,
        host_threads=1,
        **late,
    )


def train(world: World, setting: Setting) -> dict[str, Any]:
    """One run with `ZenFlowAdamW` on bf16 weights with fp32 masters.

    Returns:
        held_out: loss after the flush; visible: before it, on fewer sequences, with flushed: after it on the same;
        start, on_the_way: on these too; training: means over `BUCKETS_OF` steps; coverage, staleness: means over the
        steps where the runtime knows them; seconds.
    """
    import zenflow

    began, scale = time.perf_counter(), world.scale
    model = start(world, setting.regime, setting.seed).to(torch.bfloat16)
    text = world.texts[setting.regime]
    few, many = text.evaluation(scale.on_the_way), text.evaluation(scale.sequences)
    figures: dict[str, Any] = {"start": held_out_loss(model, few), "on_the_way": {}}
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), lr=setting.lr, config=config_of(setting), **ADAMW)

    def step(number: int, batch: Tensor) -> float:
        optimizer.param_groups[0]["lr"] = rate_at(setting, number, scale.steps)
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    figures["training"] = _steps(world, setting, step, lambda: held_out_loss(model, few), figures["on_the_way"])
    figures["visible"] = held_out_loss(model, few)
    optimizer.flush()
    figures["flushed"], figures["held_out"] = held_out_loss(model, few), held_out_loss(model, many)
    history = optimizer.history(wait=True)
    optimizer.close()
    for name, values in (
        ("coverage", [s.coverage for s in history if s.coverage is not None]),
        ("staleness", [s.staleness_mean_steps for s in history if s.staleness_mean_steps is not None]),
    ):
        figures[name] = math.fsum(values) / len(values) if values else None
    return {**figures, "host_engine": optimizer.host_engine[0], "seconds": time.perf_counter() - began}


def train_ahead(world: World, setting: Setting) -> dict[str, Any]:
    """The control: torch's AdamW on fp32 masters; gradients are taken where the weights will be `missing` steps later.

    The bf16 weights are shown as a bucket is on average with S and L, moved on by the last update's momentum.

    Returns:
        held_out, flushed: loss of the masters, rounded; start, on_the_way: as shown; training, seconds.
    """
    began, scale = time.perf_counter(), world.scale
    model = start(world, setting.regime, setting.seed).to(torch.bfloat16)
    masters = [torch.nn.Parameter(weight.detach().float()) for weight in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=setting.lr, **ADAMW)
    text, beta = world.texts[setting.regime], ADAMW["betas"][0]
    few, many = text.evaluation(scale.on_the_way), text.evaluation(scale.sequences)
    missing = (setting.interval - 1) / 2 + setting.lag
    further = beta * (1 - beta**missing) / (1 - beta)
    figures: dict[str, Any] = {"start": held_out_loss(model, few), "on_the_way": {}}

    def step(number: int, batch: Tensor) -> float:
        lr = optimizer.param_groups[0]["lr"] = rate_at(setting, number, scale.steps)
        loss = model(batch)
        loss.backward()
        for master, weight in zip(masters, model.parameters(), strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        decayed = [master.detach() * (1 - lr * ADAMW["weight_decay"]) for master in masters]
        optimizer.step()
        with torch.no_grad():
            for master, weight, before in zip(masters, model.parameters(), decayed, strict=True):
                weight.copy_(master + further * (master - before))
        return float(loss.detach())

    figures["training"] = _steps(world, setting, step, lambda: held_out_loss(model, few), figures["on_the_way"])
    with torch.no_grad():
        for master, weight in zip(masters, model.parameters(), strict=True):
            weight.copy_(master)
    figures["flushed"], figures["held_out"] = held_out_loss(model, few), held_out_loss(model, many)
    return {**figures, "seconds": time.perf_counter() - began}


def _steps(
    world: World,
    setting: Setting,
    step: Callable[[int, Tensor], float],
    evaluate: Callable[[], float],
    on_the_way: dict[str, float],
) -> list[float]:
    feed, steps = feed_of(world, setting), world.scale.steps
    losses = []
    for number in range(1, steps + 1):
        losses.append(step(number, next(feed)))
        if number in (steps // 3, 2 * steps // 3):
            on_the_way[str(number)] = evaluate()
    return [math.fsum(losses[i : i + BUCKETS_OF]) / BUCKETS_OF for i in range(0, steps - BUCKETS_OF + 1, BUCKETS_OF)]
