"""Saving a training run, and taking it up again bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from zenflow import checkpoint_format, torch_state
from zenflow.checkpoint_format import BY_COLUMN, HEADER, Header, Saved, SavedEntry, SavedUpdate, SavedWeight, shapes
from zenflow.config import LIVE_KNOBS, ZenFlowConfig
from zenflow.device import Arrived
from zenflow.errors import ZenFlowError
from zenflow.full_state import Unflush, whole_tier
from zenflow.host.tasks import Control
from zenflow.layout import ModelPlan
from zenflow.model import Groups, Split
from zenflow.rules import Hyper
from zenflow.sharded import Rows, whole_shape
from zenflow.split_state import move_state
from zenflow.training import Training
from zenflow.weight import WeightState

OPEN = (
    "a state_dict() of sharded parameters was taken in the middle of a window: torch.distributed.checkpoint could not "
    "load it again: flush() first, use zenflow.distributed.save(), or save a file for each rank"
)

_Controls = dict[tuple[int, float, float], Control]
"""By step and values: a weight whose gradient the user multiplied has its own."""


def save(training: Training, groups: Groups, *, room: bool) -> dict[str, Any]:
    """Copies of all state on the CPU; waits for the host work that was submitted, applies nothing that is not due.

    `room`: zeros for what has no state yet, into which torch's functions can load. Raises HostEngineError if host work
    failed.
    """
    training.settle()
    training.importance.settle()
    parameters = [parameter for group in groups for parameter in group["params"]]
    known = {id(weight.parameter): weight for weight in training.weights_of(groups)}
    weights = [known[id(parameter)] for parameter in parameters]
    header = Header(
        rule=training.rule.name,
        made_with=training.made_with,
        config=training.config,
        change=training.coming,
        begun=training.begun,
        step=training.clock.step,
        window_steps=training.clock.window_steps,
        buckets=training.model.windows.buckets,
        hypers=[asdict(hyper) for hyper in training.hypers],
        weights=[_saved_weight(training, weight) for weight in weights],
        flushed=training.shows_flushed or training.restored_flushed,
        imported=False,
        kept=None if training.kept is None else dict(training.kept),
    )
    training.last_save.of_state()
    index = {id(parameter): number for number, parameter in enumerate(parameters)}
    packed = [{**group, "params": [index[id(parameter)] for parameter in group["params"]]} for group in groups]
    packed[0][HEADER] = header.to_json()
    if training.shards is not None and any(weight.log or weight.unsettled_buckets for weight in header.weights):
        warnings.warn(OPEN, stacklevel=4)
    return {
        "state": {number: _tensors(training, weight, room) for number, weight in enumerate(weights)},
        "param_groups": packed,
    }


def _saved_weight(training: Training, weight: WeightState) -> SavedWeight:
    entries = [] if weight.deferred is None else [entry for entry, _ in weight.deferred.logged()]
    rows = weight.parameter
    plan = weight.plan
    if isinstance(rows, Rows) and plan.columns:  # a header is the same on all ranks
        plan = replace(plan, rows=rows.whole_rows)
    return SavedWeight(
        plan=plan,
        started=weight.started,
        flat=weight.started and weight.split.flat,
        pending=weight.pending,
        selection_begun=weight.selection_begun,
        chosen=weight.chosen,
        log=[
            SavedEntry(
                entry.step,
                asdict(entry.hyper),
                None if entry.control is None else tuple(entry.control.values.tolist()),
            )
            for entry in entries
        ],
        logged=[] if weight.deferred is None else [len(part.log) for part in weight.deferred.parts],
        flights=[saved for saved, _ in _flights(training, weight)],
        ahead=_ahead(weight),
        auto=training.auto.sums_of(weight) if training.begun else [],
        ledger=[] if training.runtime.ledger is None else list(training.runtime.ledger.totals(weight.name)),
        firings=training.gradients.expected(weight),
    )


def _flights(training: Training, weight: WeightState) -> list[tuple[SavedUpdate, torch.Tensor]]:
    """Of each bucket in flight, what is said of it and its result."""
    first, flights = weight.plan.first_bucket, training.model.windows.in_flight
    mine = ((flight.due, window) for flight in flights for of, window in flight.parts() if of is weight)
    return [(window.saved(window.part.index - first, due), window.result) for due, window in mine]


def _ahead(weight: WeightState) -> list[int]:
    return sorted(number - weight.plan.first_bucket for number in weight.unsettled - weight.in_flight)


def _shown(weight: WeightState, place: int) -> torch.Tensor:
    """What training sees of a late bucket."""
    assert weight.deferred is not None
    if weight.shown is not None:
        return weight.shown[place]
    return weight.deferred.on_host(weight.matrix(), weight.deferred.parts[place].columns)


def _tensors(training: Training, weight: WeightState, room: bool) -> dict[str, Any]:
    if not weight.started and not (room and weight.parameter.requires_grad):
        return {"shape": torch.tensor(whole_shape(weight.parameter), dtype=torch.int64, device="cpu")}
    tensors = _tensors_here(training, weight)
    return _of_all_ranks(weight, weight.parameter, tensors) if isinstance(weight.parameter, Rows) else tensors


def _of_all_ranks(weight: WeightState, rows: Rows, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Rows of this rank as parts of what all ranks have, which `torch.distributed.checkpoint` can share out anew."""
    found = {
        name: rows.wrapped(value) if isinstance(value, torch.Tensor) and name not in BY_COLUMN else value
        for name, value in tensors.items()
    }
    for name in ("log", "shown"):  # no tuples, of which it would keep one rank's
        parts = (columns.reshape(len(columns), *rows.shape[:-1]) for columns in tensors[name])
        found[name] = {str(number): rows.wrapped_columns(part) for number, part in enumerate(parts)}
    if weight.started and rows.has_none:
        del found["count"]  # which ranks know that have rows
    return found


def _tensors_here(training: Training, weight: WeightState) -> dict[str, Any]:
    rule, plan = training.rule, weight.plan
    tensors: dict[str, Any] = {
        name: torch.zeros(shape, dtype=dtype, device="cpu")
        for name, (shape, dtype) in shapes(plan, weight.parameter, rule).items()
    }
    tensors["slots"].fill_(-1)
    tensors["log"], tensors["shown"] = (), ()
    if not weight.started:
        return tensors
    target = whole_tier(plan, tensors, rule.moment_names)
    move_state(training.runtime, weight.split.tiers(), target)
    if plan.columns:
        tensors["importance"].copy_(weight.importance())
    if weight.pending:
        tensors["proposed"][weight.proposed()] = True
    slots = weight.split.slot_columns
    tensors["slots"][slots] = torch.arange(len(slots), dtype=torch.int32, device="cpu")
    if weight.deferred is not None:
        tensors["log"] = tuple(rows for _, rows in weight.deferred.logged())
        flights = _flights(training, weight)
        shown = [_shown(weight, place) for place in [*(saved.bucket for saved, _ in flights), *_ahead(weight)]]
        tensors["shown"] = (*shown, *(result.clone() for saved, result in flights if saved.coasts))
    return tensors


def read_on_all(training: Training, state_dict: Mapping[str, Any], groups: Groups, *, of_torch: bool) -> Saved:
    """What a state_dict, of torch's optimizer where `of_torch`, holds; refused on all ranks where it is on one.

    Changes nothing. Raises CheckpointError if it is truncated or not of this optimizer, ConfigError if a hyperparameter
    in it is not allowed, RankError if another rank refused it.
    """
    ranks = training.runtime.ranks
    error: ZenFlowError | None = None
    try:
        if of_torch:
            saved = torch_state.read(training, state_dict, groups)
        else:
            saved = checkpoint_format.read(state_dict, groups, training.rule)
    except ZenFlowError as raised:
        error = raised
    if ranks is not None:
        ranks.together(error, training.runtime.device.torch_device)
    elif error:
        raise error
    return saved


def resumed(current: Training, saved: Saved, groups: Groups) -> Training:
    """A new run that goes on from a saved one with the module, device and own knobs of the current one, which stays.

    `groups` already have the saved hyperparameters. Raises ConfigError if own knobs do not go with the saved ones,
    HostMemoryError if the host has less memory, HostEngineError if host work failed.
    """
    header, own = saved.header, current.made_with
    if header.imported:  # the selection begins with the first gradient's importance, which is known after that step
        first = replace(own, topk_ratio=0.0)
        header = replace(header, made_with=first, config=first, change=None)
    training = current.another(replace(header.config, ledger=own.ledger))
    try:
        if header.imported:
            saved = _split_anew(training, replace(saved, header=header), groups)
        _restore(training, saved, groups)
        changes = {} if header.change is None else _live(header.change)
        told = header.change or header.config
        changes |= {
            name: value
            for name, value in _live(own).items()
            if value not in (getattr(header.made_with, name), getattr(told, name))
        }
        if changes:
            training.set_knobs(changes, groups)
        training.brought = training.coming or training.config
        training.kept = _kept(header, own, training.brought)
    except BaseException:
        training.close()
        raise
    return training


def _kept(header: Header, own: ZenFlowConfig, brought: ZenFlowConfig) -> Mapping[str, Any] | None:
    """The knobs to go back to; those that are asked for, where that is something else than it was."""
    if header.kept is None:
        return None
    kept = header.kept if _live(own) == _live(header.made_with) else _live(own)
    one, other = brought.changed(kept), brought
    return None if replace(one, apply_lag=one.lag) == replace(other, apply_lag=other.lag) else kept


def _live(config: ZenFlowConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in LIVE_KNOBS}


def _split_anew(training: Training, saved: Saved, groups: Groups) -> Saved:
    """An imported state as it would be if it had been trained under these knobs."""
    split = training.model.split(groups, training.config)
    plans = {id(p): plan for p, plan in zip(split.parameters, split.plan.weights, strict=True)}
    parameters = [parameter for group in groups for parameter in group["params"]]
    weights, tensors = [], []
    for parameter, weight, found in zip(parameters, saved.header.weights, saved.tensors, strict=True):
        plan = plans[id(parameter)]
        columns = max(1, plan.columns)
        slots = torch.full((columns,), -1, dtype=torch.int32, device="cpu")
        if plan.columns:
            slots[plan.resident :] = torch.arange(plan.deferred, dtype=torch.int32, device="cpu")
        weights.append(replace(weight, plan=plan, flat=weight.started and plan.resident == plan.columns))
        tensors.append(found)
        if not weight.started:
            continue
        tensors[-1] = {
            **found,
            "count": found["count"].cpu()[:1].repeat(columns),
            "slots": slots,
            "importance": torch.zeros(columns, dtype=torch.float32, device="cpu"),
            "proposed": torch.zeros(columns, dtype=torch.bool, device="cpu"),
        }
    header = replace(saved.header, weights=weights, buckets=split.plan.buckets)
    return replace(saved, header=header, tensors=tensors)


def _restore(training: Training, saved: Saved, groups: Groups) -> None:
    header = saved.header
    if not header.begun:
        return
    parameters = [parameter for group in groups for parameter in group["params"]]
    plans = {id(p): weight.plan for p, weight in zip(parameters, header.weights, strict=True)}
    ordered = training.model.split(groups, header.config).parameters
    training.begin(groups, Split(ordered, ModelPlan(tuple(plans[id(p)] for p in ordered), header.buckets)))
    training.clock.step, training.clock.window_steps = header.step, header.window_steps
    training.engine.reach(header.step)
    training.hypers[:] = [_hyper(training, group, values) for group, values in zip(groups, header.hypers, strict=True)]
    training.restored_flushed = header.flushed
    controls: _Controls = {}
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    known = {weight: header.weights[numbers[id(weight.parameter)]] for weight in training.model.weights}
    for weight, of_weight in known.items():
        training.gradients.expect(weight, of_weight.firings)
        if of_weight.started:
            tensors = saved.tensors[numbers[id(weight.parameter)]]
            _restore_weight(training, weight, of_weight, tensors, groups, controls, flushed=header.flushed)
    training.runtime.buckets.allocate()
    training.auto.restore({weight: of_weight.auto for weight, of_weight in known.items()})
    if training.runtime.ledger is not None:
        totals = {weight.name: _totals(weight, known[weight]) for weight in known}
        training.runtime.ledger.restore(totals, training.runtime.device.torch_device)


def _totals(weight: WeightState, saved: SavedWeight) -> tuple[int, int]:
    """Masses produced and applied; a ledger that begins here has seen what is pending."""
    if saved.ledger:
        return saved.ledger[0], saved.ledger[1]
    return weight.pending_mass(), 0


def _restore_weight(
    training: Training,
    weight: WeightState,
    saved: SavedWeight,
    tensors: Mapping[str, Any],
    groups: Groups,
    controls: _Controls,
    *,
    flushed: bool,
) -> None:
    host = {name: value.cpu() for name, value in tensors.items() if isinstance(value, torch.Tensor)}
    source = whole_tier(weight.plan, host, training.rule.moment_names)
    weight.restore(source, host["slots"], flat=saved.flat)
    if weight.plan.columns:
        weight.importance().copy_(host["importance"])
    weight.chosen = saved.chosen
    if saved.pending:
        weight.restore_proposal(host["proposed"].nonzero().squeeze(1), begun=saved.selection_begun)
    for number, (entry, rows) in enumerate(zip(saved.log, tensors["log"], strict=True)):
        control = None
        if entry.control is not None:
            key = entry.step, *entry.control
            control = controls[key] = controls.get(key) or _control(training, entry.control)
        assert weight.deferred is not None
        hyper = _hyper(training, groups[weight.group], entry.hyper)
        places = [place for place, entries in enumerate(saved.logged) if entries >= len(saved.log) - number]
        weight.deferred.restore_entry(rows.cpu(), entry.step, hyper, control, places)
    rows = iter(rows.cpu() for rows in tensors["shown"])
    weight.shown = {bucket: next(rows) for bucket in saved.unsettled_buckets}
    for flight in saved.flights:
        training.model.windows.restore(weight, flight, next(rows) if flight.coasts else None)
    for place in saved.ahead:
        assert weight.deferred is not None
        weight.deferred.parts[place].ahead = weight.deferred.parts[place].guessed = True
    if flushed:
        training.before_use(weight.parameter, Unflush(training, weight))


def _hyper(training: Training, group: Mapping[str, Any], values: Mapping[str, float]) -> Hyper:
    return type(training.rule.hyper(group))(**values)


def _control(training: Training, values: tuple[float, float]) -> Control:
    """A saved step's factor and skip flag."""
    packed = torch.tensor(values, dtype=torch.float32, device="cpu")
    return Control(packed, Arrived(training.runtime.device.mark(), packed.nbytes))
