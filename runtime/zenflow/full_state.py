"""One parameter's master and moments in its shape: read and set between two steps, shown in `optimizer.state`."""

from __future__ import annotations

import weakref
from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from zenflow.buckets import Part
from zenflow.deferred import DeferredTier
from zenflow.errors import ConfigError, ZenFlowError
from zenflow.layout import WeightPlan
from zenflow.model import Groups
from zenflow.names import did_you_mean
from zenflow.sharded import Rows
from zenflow.split_state import Tier, move_state
from zenflow.state import ColumnState
from zenflow.training import Training
from zenflow.weight import WeightState, start

if TYPE_CHECKING:
    from zenflow.optimizer import ZenFlowOptimizer


@contextmanager
def flushed(training: Training) -> Iterator[int]:
    """Let the weights hold what a flush would make of them; afterwards they are what they were, as is all else.

    Yields how many steps of deferred gradients were pending. Raises HostEngineError if host work failed; of ranks that
    have whole parameters, the others raise RankError then.
    """
    _settle(training)
    if not training.begun or not training.open or training.shows_flushed:
        yield 0
        return
    training.model.stop_watch()
    training.shows_flushed = True
    changed: list[tuple[WeightState, Part, torch.Tensor | None]] = []
    try:
        for weight in training.model.weights:
            if not weight.restored:
                weight.shown = {}
            for place, part in _pending(weight):
                rows = _preview(training, weight, part)
                held = None  # the masters round to it
                if weight.restored:  # it may not be loaded yet, or be loaded again: what is not as saved stays
                    held = _held(weight, part)
                    rows = torch.where(held == _trained(weight, place, part), rows, held)
                elif part.index in weight.unsettled:
                    assert weight.shown is not None
                    held = weight.shown[place] = _held(weight, part)
                changed.append((weight, part, held))
                _show(weight, part, rows)
        training.gather()
        yield training.pending_steps
    finally:
        for weight, part, held in changed:
            _show(weight, part, _tier(weight).rounded(part) if held is None else held)
        for weight in training.model.weights:
            if not weight.restored:
                weight.shown = None
        training.shows_flushed = False
        training.gather()
        training.leave_weights()


def _settle(training: Training) -> None:
    error: ZenFlowError | None = None
    try:
        training.settle()
    except ZenFlowError as raised:
        error = raised
    ranks, shards = training.runtime.ranks, training.shards
    if ranks is not None and shards is not None and shards.keeps_whole:  # which gather below
        ranks.together(error, training.runtime.device.torch_device)
    elif error is not None:
        raise error


class Unflush:
    """Gives a restored weight that holds what a file of flushed weights held the values of training.

    The model may be loaded before or after its optimizer, so each use of the weight until the next step asks again;
    that costs something only where somebody has written to it.
    """

    def __init__(self, training: Training, weight: WeightState) -> None:
        self._training = training
        self._weight = weight
        self._seen: tuple[int, int] | None = None

    def __call__(self) -> bool:
        """Look at the weight; false, since it may be loaded again."""
        with torch.inference_mode(False), torch.no_grad():
            if not self._training.shows_flushed and self._state() != self._seen:
                self._compare()
                self._seen = self._state()
        return False

    def _state(self) -> tuple[int, int]:
        parameter = self._weight.parameter
        return parameter._version, parameter.untyped_storage()._cdata

    def _compare(self) -> None:
        weight, found, alike, elements = self._weight, [], 0, 0
        for place, part in _pending(weight):
            held = _held(weight, part)
            from_file = held == _preview(self._training, weight, part)
            found.append((part, torch.where(from_file, _trained(weight, place, part), held)))
            alike += int(from_file.sum())
            elements += held.numel()
        if 2 * alike > elements:  # in 16 bits, what a model holds before it is loaded is alike by chance here and there
            for part, rows in found:
                _show(weight, part, rows)


def _pending(weight: WeightState) -> list[tuple[int, Part]]:
    """Parts that a flush would change, with their numbers in the weight."""
    parts, unsettled = [] if weight.deferred is None else weight.deferred.parts, weight.unsettled
    return [(place, one) for place, one in enumerate(parts) if one.log or one.index in unsettled]


def _tier(weight: WeightState) -> DeferredTier:
    assert weight.deferred is not None
    return weight.deferred


def _held(weight: WeightState, part: Part) -> torch.Tensor:
    """[slots, rows] in the model's dtype, in host memory: what the weight holds."""
    return _tier(weight).on_host(weight.matrix(), part.columns)


def _trained(weight: WeightState, place: int, part: Part) -> torch.Tensor:
    """The same: what training has of a restored weight, whatever it holds."""
    shown = (weight.shown or {}).get(place)
    return _tier(weight).rounded(part) if shown is None else shown


def _preview(training: Training, weight: WeightState, part: Part) -> torch.Tensor:
    return _tier(weight).preview(part, training.hypers[weight.group])


def _show(weight: WeightState, part: Part, rows: torch.Tensor) -> None:
    weight.scatter(part.columns, rows.to(weight.parameter.device))


MASTER, STEP = "master", "step"


def whole_tier(plan: WeightPlan, tensors: Mapping[str, torch.Tensor], moment_names: Sequence[str]) -> Tier:
    """The state of all columns of one parameter, sharing the memory of `tensors` on the CPU.

    They are "master" and the moments, fp32 in the parameter's shape, and "count", [columns] int32.
    """
    streams = [tensors[name] for name in (MASTER, *moment_names)]
    if plan.columns:
        columns = [plan.view(stream).t() for stream in streams]
    else:
        columns = [stream.view(1, -1) for stream in streams]
    state = ColumnState.over(columns, tensors["count"])
    return Tier(torch.arange(len(tensors["count"]), device="cpu"), state, on_host=True)


def read(training: Training, parameter: nn.Parameter, group: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Copies on the CPU, of sharded parameters DTensors, but for the step; see `ZenFlowOptimizer.full_state`."""
    tensors = _here(training, parameter, group)
    if isinstance(parameter, Rows):
        tensors |= {name: parameter.wrapped(tensors[name]) for name in (MASTER, *training.rule.moment_names)}
    return tensors


def _here(training: Training, parameter: nn.Parameter, group: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    rule, weight = training.rule, _started(training, parameter)
    if weight is None:
        moments = zip(rule.moment_names, rule.initial(group), strict=True)
        return {
            MASTER: training.runtime.masters.peek(parameter).to("cpu", copy=True),
            **{name: torch.full(parameter.shape, value, dtype=torch.float32, device="cpu") for name, value in moments},
            STEP: torch.zeros((), dtype=torch.float32, device="cpu"),
        }
    training.settle()
    tensors = _gathered(training, weight)
    tensors[STEP] = tensors.pop("count").max().float()
    return tensors


def write(
    training: Training, parameter: nn.Parameter, group: Mapping[str, Any], name: str, value: torch.Tensor
) -> None:
    """Set one stream, "master" or one of the rule's moments; see `ZenFlowOptimizer.set_full_state`."""
    names = (MASTER, *training.rule.moment_names, STEP)
    if training.shows_flushed:
        raise ConfigError("set_full_state() was called within flushed_weights(): call it outside")
    if name not in names:
        raise ConfigError.of("name", name, f"{', '.join(names)}{did_you_mean(name, names)}")
    values = _fitting(name, value, parameter)
    weight = _started(training, parameter)
    if weight is None:
        _begin_with(training, parameter, group, name, values)
        return
    training.settle()
    tensors = _gathered(training, weight)
    stream = tensors["count" if name == STEP else name]
    if torch.equal(values, stream.max() if name == STEP else stream):
        return
    stream.copy_(values)
    training.model.stop_watch()
    if name == MASTER:  # what the host has applied is in the masters that are replaced
        training.model.windows.apply(
            training.clock.step, training.history.open, closing=range(training.model.windows.buckets)
        )
    weight.split.fill([whole_tier(weight.plan, tensors, training.rule.moment_names)])
    if name == MASTER:
        parameter.copy_(values)
        for part in () if weight.deferred is None else weight.deferred.parts:
            part.ahead = False
    training.leave_weights()


def _fitting(name: str, value: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """A value on the CPU in the shape of a parameter's stream, or of its step."""
    if value.numel() != (wanted := 1 if name == STEP else parameter.numel()):
        raise ConfigError(f"{name} has {value.numel()} elements; it must have {wanted}, as the parameter needs it")
    shape, dtype = ((), torch.int32) if name == STEP else (parameter.shape, torch.float32)
    return value.detach().to("cpu", dtype).reshape(shape)


def carried(training: Training, parameter: nn.Parameter, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """What a parameter begins with whose step and moments were set under its name, in new memory on the CPU."""
    names = (*training.rule.moment_names, STEP)
    if missing := [name for name in names if name not in state]:
        raise ConfigError(f"the state of a parameter has no {', '.join(missing)}; it must have {', '.join(names)}")
    return {name: _fitting(name, torch.as_tensor(state[name], device="cpu"), parameter).clone() for name in names}


def begin_carried(training: Training, given: Mapping[nn.Parameter, Mapping[str, torch.Tensor]], groups: Groups) -> None:
    """Begin parameters that were never updated with what `carried` gave."""
    if not training.begun:
        training.begin(groups)
    weights = [weight for weight in training.model.weights if weight.parameter in given]
    start(training.runtime, weights)
    for weight in weights:
        tensors = {MASTER: weight.parameter.detach().to("cpu", torch.float32, copy=True), **given[weight.parameter]}
        tensors["count"] = tensors[STEP].repeat(max(1, weight.plan.columns))
        weight.split.fill([whole_tier(weight.plan, tensors, training.rule.moment_names)])
    training.gradients.stream(weights)
    training.leave_weights()


def _begin_with(
    training: Training, parameter: nn.Parameter, group: Mapping[str, Any], name: str, values: torch.Tensor
) -> None:
    """Set what a parameter that was never updated begins with."""
    if torch.equal(values, _here(training, parameter, group)[name].to(values.dtype)):
        return
    if name != MASTER:
        raise ConfigError(f"{name} of a parameter was set before its first update; it can be set afterwards")
    training.runtime.masters.give({parameter: values.clone()})
    parameter.copy_(values)


def _started(training: Training, parameter: nn.Parameter) -> WeightState | None:
    found = (weight for weight in training.model.weights if weight.parameter is parameter and weight.started)
    return next(found, None)


def _gathered(training: Training, weight: WeightState) -> dict[str, torch.Tensor]:
    """The state as it lies in the tiers; of a run that has settled."""
    moment_names = training.rule.moment_names
    tensors = {
        name: torch.empty(weight.parameter.shape, dtype=torch.float32, device="cpu") for name in (MASTER, *moment_names)
    }
    tensors["count"] = torch.zeros(max(1, weight.plan.columns), dtype=torch.int32, device="cpu")
    move_state(training.runtime, weight.split.tiers(), whole_tier(weight.plan, tensors, moment_names))
    return tensors


@dataclass(slots=True, eq=False)
class _Origin:
    """What a tensor shows that was handed out."""

    view: StateView
    name: str
    copied: torch.Tensor
    step: int  # after which it was copied

    def _owner(self) -> ZenFlowOptimizer | None:
        """None where what it shows is in no state that is trained with."""
        owner = self.view.owner()
        lives = owner is not None and owner.trains and any(one is self.view for one in owner.state.values())
        return owner if lives else None

    def follow(self) -> None:
        """Copy it again where a step was taken since."""
        if (owner := self._owner()) is not None and owner.steps != self.step:
            self.copied.copy_(owner.full_state(self.view.parameter)[self.name])
            self.step = owner.steps

    def write(self) -> None:
        if self._owner() is not None:
            self.view[self.name] = self.copied


class HandedOut(torch.Tensor):
    """A moment or step, or a view of one, that is as torch's: it follows the training, which follows it."""

    _origin: _Origin

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            own = [one for one in tree_leaves((args, kwargs)) if isinstance(one, cls)]
            for origin in () if func.__name__ == "__get__" else {one._origin for one in own}:  # not for a shape
                origin.follow()
            versions = [one._version for one in own]
            made = func(*args, **(kwargs or {}))
            for origin in {one._origin for one, old in zip(own, versions, strict=True) if one._version != old}:
                origin.write()
            memory = {one.untyped_storage()._cdata: one._origin for one in own}
            return tree_map_only(torch.Tensor, lambda one: cls.of(one, memory.get(one.untyped_storage()._cdata)), made)

    @classmethod
    def of(cls, made: torch.Tensor, origin: _Origin | None) -> torch.Tensor:
        if origin is None or type(made) is not torch.Tensor:
            return made
        handed_out = made.as_subclass(cls)
        handed_out._origin = origin
        return handed_out

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._origin.follow()
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


class StateView:
    """A mapping of "step" and the rule's moments to copies on the parameter's device, see `HandedOut`.

    A moment of another size is kept for the parameter that takes this one's place in the groups. Copies and pickles of
    it are plain dictionaries. It is no `Mapping` by type: Lightning and Accelerate rebuild what is one, tensor by
    tensor, and would keep all of the state on the device.
    """

    __slots__ = ("_names", "owner", "parameter", "resized")

    def __init__(self, optimizer: ZenFlowOptimizer, parameter: nn.Parameter, moment_names: tuple[str, ...]) -> None:
        self.owner = weakref.ref(optimizer)
        self.parameter = parameter
        self._names = (STEP, *moment_names)
        self.resized: dict[str, torch.Tensor] = {}
        """Moments of another size than the parameter's."""

    def is_of(self, parameter: nn.Parameter) -> bool:
        """Whether it shows what the parameter is trained with."""
        return self.parameter is parameter and not self.resized

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._gathered()[name]

    def __setitem__(self, name: str, value: torch.Tensor) -> None:
        self.resized.pop(name, None)
        if name in self._names[1:] and value.numel() != self.parameter.numel():
            self.resized[name] = value
            self._owner().look_at_state()
        else:
            given = torch.as_tensor(value, device="cpu") if name == STEP else value  # a step may be a number
            self._owner().set_full_state(self.parameter, name, given)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self._gathered(),)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self._names else default

    def keys(self) -> KeysView[str]:
        return dict.fromkeys(self._names).keys()

    def values(self) -> ValuesView[torch.Tensor]:
        return self._gathered().values()

    def items(self) -> ItemsView[str, torch.Tensor]:
        return self._gathered().items()

    def _gathered(self) -> dict[str, torch.Tensor]:
        owner, found = self._owner(), dict(self.resized)
        for name, value in owner.full_state(self.parameter).items():
            here = value if name == STEP else value.to(self.parameter.device)  # as torch has them
            found.setdefault(name, HandedOut.of(here, _Origin(self, name, here, owner.steps)))
        return {name: found[name] for name in self._names}

    def _owner(self) -> ZenFlowOptimizer:
        optimizer = self.owner()
        if optimizer is None:
            raise ZenFlowError("the state of an optimizer that is gone was requested")
        return optimizer
