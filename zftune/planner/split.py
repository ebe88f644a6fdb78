"""A model split between the tiers as the runtime would split it, in pieces for the simulator."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import nn

from zenflow import ZenFlowConfig
from zenflow.host.places import padded
from zenflow.layout import ModelPlan, plan_model
from zenflow.ranks import buckets as exchanges
from zenflow.schedule import due_step, turn_of
from zftune.planner.model import ModelFacts

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_PIECES = 96
"""About so many pieces stand for all buckets: those of one layer that are shown in the same step are one."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Deferred buckets that the simulator moves as one."""

    stage: int
    """Layers whose forward ends before it is needed."""
    elements: int
    due: int
    """Steps after the close at which it is shown: 1 .. lag."""
    log_bytes: int
    """Of one step's entries in the log, padded."""
    scored: int = 0
    """Elements of weights whose gradient is read for its importance just before this piece is packed."""
    kept: int = 0
    """Resident and selected elements of these, which are then kept on the device."""
    before_layers: bool = False
    """Whether its gradients are whole only when backward is over."""
    buckets: int = 1
    turn: int = 0
    """Steps after a multiple of S in which its window closes."""


@dataclass(frozen=True, slots=True)
class Split:
    """A model's elements by tier, and its pieces."""

    pieces: tuple[Piece, ...]
    """In forward order."""
    layers: int
    resident: int
    selected: int
    deferred: int
    selecting: int
    """Elements of weights that have both selected and deferred columns."""
    scored: int
    """Elements of weights that are staged."""
    kept: int
    """Resident and selected elements of these."""
    buckets: int
    largest_log_bytes: int
    """Of the largest bucket, padded."""
    largest_bucket: int
    """In elements."""
    weights: int = 0
    """Number of trained parameters."""
    matrices: int = 0
    """Elements of weights that have columns."""
    words: int = 0
    """Numbers that ranks add up in a step: energies of columns, whether to skip it, who failed or has a gradient."""
    gathered: tuple[int, ...] = ()
    """Elements of each unit of FSDP2: the layers', in forward order, and of the rest."""
    reduced: tuple[int, ...] = ()
    """Those of them that are trained."""
    exchanged: tuple[int, ...] = ()
    """Elements of each bucket in which ranks that have whole weights (`zenflow.Partition`) average and gather them."""


@lru_cache(maxsize=8)
def _parameters(model: ModelFacts) -> list[nn.Parameter]:
    dtype = _DTYPES[model.dtype]
    return [nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")) for shape in model.weights]


@lru_cache(maxsize=512)
def _model_plan(model: ModelFacts, topk_ratio: float, offload_ratio: float, bucket_bytes: int) -> ModelPlan:
    parameters = _parameters(model)
    config = ZenFlowConfig(topk_ratio=topk_ratio, offload_ratio=offload_ratio, bucket_bytes=bucket_bytes)
    return plan_model(parameters, config, {id(parameters[number]) for number in model.transposed})


def model_plan(model: ModelFacts, config: ZenFlowConfig) -> ModelPlan:
    """The split that the runtime makes of this model."""
    return _model_plan(model, config.topk_ratio, config.offload_ratio, config.bucket_bytes)


@dataclass(frozen=True, slots=True)
class _Buckets:
    """A split without its schedule."""

    buckets: tuple[Piece, ...]
    """Each shown at once."""
    totals: Split
    """Without pieces."""


@lru_cache(maxsize=512)
def _buckets(model: ModelFacts, topk_ratio: float, offload_ratio: float, bucket_bytes: int) -> _Buckets:
    plan = _model_plan(model, topk_ratio, offload_ratio, bucket_bytes)
    resident = selected = selecting = scored = kept = matrices = 0
    words = 4  # whether to skip, ranks that failed, and how far a step moved their weights
    reduced = [0] * (model.layers + 1)
    buckets: list[Piece] = []
    for number, (shape, weight, stage) in enumerate(zip(model.weights, plan.weights, model.stages, strict=True)):
        elements = math.prod(shape)
        resident += elements - weight.offloaded * weight.rows
        selected += weight.selected * weight.rows
        selecting += elements if weight.selected and weight.deferred else 0
        matrices += elements if weight.columns else 0
        words += 1 + max(1, weight.columns)
        reduced[model.layers if number < model.before_layers else stage] += elements
        for place, (low, high) in enumerate(weight.bucket_slots, weight.first_bucket):
            if place == len(buckets):
                buckets.append(Piece(stage, 0, 1, 0, before_layers=False))
            before, size = buckets[place], (high - low) * weight.rows
            buckets[place] = replace(
                before,
                elements=before.elements + size,
                log_bytes=before.log_bytes + padded(size * model.element_bytes),
                before_layers=before.before_layers or number < model.before_layers,
            )
        if weight.deferred:
            staged = elements, elements - weight.deferred * weight.rows
            last = buckets[-1]  # which the simulator sends first
            buckets[-1] = replace(last, scored=last.scored + staged[0], kept=last.kept + staged[1])
            scored, kept = scored + staged[0], kept + staged[1]
    frozen = (model.parameters - model.trainable) // model.layers  # which have no place in a model's facts
    totals = Split(
        pieces=(),
        layers=model.layers,
        resident=resident,
        selected=selected,
        deferred=sum(bucket.elements for bucket in buckets),
        selecting=selecting,
        scored=scored,
        kept=kept,
        buckets=len(buckets),
        largest_log_bytes=max((bucket.log_bytes for bucket in buckets), default=0),
        largest_bucket=max((bucket.elements for bucket in buckets), default=0),
        weights=len(model.weights),
        matrices=matrices,
        words=words,
        gathered=(*(elements + frozen for elements in reduced[:-1]), reduced[-1]),
        reduced=tuple(reduced),
        exchanged=tuple(sum(map(torch.numel, one)) for one in exchanges(_parameters(model), bucket_bytes)),
    )
    return _Buckets(tuple(buckets), totals)


def totals_of(model: ModelFacts, config: ZenFlowConfig) -> Split:
    """The split without pieces, which is quick: it depends on neither S nor L."""
    return _buckets(model, config.topk_ratio, config.offload_ratio, config.bucket_bytes).totals


def split_of(model: ModelFacts, config: ZenFlowConfig, *, pieces: int = _PIECES) -> Split:
    """The split for the simulator, of about `pieces` pieces; more are more exact and slower."""
    found = _buckets(model, config.topk_ratio, config.offload_ratio, config.bucket_bytes)
    window, count = config.longest_window, len(found.buckets)
    shown = []
    for index, bucket in enumerate(found.buckets):
        due = due_step(0, window, config.lag, bucket=index, buckets=count)
        due = config.lag if config.staggers else min(due, window)
        shown.append(replace(bucket, due=due, turn=turn_of(config, index, count)))
    return replace(found.totals, pieces=_merged(shown, pieces))


def _merged(buckets: list[Piece], pieces: int) -> tuple[Piece, ...]:
    """Neighbours of one stage and one due step as one, up to a size at which there are about `pieces`."""
    most = sum(bucket.elements for bucket in buckets) / pieces
    merged: list[Piece] = []
    for bucket in buckets:
        last = merged[-1] if merged else None
        together = last is not None and _kind(last) == _kind(bucket)
        if together and last is not None and last.elements + bucket.elements <= most:
            merged[-1] = replace(
                last,
                elements=last.elements + bucket.elements,
                log_bytes=last.log_bytes + bucket.log_bytes,
                scored=last.scored + bucket.scored,
                kept=last.kept + bucket.kept,
                buckets=last.buckets + bucket.buckets,
            )
        else:
            merged.append(bucket)
    return tuple(merged)


def _kind(piece: Piece) -> tuple[int, int, int, bool]:
    return piece.stage, piece.due, piece.turn, piece.before_layers
