"""Gradients that leave during backward: hooks on the parameters, and how often each of them fires in a step."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from zenflow.host.places import OwnProcess
from zenflow.sharded import Rows
from zenflow.signals import HeldSignals
from zenflow.staging import Staged
from zenflow.standin import GradientPlaceholder, GradientRecord, taken
from zenflow.writes import shares_memory


class Source(Protocol):
    """What can be done with one parameter's gradient; `ColumnStager` does it."""

    @property
    def bucket(self) -> object | None:
        """Equal for those that leave together; None: it stays."""

    def restore(self, staged: Staged) -> torch.Tensor:
        """Bring it back."""

    def void(self, staged: Staged) -> None:
        """Forget it."""


_Result = TypeVar("_Result")
Dispatch = Callable[[Sequence[tuple[Any, torch.Tensor]]], Sequence[Staged]]
"""Sends gradients away, each with its source; all of them have one bucket."""


class _Group:
    """Parameters whose gradients leave together: when the last of them has come that came in the step before."""

    __slots__ = ("left", "ready", "stream", "watches")

    def __init__(self) -> None:
        self.watches: list[_Watch] = []
        self.ready: list[_Watch] = []
        self.left = 0  # gradients that are still to come
        self.stream = 0  # on which the first of those that are ready was computed

    def begin_step(self) -> None:
        self.ready.clear()
        self.left = sum([watch.came for watch in self.watches])


class _Watch:
    """One parameter: its hooks, and where its gradient is in this step."""

    __slots__ = (
        "__weakref__",
        "bring_back",
        "came",
        "error",
        "expected",
        "firings",
        "group",
        "handles",
        "parameter",
        "source",
        "staged",
        "standin",
        "together",
    )

    def __init__(self, parameter: nn.Parameter, expected: int, together: Callable[[], list[GradientRecord]]) -> None:
        self.parameter = parameter
        self.handles: list[Any] = []
        self.source: Source | None = None
        self.group: _Group | None = None
        self.came = True  # whether there was a gradient in the last step
        self.staged: Staged | None = None
        self.standin: GradientPlaceholder | None = None
        """The last one, which is used again once nobody else has it."""
        self.firings = 0
        self.expected = expected  # firings in a step, as the last step had them
        self.error: Exception | None = None
        """Why a gradient could not leave, kept for the step; it is whole in `.grad`."""
        self.bring_back = _weakly(self.restore, None)
        self.together = together

    def own(self) -> Staged | None:
        """What was staged, if it still is what `.grad` stands for; else it is forgotten."""
        staged, gradient = self.staged, self.parameter.grad
        if staged is not None and not (isinstance(gradient, GradientPlaceholder) and gradient.record is staged.record):
            self.forget()
        return self.staged

    def forget(self) -> None:
        """Void what was staged: `.grad` has been replaced or dropped."""
        staged, self.staged = self.staged, None
        if staged is not None and self.source is not None:
            self.source.void(staged)

    @torch.inference_mode(False)
    @torch.no_grad()
    def restore(self) -> torch.Tensor | None:
        """Put what was staged back into `.grad`, or zeros in place of what was zeroed; None where nothing is."""
        staged, self.staged = self.own(), None
        gradient = self.parameter.grad
        if staged is not None and staged.record.zeroed:
            self.staged = staged
            self.forget()
            staged = None
        if staged is None and isinstance(gradient, GradientPlaceholder) and gradient.record.zeroed:
            zeros = self.parameter.grad = torch.zeros_like(self.parameter, requires_grad=False)
            return zeros
        if staged is None or self.source is None:
            return None
        whole = self.parameter.grad = self.source.restore(staged)
        staged.record.whole = whole
        return whole

    def take(self, staged: Staged) -> None:
        self.staged, record, parameter = staged, staged.record, self.parameter
        record.bring_back, record.together = self.bring_back, self.together
        if (
            self.standin is not None
            and sys.getrefcount(self.standin) <= _own_references()
            and self.standin.dtype == parameter.dtype
        ):
            self.standin.record = record
        else:
            self.standin = GradientPlaceholder(parameter, record)
        parameter.grad = self.standin


@functools.cache
def _own_references() -> int:
    """To a stand-in that its watch alone has; fewer than there can be where counts are not exact."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return -1
    owner = SimpleNamespace(standin=object())
    return sys.getrefcount(owner.standin)


@functools.cache
def _references_of_gradient() -> int:
    """To a gradient that nobody holds but its parameter, as `Streamer.send` counts them."""
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))
    parameter.grad = torch.zeros_like(parameter, requires_grad=False)
    gradient = parameter.grad
    return sys.getrefcount(gradient)


def _weakly(method: Callable[[], _Result], gone: _Result) -> Callable[[], _Result]:
    """A method as a function that does not keep its owner alive; `gone` once there is none."""
    reference = weakref.WeakMethod(method)

    def call() -> _Result:
        bound = reference()
        return gone if bound is None else bound()

    return call


class Streamer:
    """Stages each gradient at the last of the firings that its parameter is expected to have in a step.

    Firings are counted. One more than expected brings the gradient back and adds to it there, as torch does; from the
    next step on as many are expected as the last one had. So the gradient is exact always, and only slower at first.
    """

    def __init__(
        self,
        least_firings: int,
        dispatch: Dispatch,
        current_stream: Callable[[], int],
        begin: Callable[[], object] | None = None,
    ) -> None:
        """`least_firings`: of each parameter in a step, the user's `gradient_accumulation_steps`.

        `current_stream` tells on which the gradient of a hook was computed; `begin` is called before the first gradient
        of all is counted.
        """
        self._least = least_firings
        self._dispatch = dispatch
        self._current_stream = current_stream
        self._begin = begin
        self._groups: list[_Group] = []
        self._watches: dict[int, _Watch] = {}
        self._known: dict[int, int] = {}

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Count the firings of those that are trained and not watched yet, from now on; they are leaves."""
        for parameter in parameters:
            if parameter.requires_grad and id(parameter) not in self._watches:
                expected = self._known.pop(id(parameter), self._least)
                watch = self._watches[id(parameter)] = _Watch(parameter, expected, _weakly(self.records, []))
                watch.handles = _registered(weakref.ref(self), watch)

    def expected(self, parameter: nn.Parameter) -> int:
        """How many firings the next step of a parameter is expected to have."""
        watch = self._watches.get(id(parameter))
        return self._least if watch is None else watch.expected

    def expect(self, parameter: nn.Parameter, firings: int) -> None:
        """Begin with the firings in a step that a saved run had learnt, of a parameter that is not watched yet."""
        self._known[id(parameter)] = max(self._least, firings)

    def leave_alone(self, parameter: nn.Parameter) -> None:
        """Take the hooks off a parameter of which nothing is or will be staged: they would be called for nothing."""
        watch = self._watches.pop(id(parameter), None)
        for handle in () if watch is None else watch.handles:
            handle.remove()

    def stream(self, parameter: nn.Parameter, source: Source) -> None:
        """Stage the gradients of a parameter that is watched, from its next one on."""
        watch = self._watches.get(id(parameter))
        if watch is not None:
            watch.source = source

    def regroup(self) -> None:
        """Let gradients leave by the buckets that there are now; nothing has left."""
        groups: dict[object, _Group] = {}
        for watch in self._watches.values():
            bucket = None if watch.source is None else watch.source.bucket
            watch.group = None
            if bucket is not None:
                watch.group = groups.setdefault(bucket, _Group())
                watch.group.watches.append(watch)
        self._groups = list(groups.values())
        for group in self._groups:
            group.begin_step()

    def came(self, watch: _Watch) -> Sequence[_Watch]:
        """Count a gradient that was added to `.grad`; which are to be sent now."""
        if self._begin is not None:
            begin, self._begin = self._begin, None
            begin()
        watch.firings += 1
        group = watch.group
        if group is None or watch.firings != watch.expected:
            return ()
        group.left -= 1
        stream = self._current_stream()
        if not group.ready:
            group.stream = stream
        elif stream != group.stream:  # in whose order the others leave
            return [watch]
        group.ready.append(watch)
        if group.left > 0:
            return ()
        ready, group.ready = group.ready, []
        if len(ready) == len(group.watches):
            return group.watches  # in the order of the plan, as the tables are that are kept
        return ready

    def send(self, watches: Sequence[_Watch]) -> None:
        leaving, gradients, alone = [], [], _references_of_gradient()
        for watch in watches:
            gradient = watch.parameter.grad
            if (
                gradient is None
                or gradient.layout != torch.strided
                or gradient.requires_grad
                or gradient.dtype != watch.parameter.dtype
                or isinstance(gradient, GradientPlaceholder)
            ):
                continue
            # What somebody else holds may be edited under that name. FSDP2's own always has other holders.
            held = shares_memory(gradient) or sys.getrefcount(gradient) > alone
            if not held or isinstance(watch.parameter, Rows):
                leaving.append(watch)
                gradients.append((watch.source, gradient))
        if leaving:
            for watch, staged in zip(leaving, self._dispatch(gradients), strict=True):
                watch.take(staged)

    def records(self) -> list[GradientRecord]:
        """Of all gradients that have left and that no step has taken."""
        return [watch.staged.record for watch in self._watches.values() if watch.staged is not None]

    def staged(self) -> dict[int, Staged]:
        """What a step finds of the gradients that have left, by the parameter's id; may be asked again.

        The others are whole in `.grad`: gradients that were never staged, or zeros. Changes nothing that a step would
        miss. Raises UnsupportedError if a parameter's `.grad` stands for a gradient that an earlier step took, or what
        kept a gradient of sharded rows from leaving.
        """
        found: dict[int, Staged] = {}
        zeroed: list[_Watch] = []
        for key, watch in self._watches.items():
            staged, gradient, standin = watch.staged, watch.parameter.grad, watch.standin
            if standin is None or gradient is not standin or staged is None or standin.record is not staged.record:
                if watch.error is not None:
                    raise watch.error
                staged = watch.own()
                if isinstance(gradient, GradientPlaceholder) and gradient.record.zeroed:
                    zeroed.append(watch)
                    continue
                if staged is None and isinstance(gradient, GradientPlaceholder):
                    raise taken(gradient.record.name)
            elif staged.record.zeroed:
                zeroed.append(watch)
                continue
            if staged is not None:
                found[key] = staged
        for watch in zeroed:
            watch.forget()
            watch.parameter.grad = torch.zeros_like(watch.parameter, requires_grad=False)
        return found

    def hand_over(self) -> None:
        """Leave all that is staged to a step; afterwards a stand-in in `.grad` only tells its norm.

        In the next step as many firings of each parameter are expected as it had in this one.
        """
        for watch in self._watches.values():
            watch.staged = None
            watch.came = watch.firings > 0
            if watch.came:
                watch.expected = max(self._least, watch.firings)
                watch.firings = 0
        for group in self._groups:
            group.begin_step()

    def restore(self) -> None:
        """Put all that is staged back into `.grad`, before columns change tier between two steps."""
        for watch in self._watches.values():
            watch.restore()

    def remove(self) -> None:
        """Take the hooks off the parameters and forget what is staged."""
        for watch in self._watches.values():
            for handle in watch.handles:
                handle.remove()
            if watch.staged is not None:
                watch.staged.record.give_up()
        self._watches.clear()


def _registered(streamer: weakref.ref[Streamer], watch: _Watch) -> list[Any]:
    """The hooks that tell of a parameter's gradients; none before one is added: a stand-in is brought back then."""
    hook = _hook(streamer, weakref.ref(watch))
    parameter = watch.parameter
    if not isinstance(parameter, Rows):
        return [parameter.register_post_accumulate_grad_hook(hook)]
    # FSDP2 adds the gradient itself; then it runs these hooks of the DTensor behind the reduce-scatter of its unit.
    # What raises there would leave the other ranks in the next collective.
    return [parameter.whole.register_post_accumulate_grad_hook(_kept(weakref.ref(watch), hook))]


def _kept(watch: weakref.ref[_Watch], hook: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    """A hook that leaves its error to the step."""

    def keeping(parameter: torch.Tensor) -> None:
        try:
            hook(parameter)
        except Exception as error:  # noqa: BLE001 - whatever it is, the step raises it
            if (owner := watch()) is not None:
                owner.error = error

    return keeping


def _hook(streamer: weakref.ref[Streamer], watch: weakref.ref[_Watch]) -> Callable[[torch.Tensor], None]:
    """A hook that does not keep the optimizer alive, and leaves a forked child's gradients whole."""
    process = OwnProcess()

    def after(_: torch.Tensor) -> None:
        if (owner := streamer()) is None or (one := watch()) is None:
            return
        if (ready := owner.came(one)) and process.is_this:
            with HeldSignals(), torch.no_grad():
                owner.send(ready)

    return after
