"""Windows in flight: submit what a close leaves to the host, and make it visible when it is due."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch

from zenflow.arrivals import H2DQueue
from zenflow.buckets import Bucket, Part, transfers_of
from zenflow.checkpoint_format import SavedUpdate
from zenflow.config import AUTO_SELECT_OVERLAP, ZenFlowConfig
from zenflow.deferred import PartWindow
from zenflow.device import Mark
from zenflow.gradients import Guess
from zenflow.groups import Groups
from zenflow.host.engine import Job
from zenflow.kernels.base import GuessedColumns
from zenflow.late_weights import LateWeights, PendingUpdate
from zenflow.rules import Hyper
from zenflow.runtime import Runtime
from zenflow.schedule import BucketWindow, StepPlan, usually_missing
from zenflow.selection import BucketMove, Move
from zenflow.stats import Moved, StepRecord, Wait
from zenflow.weight import OutsideWrite, WeightState, send_moves, wrote


class Windows:
    """Owns the bucket jobs between a close and the step after which they are visible."""

    def __init__(self, runtime: Runtime, weights: Sequence[WeightState]) -> None:
        self._runtime = runtime
        self._device = runtime.device
        self._weights = weights
        self.config = ZenFlowConfig()
        """The knobs in force; may be replaced between two steps."""
        self.buckets = 0
        """B: of the whole model."""
        self.in_flight: list[PendingUpdate] = []
        """Buckets whose windows are not visible yet."""
        self.moved: set[WeightState] = set()
        """Weights of which something has been in flight since this was emptied."""
        self.writing = False
        """Whether weights are written to here, as in a step, so that nobody else's writes are looked for."""
        self.groups = Groups(runtime)
        self._arrivals = H2DQueue(self.config.staging_bytes)
        self.waits: LateWeights | None = None

    # --- close -----------------------------------------------------------------------------------------------------

    def closing(self, plan: StepPlan) -> dict[int, BucketWindow]:
        """The buckets, by number, whose windows end in a step."""
        found = ((bucket, plan.window(bucket, self.buckets, self.config.lag)) for bucket in range(self.buckets))
        return {bucket: window for bucket, window in found if window is not None}

    def resolve_pending(self, closing: Container[int] | None, record: StepRecord) -> dict[WeightState, Move]:
        """What pending selections change in the buckets that close (None: all); waits for the newest of them."""
        pending = [weight for weight in self._weights if weight.pending]
        if not pending:
            return {}
        new = [weight for weight in pending if weight.begin_selection()]
        selected = sum(weight.plan.selected for weight in new)
        record.selected_columns += selected
        with record.timed(self._device, "select"):
            if new and self.config.select_interval == "auto":
                still = sum(weight.still_selected() for weight in new)
                if still >= AUTO_SELECT_OVERLAP * selected:
                    for weight in new:
                        weight.drop_proposal()
            found = {weight: weight.resolve_pending(closing) for weight in pending if weight.pending}
            changes = {weight: change for weight, change in found.items() if change is not None}
            record.moved_columns += sum(len(change.slots) for change in changes.values())
            return send_moves(self._runtime, changes)

    def close(
        self,
        plan: StepPlan,
        closing: Mapping[int, BucketWindow],
        hypers: Sequence[Hyper],
        moves: Mapping[WeightState, Move],
        record: StepRecord,
        *,
        streamed: bool = False,
    ) -> None:
        """Close windows: hand them to the host, exchange columns between the tiers, wait where nothing overlaps.

        Args:
            closing: of which buckets, by number.
            streamed: whether the step's gradients left during backward, the last weight's first.
        """
        record.closed |= plan.ends_a_cycle
        # First all that leave and then all that join: the joining state arrives behind the step's gradients.
        leaving = {
            weight: weight.deferred.submit_leave(move, hypers[weight.group])
            for weight, move in moves.items()
            if weight.deferred is not None
        }
        self._arrivals.want(leaving.values())
        for weight, move in moves.items():
            weight.give_up_selected(move)
        in_turn = plan.synchronous and self.config.pipeline == "none"
        # The host takes what is there, and of that what is needed first. If it waited for the foremost weights behind a
        # slow link, whose gradients arrive last, the log would get no room back, and a single step wait for all of it.
        foremost_first = self._runtime.engine.foremost_first(last_arrives_first=streamed, patient=not plan.synchronous)
        with foremost_first if plan.synchronous or not self._device.takes_host_cores else nullcontext():
            order = self.waits.by_use(self._weights) if plan.synchronous and self.waits is not None else self._weights
            for bucket, parts in self._by_bucket(order, moves, closing).items():
                self._submit(bucket, parts, plan, closing[bucket.kind[0]], hypers, in_turn=in_turn)
        for weight, job in leaving.items():
            with record.timed(self._device, "select"):
                state = job.receive(self._runtime.engine)
            weight.take_selected(moves[weight], state)
            self._arrivals.done(job)
        if plan.synchronous:
            self._apply_synchronously(plan.step, in_turn, record)

    def _by_bucket(
        self, weights: Sequence[WeightState], moves: Mapping[WeightState, Move], closing: Container[int]
    ) -> dict[Bucket, list[_ClosingPart]]:
        """The parts of each closing bucket, each with the columns that change tier; in the order of the first one."""
        found: dict[Bucket, list[_ClosingPart]] = {}
        for weight in weights:
            if weight.deferred is None:
                continue
            parts = weight.deferred.parts
            move = moves.get(weight)
            for number, part in enumerate(parts):
                if part.bucket.kind[0] not in closing:
                    continue
                leaves = None if move is None else move.buckets[number]
                found.setdefault(part.bucket, []).append((weight, part, leaves))
        return found

    def _submit(
        self,
        bucket: Bucket,
        parts: Sequence[_ClosingPart],
        plan: StepPlan,
        ended: BucketWindow,
        hypers: Sequence[Hyper],
        *,
        in_turn: bool,
    ) -> None:
        """Hand a bucket's window to the host, as one job."""
        places, bucket.places = bucket.places, []
        due = ended.due
        missing = 0.0 if self.config.look_ahead == "none" or plan.exact else ended.missing(plan.step)
        weights: list[WeightState] = []
        windows: list[PartWindow] = []
        numel = 0
        for weight, part, leaves in parts:
            assert weight.deferred is not None
            window = weight.deferred.close_part(part, hypers[weight.group], leaves, numel, missing)
            if window is not None:
                weights.append(weight)
                windows.append(window)
                numel += window.result.numel()
        log, runtime = self._runtime.log, self._runtime
        if not windows:
            log.give_back(places)
            return
        log.promise(places)
        entries = [entry for window in windows for entry in window.entries]
        inputs = transfers_of(entries)
        gradients = entries[-1].gradient.transfer if entries else None
        if in_turn and runtime.last_d2h is not None:  # only when every gradient has arrived, as DeepSpeed does
            inputs.append(gradients := runtime.last_d2h)
        if bucket.sent is not None:
            inputs.append(bucket.sent)
        tiers = [weight.deferred for weight in weights]

        def done() -> None:
            for tier, window in zip(tiers, windows, strict=True):
                assert tier is not None
                tier.done(window)
            log.give_back(places)

        job = Job(
            f"updating {_named(weights)}",
            self._device,
            [window.task for window in windows if window.task is not None],
            nbytes=sum(window.nbytes for window in windows),
            inputs=inputs,
            result=runtime.buckets.result_of(bucket)[:numel],
            after=done,
            # Where host work slows the steps down, each step has its share of it; else the sooner the better.
            not_before=due - 1 if self._device.takes_host_cores else 0,
        )
        runtime.device.charge_thread(jobs=1)
        runtime.engine.submit(job)
        self._fly(PendingUpdate(weights, windows, job, gradients, due, plan.synchronous))

    def _fly(self, flight: PendingUpdate) -> None:
        self.in_flight.append(flight)
        for weight, window in flight.parts():
            weight.in_flight.add(window.part.index)
        self.moved.update(flight.weights)

    def restore(self, weight: WeightState, saved: SavedUpdate, coming: torch.Tensor | None) -> None:
        """Put a saved flight of a weight under way again; `coming` is its result where its masters do not tell."""
        assert weight.deferred is not None
        window = weight.deferred.restore_window(saved, coming)
        job = self._resent(window.result.view(-1))
        self._fly(PendingUpdate([weight], [window], job, None, saved.due))

    def _resent(self, result: torch.Tensor) -> Job:
        """A job that only sends what the host has done."""
        job = Job("sending weights again", self._device, (), nbytes=0, inputs=[], result=result)
        return self._runtime.engine.submit(job)

    def _rewrite(self, weight: WeightState, before: torch.Tensor) -> None:
        """Let what is in flight, or shown ahead, count on top of what was written; `before` has the weight's shape."""
        assert weight.deferred is not None
        self._runtime.engine.drain()
        for part in weight.deferred.parts:
            if part.ahead and part.index not in weight.in_flight:
                weight.deferred.rewrite(part, weight.plan.view(before), weight.matrix())
        for flight in self.in_flight:
            mine = [window for of, window in flight.parts() if of is weight]
            if not mine:
                continue
            done = flight.job
            if done.transfer is not None:
                done.transfer.wait()
            for window in mine:
                weight.deferred.rewrite_window(window, weight.plan.view(before), weight.matrix())
            assert done.result is not None
            flight.job = self._resent(done.result)
            self._arrivals.done(done)

    def _apply_synchronously(self, step: int, in_turn: bool, record: StepRecord) -> None:
        if not in_turn:
            self.ask(step)
            self.apply(step, record)
            return
        began = self._device.mark(), self._device.clock.now()
        closed = [flight for flight in self.in_flight if flight.due <= step]
        for flight in closed:
            flight.job.wait(self._runtime.engine)
        self.ask(step)
        for flight in closed:
            self._show(flight, step, record, began)
            began = self._device.mark(), self._device.clock.now()

    # --- visible ---------------------------------------------------------------------------------------------------

    def ask(self, step: int) -> None:
        """Ask for the results that are due after `step` or before.

        They cross the link when they are finished and there is staging memory for them on the device.
        """
        self._arrivals.most_bytes = self.config.staging_bytes
        self._arrivals.want(flight.job for flight in self.in_flight if flight.due <= step)

    def apply(self, step: int, record: StepRecord, *, closing: Container[int] = ()) -> None:
        """Make visible what is due after a step, and what is in flight of buckets that close.

        Where a host update is late, its wait is left to whoever uses the weight first, if there is a module.
        """
        for flight in [one for one in self.in_flight if not one.late and (one.bucket in closing or one.due <= step)]:
            if self.waits is None or flight.bucket in closing or not self.waits.leave(flight):
                self._show(flight, min(step, flight.due), record, (self._device.mark(), self._device.clock.now()))

    def show_late(self, flight: PendingUpdate, record: StepRecord) -> None:
        """Make a bucket visible whose wait was left to the use of its weight."""
        with self._late_write(list(dict.fromkeys(flight.weights))):
            self._show(flight, flight.due, record, (self._device.mark(), self._device.clock.now()))

    @contextmanager
    def _late_write(self, weights: Sequence[WeightState]) -> Iterator[None]:
        """Write to weights, mostly between two steps."""
        if self.writing:
            yield
            return
        with self._device.in_order():
            for weight, write in [(weight, weight.end_watch()) for weight in weights]:
                if write is not None:
                    self.take_outside_write(weight, write)
            yield
        for weight in weights:
            weight.watch()

    def guess(self, found: Sequence[Guess], hypers: Sequence[Hyper], moving: Container[WeightState]) -> None:
        """Move deferred weights by their fresh gradients, until the updates come: after what is due has arrived.

        Before windows close, since columns that leave the host's tier are exact from then on: `moving` weights do not
        wait for a use.
        """
        waits = self.waits
        if waits is not None and waits.are_some:
            found = [now for one in found for now in self._not_late(one, hypers, moving, waits)]
        together: dict[int, list[Guess]] = {}
        for one in found:
            alone = len(one.weights[0].neighbours) > 1
            together.setdefault(id(one) if alone else id(one.control), []).append(one)
        for alike in together.values():
            self._guess(alike, hypers)

    def _not_late(
        self, guess: Guess, hypers: Sequence[Hyper], moving: Container[WeightState], waits: LateWeights
    ) -> list[Guess]:
        """Leave a guess to the use of those weights that wait for an update; what there is to do now."""
        places = []
        for place, weight in enumerate(guess.weights):
            if weight in moving:
                waits.finish_weight(weight.parameter)
            if not waits.after_arrival(weight.parameter, partial(self._guess_late, guess.only(place), hypers)):
                places.append(place)
        return [guess] if len(places) == len(guess.weights) else [guess.only(place) for place in places]

    def _guess_late(self, guess: Guess, hypers: Sequence[Hyper]) -> bool:
        with torch.inference_mode(False), torch.no_grad(), self._late_write(guess.weights):
            self._guess([guess], hypers)
        return True

    def _guess(self, guesses: Sequence[Guess], hypers: Sequence[Hyper]) -> None:
        """Those of one control."""
        control, kernels, columns = guesses[0].control, self._runtime.kernels, []
        for one in guesses:
            weights = one.weights
            missing = usually_missing(self.config, weights[0].plan.first_bucket, self.buckets)
            length = [self._runtime.rule.guess(hyper, missing) for hyper in hypers]
            parameters = [weight.parameter for weight in weights]
            views, lengths = [weight.plan.view for weight in weights], [length[weight.group] for weight in weights]
            columns.append(GuessedColumns(one.tables, one.numbers, parameters, views, one.signs, lengths))
            self._device.charge(2 * sum([parameter.nbytes for parameter in parameters]))
            for weight in weights:
                assert weight.deferred is not None
                for part in weight.deferred.parts:
                    part.ahead = part.guessed = True
            self._look_at_later(weights)
        factor, skip = (None, None) if control is None else (control.factor, control.skip)
        kernels.guess(columns, factor=factor, skip=skip)
        wrote([weight for one in guesses for weight in one.weights])

    def _look_at_later(self, weights: Sequence[WeightState]) -> None:
        """Have weights watched after the step, which are written to now, unless they are and stay so."""
        for weight in weights:
            if not (self._runtime.kernels.by_address and weight.is_kept):
                weight.keep_nothing()
                self.moved.add(weight)

    def take_restored(self, weight: WeightState) -> None:
        """Compare a weight with its restored state: what it is not as it was saved, somebody has written."""
        shown, deferred = weight.shown or {}, weight.deferred
        weight.take_outside_write()
        if shown and deferred is not None:
            before = weight.parameter.detach().clone()
            for place, rows in shown.items():
                columns = deferred.parts[place].columns
                self._runtime.kernels.scatter(weight.plan.view(before), columns, rows.to(before.device))
            if not torch.equal(before, weight.parameter.detach()):
                self._rewrite(weight, before)

    def take_outside_write(self, weight: WeightState, write: OutsideWrite) -> None:
        """Let a weight's masters, and what is in flight for it, follow what somebody else wrote."""
        if write.before is not None:
            before, now = write.before, weight.parameter.detach()
            if torch.equal(before, now):  # waits for the device, but only where somebody asked to write
                return
            self._rewrite(weight, before)
        weight.take_outside_write()

    def _show(self, flight: PendingUpdate, step: int, record: StepRecord, began: tuple[Mark, float]) -> None:
        begin, cpu_begin = began
        job = flight.job
        rows = job.receive(self._runtime.engine)
        cpu_s = self._device.clock.now() - cpu_begin
        assert job.transfer is not None
        d2h_end = None if flight.gradients is None else flight.gradients.end
        record.waits.append(Wait(begin, self._device.mark(), cpu_s, d2h_end, job.transfer.begin))
        self._write(flight, rows)
        wrote(flight.weights)
        self._device.charge(2 * rows.nbytes)
        flight.windows[0].part.bucket.sent = job.transfer
        self._arrivals.done(job)
        for weight, window in flight.parts():
            weight.in_flight.discard(window.part.index)
            window.part.ahead = window.coasts or window.part.guessed
            if weight.restored and weight.shown:  # to which it is compared once it is loaded
                rows = torch.as_tensor(window.slots, device="cpu") - window.part.slots.start
                weight.shown[window.part.index - weight.plan.first_bucket][rows] = window.result
        self.moved.update(flight.weights)
        self.in_flight.remove(flight)  # not before, so that an exception loses nothing
        self._runtime.traffic.h2d_bytes += rows.nbytes
        record.host_s += job.span.seconds
        record.host_bytes += job.nbytes
        record.host_elements += rows.numel()
        for window in flight.windows:
            record.applied.add(window.result.numel(), [step - entry.step for entry in window.entries])
            if window.moved is not None:
                record.moved = record.moved or Moved()
                record.moved.join(window.moved)

    def _write(self, flight: PendingUpdate, rows: torch.Tensor) -> None:
        """Write the results of a bucket into its weights, by one launch where they are all there."""
        kernels, weights = self._runtime.kernels, flight.weights
        if all(window.is_whole and weight.is_plain for weight, window in flight.parts()):
            tables = self.groups.of(weights, rows.dtype).tables
            kernels.show_bucket(tables, [weight.parameter for weight in weights], rows)
            return
        for weight, window in flight.parts():
            n, length = window.result.shape
            arrived = rows.narrow(0, window.start, n * length).view(n, length)
            weight.keep_nothing()
            kernels.scatter(weight.matrix(), window.columns, arrived)


_ClosingPart = tuple[WeightState, Part, BucketMove | None]
"""A weight's part of a bucket, and the columns of it that change tier."""


def _named(weights: Sequence[WeightState]) -> str:
    first, more = weights[0].name, len(weights) - 1
    return f"{first} and {more} more" if more else first
