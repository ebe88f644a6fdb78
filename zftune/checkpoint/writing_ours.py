"""A state that our optimizers go on from, whatever their knobs are.

All columns are deferred and nothing is selected or pending, so that the host holds the state and the GPU needs no room
for it. The first step is ZeRO-Offload's; with it the optimizer's own knobs come into force.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from zenflow import ConfigError, ZenFlowConfig
from zenflow.checkpoint_format import HEADER, Header, SavedWeight, shapes
from zenflow.layout import WeightPlan
from zenflow.rules import RULES as ZENFLOW_RULES
from zenflow.rules import Rule
from zftune.checkpoint.engine_files import engine_state, in_bf16, masters_alone, optimizer_file
from zftune.checkpoint.sources import MODEL_STATES
from zftune.checkpoint.state import TrainingState, Weight
from zftune.errors import BadInputError


def first_knobs(ds_config: Mapping[str, Any] | str | None) -> ZenFlowConfig:
    """The knobs of the first step: ZeRO-Offload's, with a configuration's clipping and accumulation.

    Args:
        ds_config: DeepSpeed's configuration, or the path of its file; None: neither.

    Raises:
        BadInputError: it cannot be read, or a field has a value that is not allowed.
    """
    if ds_config is None:
        return ZenFlowConfig.zero_offload(pipeline="bucket")
    try:
        wanted = ZenFlowConfig.from_ds_config(ds_config)
    except ConfigError as error:
        raise BadInputError(f"--ds-config: {error}") from error
    return ZenFlowConfig.zero_offload(
        pipeline="bucket",
        max_grad_norm=wanted.max_grad_norm,
        gradient_accumulation_steps=wanted.gradient_accumulation_steps,
    )


def our_state_dict(training: TrainingState, config: ZenFlowConfig) -> dict[str, Any]:
    """The run as `ZenFlowOptimizer.state_dict()` would have it.

    Args:
        training: the run.
        config: the knobs of the first step.
    """
    rule = ZENFLOW_RULES[training.rule]
    weights: list[SavedWeight] = []
    state: dict[int, dict[str, Any]] = {}
    buckets = 0
    for number, weight in enumerate(training.weights):
        plan = _plan(weight.master.shape, config.bucket_bytes, buckets)
        buckets += len(plan.bucket_slots)
        started = bool(weight.moments)
        weights.append(
            SavedWeight(
                plan,
                started,
                flat=started and not plan.columns,
                pending=False,
                log=[],
                flights=[],
                auto=[],
                ledger=[],
                firings=1,
            )
        )
        state[number] = _tensors(weight, plan, rule)
    header = Header(
        rule=training.rule,
        made_with=config,
        config=config,
        change=None,
        begun=any(weight.started for weight in weights),
        step=training.steps,
        window_steps=0,
        buckets=buckets,
        hypers=[_hyper(rule, group.settings) for group in training.groups],
        weights=weights,
        flushed=False,
        imported=True,
    )
    groups = _groups(training)
    groups[0][HEADER] = header.to_json()
    return {"state": state, "param_groups": groups}


def our_documents(training: TrainingState, optimizer: dict[str, Any]) -> dict[str, Any]:
    """The files of a checkpoint as DeepSpeed's engine saves it under `zftune run`, by name.

    Args:
        training: the run.
        optimizer: as `our_state_dict` has it.
    """
    model = training.tensors(masters=False)
    if training.loss_scaler:
        optimizer = {**optimizer, "loss_scaler": training.loss_scaler}  # as the engine's optimizer keeps it
    masters = [
        torch.cat([torch.empty(0), *(weight.master.reshape(-1) for weight in group.weights)])
        for group in training.groups
    ]
    engine = engine_state(training, training.groups, model, ranks=1)
    return {
        MODEL_STATES: {**engine, "optimizer": optimizer},
        optimizer_file(0, bf16=in_bf16(training)): masters_alone(masters, engine["ds_config"], engine["ds_version"]),
    }


def _groups(training: TrainingState) -> list[dict[str, Any]]:
    """Settings of the groups, and which weights they have, numbered through."""
    groups: list[dict[str, Any]] = []
    number = 0
    for group in training.groups:
        numbers = range(number, number + len(group.weights))
        number = numbers.stop
        names = [weight.name for weight in group.weights]
        groups.append({**group.settings, "params": list(numbers), "param_names": names})
    return groups


def _hyper(rule: Rule, settings: Mapping[str, Any]) -> dict[str, float]:
    return asdict(rule.hyper(settings))


def _plan(shape: Sequence[int], bucket_bytes: int, first_bucket: int) -> WeightPlan:
    if len(shape) < 2 or 0 in shape:
        return WeightPlan(0, 0, False, 0, 0, 1, first_bucket)
    columns = shape[-1]
    rows = torch.Size(shape).numel() // columns
    return WeightPlan(rows, columns, False, 0, 0, max(1, bucket_bytes // (4 * rows)), first_bucket)


def _tensors(weight: Weight, plan: WeightPlan, rule: Rule) -> dict[str, Any]:
    tensors: dict[str, Any] = {
        name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in shapes(plan, weight.master, rule).items()
    }
    tensors["slots"].fill_(-1)
    tensors["log"], tensors["shown"] = (), ()
    if weight.moments:
        for name, stream in zip(("master", *rule.moment_names), (weight.master, *weight.moments), strict=True):
            tensors[name].copy_(stream)
        tensors["count"].fill_(weight.count)
        if plan.columns:
            tensors["slots"].copy_(torch.arange(plan.columns))
    return tensors
