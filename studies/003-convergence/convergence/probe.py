"""What can be measured while training is still synchronous, and might tell whether late updates will hurt.

A window of S steps with lag L uses gradients that are (S + L) / 2 steps old in the mean. So the same batch's gradient
is taken at the weights of step t and again some steps later; torch's AdamW on fp32 weights trains in between.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from convergence.model import SmallGPT
from convergence.setting import Setting
from convergence.train import ADAMW, World, config_of, feed_of, held_out_loss, rate_at, start

DISTANCES = (1, 2, 4, 8)
EARLY = (0, 12, 24)
LATE_EVERY = 60
PROBE_SEQUENCES = 32
_INSTRUMENT_STEPS = 32


def probe(world: World, setting: Setting) -> dict[str, Any]:
    """Train synchronously and look back.

    Returns:
        held_out: as of any run; probes: for each place in the run and each distance in steps `moved` (norm of the
        change of the matrices over their norm), `turned` (norm of the change of the same batch's gradient over the
        gradient's norm), `cosine` between the two gradients, and `gained` (what the loss of that batch fell by).
    """
    began, scale = time.perf_counter(), world.scale
    model = start(world, setting.regime, setting.seed)
    text = world.texts[setting.regime]
    batch = next(text.batches(PROBE_SEQUENCES, 3000 + setting.seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.lr, **ADAMW)
    places = [p for p in (*EARLY, *range(LATE_EVERY, scale.steps, LATE_EVERY)) if p + max(DISTANCES) <= scale.steps]
    feed = feed_of(world, setting)
    looks: dict[int, Look] = {}
    probes: dict[str, dict[str, dict[str, float]]] = {str(place): {} for place in places}
    for step in range(scale.steps + 1):
        due = {place: step - place for place in places if step - place in DISTANCES}
        if due or step in places:
            now = look(model, batch)
            looks |= {step: now} if step in places else {}
            for place, steps in due.items():
                probes[str(place)][str(steps)] = compare(looks[place], now)
        if step == scale.steps:
            break
        optimizer.param_groups[0]["lr"] = rate_at(setting, step + 1, scale.steps)
        model(next(feed)).backward()
        optimizer.step()
        optimizer.zero_grad()
    held_out = held_out_loss(model, text.evaluation(scale.sequences))
    return {"held_out": held_out, "probes": probes, "seconds": time.perf_counter() - began}


def instrument(world: World, setting: Setting) -> dict[str, Any]:
    """What the runtime reports of the movement in steps 9 to 32, and what it would without a sample.

    Returns:
        movement_percent, and whole_percent: where every deferred column is in the sample.
    """
    import zenflow
    from zenflow import deferred
    from zftune.quality import movement_percent

    def measured(sample: int) -> float | None:
        model = start(world, setting.regime, setting.seed).to(torch.bfloat16)
        optimizer = zenflow.ZenFlowAdamW(model.parameters(), lr=setting.lr, config=config_of(setting), **ADAMW)
        feed = feed_of(world, setting)
        with mock.patch.object(deferred, "_SAMPLED_ELEMENTS", sample):
            for _ in range(_INSTRUMENT_STEPS):
                model(next(feed)).backward()
                optimizer.step()
                optimizer.zero_grad()
            history = optimizer.history(wait=True, after=_INSTRUMENT_STEPS // 4)
            optimizer.close()
        return movement_percent(history)

    began = time.perf_counter()
    found = {"movement_percent": measured(deferred._SAMPLED_ELEMENTS), "whole_percent": measured(1 << 40)}
    return {**found, "seconds": time.perf_counter() - began}


Look = tuple[float, list[Tensor], list[Tensor]]
"""Loss, matrices and their gradients."""


def look(model: SmallGPT, batch: Tensor) -> Look:
    """The batch's loss and gradient at the weights as they are; `.grad` stays as it was."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    loss = model(batch)
    gradients = torch.autograd.grad(loss, matrices)
    return float(loss.detach()), [matrix.detach().clone() for matrix in matrices], list(gradients)


def compare(before: Look, after: Look) -> dict[str, float]:
    """How far apart two looks are."""
    loss, weights, gradients = before
    later_loss, later_weights, later_gradients = after
    product = math.fsum(float((a * b).sum()) for a, b in zip(gradients, later_gradients, strict=True))
    return {
        "moved": distance(weights, later_weights) / norm(weights),
        "turned": distance(gradients, later_gradients) / norm(gradients),
        "cosine": product / (norm(gradients) * norm(later_gradients)),
        "gained": loss - later_loss,
    }


def norm(tensors: Sequence[Tensor]) -> float:
    """Euclidean norm of all of them together."""
    return math.sqrt(math.fsum(float(tensor.square().sum()) for tensor in tensors))


def distance(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Norm of the difference."""
    return norm([x - y for x, y in zip(a, b, strict=True)])
