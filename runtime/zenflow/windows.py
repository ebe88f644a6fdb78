"""Windows in flight: submit what a close leaves to the host, and make it visible when it is due."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from zenflow.config import ZenFlowConfig
from zenflow.deferred import Ahead, BucketJob
from zenflow.device import Mark, in_backward
from zenflow.rules import AdamWHyper
from zenflow.runtime import Runtime
from zenflow.schedule import StepPlan, due_step
from zenflow.selection import Move
from zenflow.stats import StepRecord, Wait
from zenflow.weight import WeightState


@dataclass(slots=True)
class Flight:
    """A bucket's window that is not visible yet."""

    weight: WeightState
    window: BucketJob
    due: int
    """The step after which it becomes visible."""


class Windows:
    """Owns the bucket jobs between a close and the step after which they are visible."""

    def __init__(
        self, runtime: Runtime, config: ZenFlowConfig, weights: Sequence[WeightState], buckets: int, lag: int
    ) -> None:
        self._runtime = runtime
        self._device = runtime.device
        self._config = config
        self._weights = weights
        self._buckets = buckets
        self._lag = lag
        self._in_flight: list[Flight] = []
        self.waits: ForwardWaits | None = None

    # --- close -----------------------------------------------------------------------------------------------------

    def resolve_pending(self, record: StepRecord) -> dict[WeightState, Move]:
        """Take the selections that are effective at this close; waits for the newest of them."""
        pending = [weight for weight in self._weights if weight.pending]
        if not pending:
            return {}
        begin, cpu_begin = self._device.mark(), time.perf_counter()
        moves = {weight: weight.resolve_pending() for weight in pending}
        record.waits.append(Wait(begin, self._device.mark(), time.perf_counter() - cpu_begin, cause="select"))
        record.selected_columns += sum(weight.plan.selected for weight in pending)
        record.moved_columns += sum(len(move.slots) for move in moves.values() if move is not None)
        return {weight: move for weight, move in moves.items() if move is not None}

    def close(
        self,
        plan: StepPlan,
        hypers: Sequence[AdamWHyper],
        moves: Mapping[WeightState, Move],
        ahead: Mapping[WeightState, Ahead],
        record: StepRecord,
    ) -> None:
        """Close the window: hand it to the host, exchange columns between the tiers, wait where nothing overlaps.

        Args:
            plan: the closing step.
            hypers: of each parameter group, at the closing step.
            moves: columns that change tier here.
            ahead: the closing step's gradient of the columns that leave the deferred tier, already on its way.
            record: receives the waits.
        """
        record.closed = True
        leaving = [(w, move, w.begin_move(move, hypers[w.group], ahead.get(w))) for w, move in moves.items()]
        in_turn = plan.synchronous and self._config.pipeline == "none"
        for weight in self._weights:
            if weight.deferred is None:
                continue
            move = moves.get(weight)
            for window in weight.deferred.submit_window(hypers[weight.group], move, after_all_d2h=in_turn):
                due = plan.step if plan.synchronous else self._due(plan, window)
                self._in_flight.append(Flight(weight, window, due))
                weight.in_flight += 1
        for weight, move, job in leaving:
            begin, cpu_begin = self._device.mark(), time.perf_counter()
            state = job.receive(self._runtime.engine)
            cpu_s = time.perf_counter() - cpu_begin
            record.waits.append(Wait(begin, self._device.mark(), cpu_s, cause="select"))
            weight.finish_move(move, state)
        if plan.synchronous:
            self._apply_synchronously(plan.step, in_turn, record)

    def _due(self, plan: StepPlan, window: BucketJob) -> int:
        return due_step(
            close_step=plan.step,
            bucket=window.bucket.index,
            buckets=self._buckets,
            lag=self._lag,
            window_steps=plan.window_steps,
        )

    def _apply_synchronously(self, step: int, in_turn: bool, record: StepRecord) -> None:
        if not in_turn:
            self.ask(step)
            self.apply(step, record)
            return
        begin, cpu_begin = self._device.mark(), time.perf_counter()
        flights, self._in_flight = self._in_flight, []
        for flight in flights:
            flight.window.job.wait(self._runtime.engine)
        for flight in flights:
            flight.window.job.ask_result()
        for flight in flights:
            self._show(flight, step, record, begin, cpu_begin)
            begin, cpu_begin = self._device.mark(), time.perf_counter()

    # --- visible ---------------------------------------------------------------------------------------------------

    def ask(self, step: int) -> None:
        """Ask for the results that are due after `step` or before; they cross the link when they are finished."""
        for flight in self._in_flight:
            if flight.due <= step:
                flight.window.job.ask_result()

    def apply(self, step: int, record: StepRecord, *, everything: bool = False) -> None:
        """Make visible what is due after a step (or everything that is in flight).

        Where a host update is late, its wait is left to the forward of the layer that needs it, if there is a module.
        """
        due = [flight for flight in self._in_flight if everything or flight.due <= step]
        self._in_flight = [flight for flight in self._in_flight if not everything and flight.due > step]
        for flight in due:
            if self.waits is None or everything or not self.waits.leave(flight):
                self._show(flight, min(step, flight.due), record)

    def show_late(self, flight: Flight, record: StepRecord) -> None:
        """Make a bucket visible whose wait was left to the forward."""
        self._show(flight, flight.due, record)

    def _show(
        self,
        flight: Flight,
        step: int,
        record: StepRecord,
        begin: Mark | None = None,
        cpu_begin: float | None = None,
    ) -> None:
        begin = self._device.mark() if begin is None else begin
        cpu_begin = time.perf_counter() if cpu_begin is None else cpu_begin
        window, weight = flight.window, flight.weight
        job = window.job
        rows = job.receive(self._runtime.engine)
        cpu_s = time.perf_counter() - cpu_begin
        assert job.transfer is not None
        record.waits.append(Wait(begin, self._device.mark(), cpu_s, window.gradients.end, job.transfer.begin))
        weight.refuse_outside_writes()
        weight.scatter(window.columns, rows)
        self._device.charge(2 * rows.nbytes)
        window.bucket.sent = job.transfer
        weight.in_flight -= 1
        self._runtime.traffic.h2d_bytes += rows.nbytes
        record.host_s += job.span.seconds
        record.host_bytes += job.nbytes
        record.host_elements += rows.numel()
        for entry in window.entries:
            record.applied.add(rows.numel(), step - entry.step)


class ForwardWaits:
    """Waits for late buckets, left to the forward of the layer that owns the weight.

    A weight is left to it only if its layer's forward was seen in the step before, so a weight that another module
    reads is waited for in `step()`.
    """

    def __init__(self, module: nn.Module, show: Callable[[Flight], None]) -> None:
        self._show = show
        self._late: dict[int, list[Flight]] = {}
        self._seen: set[int] = set()
        self._trusted: set[int] = set()
        self._handles = []
        for part in module.modules():
            if next(part.parameters(recurse=False), None) is not None:
                self._handles.append(part.register_forward_pre_hook(self._before_forward))
            self._handles.append(part.register_state_dict_pre_hook(self._before_state_dict))

    def __reduce__(self) -> tuple[object, ...]:
        # A copy of the module (deepcopy, pickle) takes its hooks along; they must not drag the optimizer with them.
        return _hooks_of_a_copy, ()

    def leave(self, flight: Flight) -> bool:
        """Take over the wait for a bucket, unless it has arrived or its layer's forward cannot be relied on."""
        key = id(flight.weight.parameter)
        transfer = flight.window.job.transfer
        if key not in self._trusted or (transfer is not None and transfer.done()):
            return False
        self._late.setdefault(key, []).append(flight)
        return True

    def finish(self) -> None:
        """Wait for all that is left."""
        late, self._late = self._late, {}
        for flights in late.values():
            for flight in flights:
                self._show(flight)

    def begin_step(self) -> None:
        """Wait for all that is left, and note which layers' forwards were seen."""
        self.finish()
        self._trusted, self._seen = self._seen, set()

    def remove(self) -> None:
        """Take the hooks off the module."""
        for handle in self._handles:
            handle.remove()

    def _before_forward(self, module: nn.Module, _: object) -> None:
        if in_backward():  # recomputation under gradient checkpointing
            return
        for parameter in module.parameters(recurse=False):
            self._seen.add(id(parameter))
            for flight in self._late.pop(id(parameter), ()):
                self._show(flight)

    def _before_state_dict(self, *_: object) -> None:
        self.finish()


def _hooks_of_a_copy() -> ForwardWaits:
    """Hooks that have nothing to wait for."""
    return ForwardWaits(nn.Module(), lambda _: None)
