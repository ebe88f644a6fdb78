"""Waits for late host updates, left to the forward of the layer that needs the weight."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from zenflow.deferred import BucketJob
from zenflow.device import in_backward
from zenflow.weight import WeightState


@dataclass(slots=True, eq=False)
class Flight:
    """A bucket's window that is not visible yet."""

    weight: WeightState
    window: BucketJob
    due: int
    """The step after which it becomes visible."""


class ForwardWaits:
    """Waits for late buckets, left to the forward of the layer that owns the weight.

    A weight is left to it only if its layer's forward was seen in the step before, so a weight that another module
    reads is waited for in `step()`. So is every weight once torch.compile has been used: code that was compiled before
    the hooks were there does not run them.
    """

    def __init__(self, module: nn.Module, show: Callable[[Flight], None]) -> None:
        self._show = show
        self._late: dict[int, list[Flight]] = {}
        self._seen: set[int] = set()
        self._trusted: set[int] = set()
        self._handles = []
        for part in module.modules():
            if keys := tuple(id(parameter) for parameter in part.parameters(recurse=False)):
                self._handles.append(part.register_forward_pre_hook(partial(self._before_forward, keys)))
            self._handles.append(part.register_state_dict_pre_hook(self._before_state_dict))

    def __reduce__(self) -> tuple[object, ...]:
        # A copy of the module (deepcopy, pickle) takes its hooks along; they must not drag the optimizer with them.
        return _hooks_of_a_copy, ()

    def leave(self, flight: Flight) -> bool:
        """Take over the wait for a bucket, unless it has arrived or its layer's forward cannot be relied on."""
        key = id(flight.weight.parameter)
        transfer = flight.window.job.transfer
        if key not in self._trusted or _compiled_something() or (transfer is not None and transfer.done()):
            return False
        self._late.setdefault(key, []).append(flight)
        return True

    @property
    def late(self) -> list[Flight]:
        """What is left to a forward that has not come yet."""
        return [flight for flights in self._late.values() for flight in flights]

    def restore(self, flight: Flight) -> None:
        """Leave a saved wait to the next forward."""
        self._late.setdefault(id(flight.weight.parameter), []).append(flight)

    def finish(self) -> None:
        """Wait for all that is left."""
        for key in list(self._late):
            self._show_weight(key)

    def begin_step(self) -> None:
        """Wait for all that is left, and note which layers' forwards were seen."""
        self.finish()
        self._trusted, self._seen = self._seen, set()

    def remove(self) -> None:
        """Take the hooks off the module."""
        for handle in self._handles:
            handle.remove()

    def _before_forward(self, keys: tuple[int, ...], *_: object) -> None:
        if in_backward():  # recomputation under gradient checkpointing
            return
        self._seen.update(keys)
        for key in keys if self._late else ():
            self._show_weight(key)

    def _show_weight(self, key: int) -> None:
        flights = self._late.get(key, [])
        while flights:
            self._show(flights[0])
            del flights[0]  # not before, so that an exception loses nothing
        self._late.pop(key, None)

    def _before_state_dict(self, *_: object) -> None:
        self.finish()


def _hooks_of_a_copy() -> ForwardWaits:
    """Hooks that have nothing to wait for."""
    return ForwardWaits(nn.Module(), lambda _: None)


def _compiled_something() -> bool:
    """Whether torch.compile has made code in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters.get("frames"))
