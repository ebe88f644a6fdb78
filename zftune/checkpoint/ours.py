"""The checkpoints of this runtime's optimizers: read to where every pending update is applied, and written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from zenflow import ConfigError, ZenFlowConfig, ZenFlowError, ZenFlowOptimizer
from zenflow.checkpoint_format import HEADER, Header, Saved, SavedWeight, read, shapes
from zenflow.layout import WeightPlan, plan_model
from zenflow.rules import RULES as ZENFLOW_RULES
from zenflow.rules import Rule
from zftune.checkpoint.sources import MODEL_STATES, Source, model_of
from zftune.checkpoint.state import MOMENTS, RULES, Group, TrainingState, Weight, names_of
from zftune.checkpoint.zero import engine_state, in_bf16, masters_alone, optimizer_file
from zftune.ds_config.text import load
from zftune.errors import BadInputError


def first_knobs(ds_config: Mapping[str, Any] | str | None) -> ZenFlowConfig:
    """The knobs of the first step: ZeRO-Offload's, with a configuration's clipping and accumulation.

    Raises:
        BadInputError: it cannot be read, or a field has a value that is not allowed.
    """
    if ds_config is None:
        return ZenFlowConfig.zero_offload(pipeline="bucket")
    try:
        wanted = ZenFlowConfig.from_ds_config(load(ds_config))
    except ConfigError as error:
        raise BadInputError(f"--ds-config: {error}") from error
    return ZenFlowConfig.zero_offload(
        pipeline="bucket",
        max_grad_norm=wanted.max_grad_norm,
        gradient_accumulation_steps=wanted.gradient_accumulation_steps,
    )


def our_state_dict(training: TrainingState, config: ZenFlowConfig) -> dict[str, Any]:
    """The run as `ZenFlowOptimizer.state_dict()` would have it."""
    rule = ZENFLOW_RULES[training.rule]
    weights: list[SavedWeight] = []
    state: dict[int, dict[str, Any]] = {}
    whole = plan_model([nn.Parameter(weight.master) for weight in training.weights], config, set())
    for number, (weight, plan) in enumerate(zip(training.weights, whole.weights, strict=True)):
        started = bool(weight.moments)
        weights.append(SavedWeight.fresh(plan, started=started, flat=started and not plan.columns))
        state[number] = _tensors(weight, plan, rule)
    header = Header(
        rule=training.rule,
        made_with=config,
        config=config,
        change=None,
        begun=any(weight.started for weight in weights),
        step=training.steps,
        window_steps=0,
        buckets=whole.buckets,
        hypers=[asdict(rule.hyper(group.settings)) for group in training.groups],
        weights=weights,
        flushed=False,
        imported=True,
        kept=None,
    )
    groups = training.param_groups()
    groups[0][HEADER] = header.to_json()
    return {"state": state, "param_groups": groups}


def our_documents(training: TrainingState, optimizer: dict[str, Any]) -> dict[str, Any]:
    """The files of a checkpoint as DeepSpeed's engine saves it under `zftune run`, by name."""
    model = training.tensors(masters=False)
    if training.loss_scaler:
        optimizer = {**optimizer, "loss_scaler": training.loss_scaler}  # as the engine's optimizer keeps it
    masters = [
        torch.cat([torch.empty(0), *(weight.master.reshape(-1) for weight in group.weights)])
        for group in training.groups
    ]
    engine = engine_state(training, model)
    return {
        MODEL_STATES: {**engine, "optimizer": optimizer},
        optimizer_file(0, bf16=in_bf16(training)): masters_alone(masters, engine["ds_config"], engine["ds_version"]),
    }


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


_SAMPLE = 1 << 16  # elements of a weight
_MOST_DIFFERENT = 0.01  # share of elements whose weight is not its master's: another's would be far more


def read_ours(source: Source, model: Mapping[str, torch.Tensor] | None) -> TrainingState:
    """Read a checkpoint of ours and apply what it has logged, as `flush()` would have done.

    Args:
        model: the model's `state_dict` where the source has none.

    Raises:
        BadInputError: it is truncated, of another model, or of a rule that nothing else has.
    """
    what, document = source.what, source.document
    tensors = dict(model if model is not None else model_of(document, what))
    groups = document["optimizer"]["param_groups"]
    try:
        header = Header.from_json(groups[0][HEADER])
        if header.rule not in RULES:
            raise BadInputError(f"{what}: is of the rule {header.rule}; it must be of {' or '.join(RULES)}")
        names = _names(header, document, tensors, what)
        parameters = [[nn.Parameter(tensors[name].detach(), requires_grad=False) for name in of] for of in names]
        numbered = [
            {**_settings(group), "params": of_group} for group, of_group in zip(groups, parameters, strict=True)
        ]
        saved = read(document["optimizer"], numbered, ZENFLOW_RULES[header.rule])
        training = TrainingState(header.rule, [], tensors)
        _fill(training, saved, names, parameters)
    except ZenFlowError as error:
        raise BadInputError(f"{what}: its optimizer cannot be read: {error}") from error
    return training


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names", HEADER)}


def _names(
    header: Header, document: Mapping[str, Any], model: Mapping[str, torch.Tensor], what: str
) -> list[list[str]]:
    optimizer = document["optimizer"]
    numbers = [list(group["params"]) for group in optimizer["param_groups"]]
    shapes = [[_shape(optimizer["state"].get(number), number, what) for number in of_group] for of_group in numbers]
    given = [group.get("param_names") for group in optimizer["param_groups"]]
    saved = dict(zip((number for of_group in numbers for number in of_group), header.weights, strict=True))

    def fits(group: int, place: int, name: str) -> bool:
        number = numbers[group][place]
        return _rounds_to(saved[number], optimizer["state"][number], model[name])

    return names_of(shapes, given, model, what=what, buffers=document.get("buffer_names") or (), fits=fits)


def _shape(state: Any, number: object, what: str) -> tuple[int, ...]:
    parts = state if isinstance(state, Mapping) else {}
    master, shape = parts.get("master"), parts.get("shape")
    if isinstance(shape, torch.Tensor):  # of a parameter that has always been frozen
        return tuple(shape.tolist())
    if not isinstance(master, torch.Tensor):
        raise BadInputError(f'{what}: state[{number!r}]["master"] is missing: the checkpoint is truncated')
    return tuple(master.shape)


def _rounds_to(weight: SavedWeight, tensors: Mapping[str, torch.Tensor], parameter: torch.Tensor) -> bool:
    if not weight.started:
        return True
    master, plan = tensors["master"], weight.plan
    if plan.columns:
        settled = (~_on_the_way(weight, tensors["slots"])).nonzero().squeeze(1)
        rows = slice(0, max(1, _SAMPLE // max(1, len(settled))))
        master, parameter = (plan.view(stream)[rows].index_select(1, settled) for stream in (master, parameter))
    equal = master.to(parameter.dtype) == parameter
    return int((~equal).sum()) <= _MOST_DIFFERENT * equal.numel()


def _on_the_way(weight: SavedWeight, slots: torch.Tensor) -> torch.Tensor:
    """[columns] bool: whether the host has updated a column whose weights were not shown yet."""
    found = torch.zeros(len(slots), dtype=torch.bool)
    for bucket in weight.unsettled_buckets:
        low, high = weight.plan.bucket_slots[bucket]
        found |= (slots >= low) & (slots < high)
    return found


def _fill(
    training: TrainingState, saved: Saved, names: Sequence[Sequence[str]], parameters: Sequence[Sequence[nn.Parameter]]
) -> None:
    number, uneven = 0, 0
    for place, (settings, of_names, of_parameters) in enumerate(zip(saved.groups, names, parameters, strict=True)):
        weights = []
        for name, parameter in zip(of_names, of_parameters, strict=True):
            if saved.header.weights[number].started:
                tensors = _flushed(saved, number, place, parameter)
                moments, counts = tuple(tensors[moment] for moment in MOMENTS), tensors["count"]
                weights.append(Weight(name, tensors["master"], moments, int(counts.max())))
                uneven += bool((counts != counts[0]).any())
            else:
                weights.append(Weight(name, parameter.detach().float(), (), 0))
            number += 1
        training.groups.append(Group(_settings(settings), weights))
    if uneven:
        training.notes.append(
            f"{uneven} weights have columns that were updated less often than others (deferred_update mean): "
            "the greatest count stands for all"
        )


def _flushed(saved: Saved, number: int, group: int, parameter: nn.Parameter) -> Mapping[str, torch.Tensor]:
    """One parameter's tensors after a flush: an optimizer of it alone goes on from what was saved, and flushes.

    What somebody else wrote to the weight since its last update is read into the master, as in training.
    """
    header, settings = saved.header, saved.groups[group]
    config = replace(header.config, ledger=False, host_threads=None)
    alone: Header = replace(
        header,
        made_with=config,
        config=config,
        change=None,
        hypers=[header.hypers[group]] if header.hypers else [],
        weights=[header.weights[number]],
    )
    packed = {**settings, "params": [0], HEADER: alone.to_json()}
    weights = nn.Parameter(parameter.detach().clone())
    optimizer = ZenFlowOptimizer(
        [{**settings, "params": [weights]}], dict(settings), ZENFLOW_RULES[header.rule], config=config
    )
    try:
        optimizer.load_state_dict({"state": {0: saved.tensors[number]}, "param_groups": [packed]})
        optimizer.flush()
        flushed: Mapping[str, torch.Tensor] = optimizer.state_dict()["state"][0]
        return flushed
    finally:
        optimizer.abandon()
