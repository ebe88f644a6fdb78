"""All weights of one optimizer: how they are split, and how the split changes while it trains."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zenflow.config import ZenFlowConfig
from zenflow.errors import UnsupportedError
from zenflow.host.tasks import LogEntry
from zenflow.kernels.base import address_of
from zenflow.layout import ModelPlan, WeightPlan, conv1d_weights, plan_model, plan_order
from zenflow.runtime import Runtime
from zenflow.sharded import model_parameter, require_whole
from zenflow.weight import WeightState
from zenflow.windows import Windows
from zenflow.writes import Unwritten, WriteWatch

Groups = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Split:
    """The parameters in plan order, and the plan."""

    parameters: list[nn.Parameter]
    plan: ModelPlan

    @property
    def trained(self) -> list[tuple[WeightPlan, torch.dtype]]:
        """Plan and dtype of each parameter that is not frozen now."""
        pairs = zip(self.parameters, self.plan.weights, strict=True)
        return [(plan, parameter.dtype) for parameter, plan in pairs if parameter.requires_grad]


class ModelState:
    """Owns the weights of one optimizer and the windows that are in flight."""

    def __init__(self, runtime: Runtime, module: nn.Module | None) -> None:
        self.weights: list[WeightState] = []  # in plan order
        self.windows = Windows(runtime, self.weights)
        self._runtime = runtime
        self._module = module
        self._watched: dict[WeightState, WriteWatch] = {}  # that are looked at together
        self._unwritten = Unwritten([])
        self._others: list[WeightState] = []

    @property
    def has_pending(self) -> bool:
        """Whether a reader of the weights would not see all gradients everywhere, or predicted updates.

        Waits for the device to tell which steps were skipped, so that all ranks say the same.
        """
        entries = list(self._pending())
        for entry in entries:
            if entry.control is not None:
                entry.control.transfer.wait()
        return any(entry.may_count for entry in entries) or self._restored_flies() or self.shows_ahead

    @property
    def shows_ahead(self) -> bool:
        """Whether any weights hold something else than their masters round to, in flight or not."""
        return any(part.ahead for weight in self.weights if weight.deferred for part in weight.deferred.parts)

    @property
    def may_lack_updates(self) -> bool:
        """`has_pending`, as far as is known: waits for nothing, so that ranks may differ."""
        return any(entry.may_count for entry in self._pending()) or self._restored_flies() or self.shows_ahead

    def _restored_flies(self) -> bool:
        """Whether something is in flight whose entries are not here: it was restored, or written under."""
        return any(
            window.restored_steps for flight in self.windows.in_flight if not flight.late for window in flight.windows
        )

    def _pending(self) -> Iterator[LogEntry]:
        for weight in self.weights:
            yield from weight.pending_entries()
        for flight in self.windows.in_flight:
            for window in () if flight.late else flight.windows:  # what is late arrives before it is read
                yield from window.entries

    def split(self, groups: Groups, config: ZenFlowConfig) -> Split:
        """How the parameters would be split; changes nothing.

        Raises UnsupportedError if a parameter that is not frozen is on another device than at the beginning, or one was
        sharded since.
        """
        ordered = plan_order([parameter for group in groups for parameter in group["params"]], self._module)
        require_whole(ordered)
        own = self._runtime.device.torch_device
        devices = {str(parameter.device) for parameter in ordered if parameter.requires_grad}
        if devices - {str(own)}:
            raise UnsupportedError(
                f"parameters are on {' and '.join(sorted(devices))}; at the beginning they were on {own}: "
                "make the optimizer after moving the model"
            )
        split = Split(ordered, plan_model(ordered, config, conv1d_weights(self._module)))
        self._require_apart(split)
        return split

    def _require_apart(self, split: Split) -> None:
        """Refuse offloaded weights of which two overlap: each would have a master of its own."""
        pairs = zip(split.parameters, split.plan.weights, strict=True)
        used = sorted(
            (address_of(parameter), address_of(parameter) + parameter.nbytes, number, plan.offloaded)
            for number, (parameter, plan) in enumerate(pairs)
            if parameter.requires_grad and parameter.is_contiguous() and parameter.nbytes
        )
        for (_, end, one, offloads), (begin, _, other, too) in itertools.pairwise(used):
            if begin < end and (offloads or too):
                names = [self._names().get(id(split.parameters[number]), f"number {number}") for number in (one, other)]
                raise UnsupportedError(
                    f"parameters {' and '.join(sorted(names))} use the same memory: make them one Parameter"
                )

    def _names(self) -> dict[int, str]:
        return {} if self._module is None else {id(p): name for name, p in self._module.named_parameters()}

    def moving(self, groups: Groups, config: ZenFlowConfig) -> list[WeightState]:
        """The weights of which other knobs would move columns."""
        return self._differing(self.split(groups, config))

    def _differing(self, split: Split) -> list[WeightState]:
        plans = self._plans_by_parameter(split)
        return [weight for weight in self.weights if not weight.plan.same_split(plans[id(weight.parameter)])]

    def take(self, split: Split, groups: Groups) -> None:
        """Split the parameters as `split` gave it, or split them anew; nothing may be in flight.

        Raises MemoryError if the host has less memory, HostEngineError if its engine has failed.
        """
        plans = self._plans_by_parameter(split)
        self.windows.buckets = split.plan.buckets
        for weight in self._differing(split):
            weight.choose(plans[id(weight.parameter)])
        self._runtime.buckets.begin(split.plan.buckets)
        self.windows.groups.forget()
        for weight in self.weights:
            weight.repartition(plans[id(weight.parameter)])
        self._runtime.buckets.allocate()
        self._add(split, groups)

    def drop_others(self, groups: Groups, fresh: Set[int]) -> list[WeightState]:
        """Let go of the weights that are in no group or `fresh`, by id, and return them; nothing is in flight."""
        known = {id(parameter) for group in groups for parameter in group["params"]} - fresh
        gone = [weight for weight in self.weights if id(weight.parameter) not in known]
        self.weights[:] = [weight for weight in self.weights if id(weight.parameter) in known]
        self.windows.moved.difference_update(gone)
        for weight in gone:
            if weight.started and weight.deferred is not None:
                weight.deferred.release()
        return gone

    def watch(self) -> None:
        """Notice from now on what others write to the weights."""
        self.windows.writing = False
        looked_at = self._to_look_at(self.windows.moved)
        found = {weight: shared for weight in looked_at if (shared := weight.watch()) is not None}
        self.windows.moved.clear()
        if looked_at is self.weights:
            self._watched = {}
        if looked_at is self.weights or not found.keys() <= self._watched.keys():
            self._watched |= found
            self._unwritten = Unwritten([*self._watched.values()])
            self._others = [weight for weight in self.weights if weight not in self._watched]

    def _to_look_at(self, besides: Iterable[WeightState] = ()) -> Iterable[WeightState]:
        """All weights, if one was written to that is looked at with others; else those that are not, and some more."""
        return dict.fromkeys([*self._others, *besides]) if self._unwritten.holds() else self.weights

    def take_outside_writes(self, *, restored: bool = True) -> None:
        """Follow what others wrote to the weights since `watch`, and notice nothing more.

        `restored`: also where a weight's state was restored and it may be loaded itself. Raises UnsupportedError if a
        parameter has another form than when its training began, HostEngineError if host work failed.
        """
        # All ends first: weights that share memory are noticed together.
        for weight, write in [(weight, weight.end_watch()) for weight in self._to_look_at()]:
            if weight.restored:
                if restored:
                    self.windows.take_restored(weight)
            elif write is not None:
                self.windows.take_outside_write(weight, write)
        self.windows.writing = True

    def stop_watch(self) -> None:
        """Notice nothing more, whatever was written since `watch`."""
        for weight in self.weights:
            weight.stop_watch()

    def _plans_by_parameter(self, split: Split) -> dict[int, WeightPlan]:
        return {id(parameter): plan for parameter, plan in zip(split.parameters, split.plan.weights, strict=True)}

    def _add(self, split: Split, groups: Groups) -> None:
        """Weights for the parameters that have none yet, at their places."""
        known = {id(weight.parameter): weight for weight in self.weights}
        names = self._names()
        group_of = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
        ordered = []
        for number, (parameter, plan) in enumerate(zip(split.parameters, split.plan.weights, strict=True)):
            group = group_of[id(parameter)]
            if (weight := known.get(id(parameter))) is None:
                name, initial = names.get(id(model_parameter(parameter)), str(number)), self._runtime.rule.initial
                weight = WeightState(parameter, name, plan, group, self._runtime, initial(groups[group]))
            weight.group = group
            ordered.append(weight)
        self.weights[:] = self._others = ordered
        self._watched, self._unwritten = {}, Unwritten([])
        by_memory: dict[int, list[WeightState]] = {}
        for weight in ordered:
            weight.neighbours = by_memory.setdefault(_memory(weight.parameter), [])
            weight.neighbours.append(weight)


def _memory(parameter: nn.Parameter) -> int:
    try:
        return parameter.untyped_storage().data_ptr()
    except RuntimeError:  # a wrapper without memory, as some quantized weights are
        return id(parameter)
