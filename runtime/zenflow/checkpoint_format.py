"""What a saved optimizer looks like, and whether something is one. Pure data: nothing here knows a device.

`state_dict()` has torch's form. Each parameter's tensors are in its own shape, so that they can be read without knowing
how the state was split:

    {"state": {index: {"master", one tensor a moment, "count", "slots", "importance", "proposed", "log", "shown"}},
     "param_groups": [{hyperparameters, "params": [index, ...]}, ...]}

`count`, `slots`, `importance` and `proposed` have one number a column; `log` is a tuple of the open windows' gradients
of the deferred columns, [deferred, rows] each (zeros where a bucket has closed since), and `shown` one of the weights
that training sees of each bucket in flight and of each that is shown ahead of its masters, [slots, rows] in the model's
dtype; behind these it has what is on its way of each bucket in flight that coasts. A parameter that has always been
frozen, or has no state yet, has its "shape" alone, as int64.

Of parameters that are sharded over ranks, master and moments are DTensors as the parameter is, on the CPU. `log` and
`shown` are dictionaries by number, "0", "1" and so on, of DTensors of [columns, *leading dimensions] that are sharded
by the second of these dimensions. The rest is the same on all ranks, but that one without a row of a parameter does not
know its `count`, `log` and `shown`, nor what is said about these in the JSON, whose plans are of the whole parameters.

What is not a tensor stands in `param_groups[0]["zenflow"]`, as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from zenflow.config import ZenFlowConfig
from zenflow.errors import CheckpointError
from zenflow.layout import WeightPlan
from zenflow.rules import Rule
from zenflow.sharded import Rows, local_rows

FORMAT = "zenflow.optimizer/3"
HEADER = "zenflow"
"""The key of the JSON in the first parameter group."""
BY_COLUMN = ("count", "slots", "importance", "proposed")
"""What has one number a column."""


@dataclass(frozen=True, slots=True)
class SavedEntry:
    """One gradient of the open window."""

    step: int
    hyper: dict[str, float]
    control: tuple[float, float] | None  # factor, and 1 where the step is skipped


@dataclass(frozen=True, slots=True)
class SavedUpdate:
    """A window of a bucket that the host has applied and that is not visible yet."""

    bucket: int
    """Number of the bucket, counted in its weight."""
    due: int
    """The step after which it becomes visible."""
    decay: float
    """What its updates multiplied a weight with."""
    passed_over: list[int]
    """The bucket's slots that it did not update."""
    steps: list[int]
    """Whose gradients it has applied."""
    coasts: bool
    """Whether it will show more than the masters round to."""


@dataclass(frozen=True, slots=True)
class SavedWeight:
    """What is known of one parameter besides its tensors."""

    plan: WeightPlan
    started: bool
    flat: bool
    pending: bool
    chosen: bool
    """Whether a gradient that counts has chosen its columns."""
    selection_begun: bool
    """Whether some buckets may have followed the pending selection."""
    log: list[SavedEntry]
    logged: list[int]
    """Of each bucket, how many of the newest entries its open window has."""
    flights: list[SavedUpdate]
    ahead: list[int]
    """Numbers, counted in this weight, of other buckets whose weights are not what their masters round to."""
    auto: list[float]
    """Zen-auto's sums over the open window: n, selected, deferred; empty where there are none."""
    ledger: list[int]
    """Masses produced and applied; empty where no ledger was kept."""
    firings: int
    """Backward passes that the next step is expected to have."""

    @classmethod
    def fresh(cls, plan: WeightPlan, *, started: bool, flat: bool) -> SavedWeight:
        """Of another optimizer's checkpoint: nothing is selected, logged or in flight."""
        return cls(plan, started, flat, False, True, False, [], [], [], [], [], [], 1)

    @property
    def unsettled_buckets(self) -> list[int]:
        """Of whose weights `shown` tells what training sees, in this order."""
        return [*(flight.bucket for flight in self.flights), *self.ahead]

    @property
    def shown(self) -> int:
        """How many tensors `shown` has."""
        return len(self.unsettled_buckets) + sum(flight.coasts for flight in self.flights)


@dataclass(frozen=True, slots=True)
class Header:
    """What is not a tensor."""

    rule: str
    made_with: ZenFlowConfig
    """The knobs that the optimizer was constructed with."""
    config: ZenFlowConfig
    change: ZenFlowConfig | None
    """Those that hold after the next step."""
    begun: bool
    step: int
    window_steps: int
    buckets: int
    hypers: list[dict[str, float]]  # of each group, in the last step
    weights: list[SavedWeight]
    """In the order of the parameter groups."""
    flushed: bool
    """Whether the model's file of the same moment holds the weights that a flush would make."""
    imported: bool
    """From another optimizer's checkpoint: knobs and split are those of whoever loads it. Nothing is selected, logged
    or in flight, and the columns of a weight count alike."""
    kept: dict[str, Any] | None
    """Knobs to go back to, where those in force may have been tried only; None: nobody tried any."""

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)})

    @classmethod
    def from_json(cls, text: object) -> Header:
        """Read a header; raises CheckpointError if it is not one."""
        if not isinstance(text, str):
            raise CheckpointError(
                f'param_groups[0]["{HEADER}"] is missing: the state_dict was not saved by a ZenFlow optimizer. '
                "`zftune checkpoint import` makes one of torch's AdamW; or load it within the optimizer's torch_state()"
            )
        try:
            found = json.loads(text)
            version = found.pop("format")
            if version != FORMAT:
                raise CheckpointError(f"the state_dict has the format {version!r}; this version reads {FORMAT!r}")
            return cls(**{**found, **_read_parts(found)})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f'param_groups[0]["{HEADER}"] cannot be read: {error}') from error


def _read_parts(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "made_with": ZenFlowConfig(**found["made_with"]),
        "config": ZenFlowConfig(**found["config"]),
        "change": None if found["change"] is None else ZenFlowConfig(**found["change"]),
        "weights": [_weight(weight) for weight in found["weights"]],
    }


def _weight(values: Mapping[str, Any]) -> SavedWeight:
    log = [SavedEntry(**{**entry, "control": entry["control"] and tuple(entry["control"])}) for entry in values["log"]]
    flights = [SavedUpdate(**flight) for flight in values["flights"]]
    return SavedWeight(**{**values, "plan": WeightPlan(**values["plan"]), "log": log, "flights": flights})


@dataclass(frozen=True, slots=True)
class Saved:
    """A state_dict that was found to be whole."""

    header: Header
    groups: list[dict[str, Any]]  # hyperparameters of each
    tensors: list[Mapping[str, Any]]
    """Of each parameter, in the order of the groups."""


def read(state_dict: object, groups: Sequence[Mapping[str, Any]], rule: Rule) -> Saved:
    """Check a state_dict against the optimizer that is to load it; changes nothing.

    Raises CheckpointError if it is truncated, damaged, or of another optimizer, ConfigError if a hyperparameter in it
    is not allowed.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise CheckpointError('the state_dict has no "state" and "param_groups": load what state_dict() returned')
    saved_groups, state = state_dict["param_groups"], state_dict["state"]
    own, other = [len(group["params"]) for group in groups], [len(group["params"]) for group in saved_groups]
    if own != other:
        raise CheckpointError(f"the state_dict has groups of {other} parameters, the optimizer of {own}")
    header = Header.from_json(saved_groups[0].get(HEADER))
    if header.rule != rule.name:
        raise CheckpointError(f"the state_dict is of the rule {header.rule}, the optimizer of {rule.name}")
    keys = [key for group in saved_groups for key in group["params"]]
    parameters = [parameter for group in groups for parameter in group["params"]]
    if len(header.weights) != len(parameters):
        raise CheckpointError(
            f"the state_dict names {len(header.weights)} parameters, the optimizer has {len(parameters)}"
        )
    weights, tensors = [], []
    for key, known, parameter in zip(keys, header.weights, parameters, strict=True):
        weight, found = known, _of_parameter(state, key)
        if isinstance(parameter, Rows):
            weight, found = _of_this_rank(f"state[{key!r}]", weight, found, parameter)
        if weight.started:
            _check_weight(key, weight, found, parameter, rule)
        weights.append(weight)
        tensors.append(found)
    kept = [{name: value for name, value in group.items() if name not in ("params", HEADER)} for group in saved_groups]
    for group, hyper in zip(groups, kept, strict=True):
        rule.hyper({**group, **hyper})  # no more than step() asks for: a schedule may have left what check() refuses
    return Saved(replace(header, weights=weights), kept, tensors)


def _of_parameter(state: Mapping[Any, Any], key: object) -> Mapping[str, Any]:
    """A parameter's tensors; torch.distributed.checkpoint puts what is no tensor under the number's text."""
    parts = [part for part in (state.get(key), state.get(str(key))) if isinstance(part, Mapping)]
    return {name: value for part in parts for name, value in part.items()}


def _of_this_rank(
    where: str, weight: SavedWeight, state: Mapping[str, Any], rows: Rows
) -> tuple[SavedWeight, Mapping[str, Any]]:
    """What concerns a rank's rows of a sharded parameter, in the form that a whole one has."""
    plan, shape = weight.plan, tuple(rows.whole.shape)
    if plan.columns and (plan.transposed or (plan.rows, plan.columns) != (rows.whole_rows, shape[-1])):
        raise CheckpointError(
            f"{where} is split as {plan.rows} x {plan.columns}; on all ranks the parameter is "
            f"{rows.whole_rows} x {shape[-1]}"
        )
    plan = replace(plan, rows=rows.numel() // plan.columns) if plan.columns else plan
    state = _cut(state, rows)
    found = {
        name: _here(f'{where}["{name}"]', value, shape) for name, value in state.items() if name not in ("log", "shown")
    }
    if rows.has_none:
        count = torch.zeros(max(1, plan.columns), dtype=torch.int32, device="cpu")
        return replace(weight, plan=plan, log=[], logged=[], flights=[], ahead=[]), {
            **found,
            "count": count,
            "log": (),
            "shown": (),
        }
    for name, expected in (("log", len(weight.log)), ("shown", weight.shown)):
        parts = state.get(name) or {}
        if not isinstance(parts, Mapping) or parts.keys() != {str(number) for number in range(expected)}:
            raise CheckpointError(
                f'{where}["{name}"] has not the {expected} parts of the open window: load a state_dict of '
                "this rank, one that was saved after flush(), or a folder of zenflow.distributed.save()"
            )
        columns = [_here(f'{where}["{name}"]', parts[str(number)], shape[:-1]) for number in range(len(parts))]
        found[name] = tuple(part.flatten(1) if isinstance(part, torch.Tensor) else part for part in columns)
    return replace(weight, plan=plan), found


def _cut(state: Mapping[str, Any], rows: Rows) -> Mapping[str, Any]:
    """A whole parameter's tensors as the rank's rows have them; those of rows as they are."""
    shape = rows.whole.shape
    found = dict(state)
    for name, value in state.items():
        if name in ("log", "shown") and isinstance(value, (tuple, list)):
            if all(_is_whole(part, torch.Size((len(part), shape[:-1].numel()))) for part in value):
                parts = (part.reshape(len(part), *shape[:-1]) for part in value)
                found[name] = {str(number): rows.of_whole(part, 1) for number, part in enumerate(parts)}
        elif name not in (*BY_COLUMN, "shape") and _is_whole(value, shape):
            found[name] = rows.of_whole(value)
    return found


def _is_whole(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, torch.Tensor) and not hasattr(value, "to_local") and value.shape == shape


def _here(where: str, value: Any, shape: Sequence[int]) -> Any:
    """This rank's part of a DTensor whose last dimensions are these; anything else as it is."""
    if not hasattr(value, "to_local"):
        return value
    last = list(value.shape[max(0, value.dim() - len(shape)) :])
    if last != list(shape):
        raise CheckpointError(f"{where} ends with the dimensions {last}, the parameter with {list(shape)}")
    return local_rows(value)


def shapes(plan: WeightPlan, parameter: torch.Tensor, rule: Rule) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each of a parameter's tensors, but for the log."""
    columns = max(1, plan.columns)
    streams = ("master", *rule.moment_names)
    return {
        **{name: (tuple(parameter.shape), torch.float32) for name in streams},
        "count": ((columns,), torch.int32),
        "slots": ((columns,), torch.int32),
        "importance": ((columns,), torch.float32),
        "proposed": ((columns,), torch.bool),
    }


def _check_weight(
    key: object, weight: SavedWeight, state: Mapping[str, Any], parameter: torch.Tensor, rule: Rule
) -> None:
    where, plan = f"state[{key!r}]", weight.plan
    for name, (shape, dtype) in shapes(plan, parameter, rule).items():
        tensor = state.get(name)
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f'{where}["{name}"] is missing: the state_dict is truncated')
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise CheckpointError(
                f'{where}["{name}"] is {tensor.dtype} {list(tensor.shape)}, the optimizer has {dtype} {list(shape)}: '
                "the state_dict is of another model"
            )
    if plan.columns and plan.rows * plan.columns != parameter.numel():
        raise CheckpointError(f"{where} is split as {plan.rows} x {plan.columns}, which is not the parameter's size")
    slots = state["slots"].cpu()
    deferred = slots[slots >= 0].sort().values
    selected = int((slots[plan.resident :] < 0).sum()) if plan.columns else 0
    in_place = len(slots) < plan.resident or bool((slots[: plan.resident] < 0).all())
    if selected != plan.selected or not in_place or deferred.tolist() != list(range(plan.deferred)):
        raise CheckpointError(f'{where}["slots"] does not fit the split that was saved with it')
    entries = range(len(weight.log) + 1)
    if weight.log and (len(weight.logged) != len(plan.bucket_slots) or any(n not in entries for n in weight.logged)):
        raise CheckpointError(f"{where} does not tell which gradients each of its buckets has logged")
    log = state.get("log")
    if not isinstance(log, (tuple, list)) or len(log) != len(weight.log):
        raise CheckpointError(f'{where}["log"] has not the {len(weight.log)} gradients of the open window')
    for rows in log:
        if not isinstance(rows, torch.Tensor) or tuple(rows.shape) != (plan.deferred, plan.rows):
            raise CheckpointError(
                f'{where}["log"] holds something else than gradients of [{plan.deferred}, {plan.rows}]'
            )
    shown = state.get("shown")
    if any(not 0 <= bucket < len(plan.bucket_slots) for bucket in weight.unsettled_buckets):
        raise CheckpointError(f"{where} has a late update for a bucket that it does not have")
    sizes = [high - low for low, high in (plan.bucket_slots[bucket] for bucket in weight.unsettled_buckets)]
    sizes += [n - len(one.passed_over) for n, one in zip(sizes, weight.flights, strict=False) if one.coasts]
    found = [(tuple(rows.shape), rows.dtype) for rows in shown] if isinstance(shown, (tuple, list)) else None
    if found != [((size, plan.rows), parameter.dtype) for size in sizes]:
        raise CheckpointError(f'{where}["shown"] has not the {weight.shown} tensors of the buckets that are late')
