"""An event-driven simulation of the runtime's pipeline: layer by layer, piece by piece, until it repeats itself.

It follows the runtime's schedule: gradients leave as backward produces them (or in the step), windows close every S
steps, pieces are shown after step e_w + 1 + floor(b * min(L, n_w) / B), weights cross the link in the step before, as
many as staging has room for, the log has room for S steps and S times the largest bucket. Staggered windows close in S
different steps and are shown L steps later. The host takes the foremost piece whose gradients are there; it waits for
the foremost of all where nothing is lost by it. Selections do not change.

Several ranks are alike: one is followed. Its layers are units of FSDP2, gathered for forward and backward; a layer's
gradients leave when they are reduced. Waits for late weights are not left to forward. Ranks that have whole weights
average gradients after backward and gather weights at a step's end, in turn with all else; nothing leaves before.

The training thread launches all that the device does and is ahead of it by a step at most. Its own time is spent where
the runtime's calls are: before a layer's work, where a bucket is sent, at the beginning of `step()`, and for each host
job at a window's close.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from zenflow import ZenFlowConfig
from zenflow.host.places import padded
from zenflow.schedule import logged_bytes
from zftune.planner.model import CAUSES
from zftune.planner.rates import Rates, score_ms
from zftune.planner.resources import Collectives, Log, Server, StagingBytes
from zftune.planner.split import Piece, Split

_LEAST_STEPS = 24
_STATE = 12
"""Bytes of a column's element that changes tier: master and moments."""
_LEAST_WINDOWS = 4


@dataclass(frozen=True, slots=True)
class Steady:
    """A steady step, on average over whole windows."""

    step_ms: float
    stall_ms: dict[str, float]
    host_utilisation: float
    steps_ms: tuple[float, ...]
    """Each step of the last window."""
    packed_bytes: float
    """Most gradients that waited on the device for the link."""
    arrived_bytes: float
    """Most updated weights that ever waited on the device, or were on their way."""

    @property
    def compute_ms(self) -> float:
        """What the compute stream works."""
        return self.step_ms - sum(self.stall_ms.values())


@dataclass(slots=True, eq=False)
class _Flight:
    """A piece's window on its way through host and link."""

    number: int
    piece: Piece
    due: int
    arrived: float
    """When the last of its gradients was on the host."""
    updated: float
    up: tuple[float, float] | None = None
    """When its copy to the device begins and ends, once it was asked for."""


@dataclass(slots=True)
class _State:
    """Everything that changes from step to step."""

    now: float = 0.0
    """The compute stream's."""
    thread: float = 0.0
    """The training thread's, which runs ahead of the device and is behind its own waits only."""
    down: Server = field(default_factory=Server)
    up: Server = field(default_factory=Server)
    host: Server = field(default_factory=Server)
    stall: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    flights: list[_Flight] = field(default_factory=list)
    wanted: deque[_Flight] = field(default_factory=deque)
    late: list[_Flight] = field(default_factory=list)
    """Left to the next forward."""
    asked_bytes: float = 0.0
    arrived_peak: float = 0.0
    last_down: float = 0.0
    """When the step before had sent everything."""

    def wait(self, until: float, cause: str, *, queued: float = 0.0) -> None:
        """Let the thread wait, and the compute stream when it has done what it was given, which takes `queued`."""
        self.thread = max(self.thread, until)
        if until - queued > self.now:
            self.stall[cause] += until - queued - self.now
            self.now = until - queued

    def call(self, duration: float, *, queued: float = 0.0) -> None:
        """Spend the thread's time; what it launches next comes after that, beside the work `queued` on the device."""
        if duration:
            self.thread += duration
            self.stand(self.thread - queued, "thread")

    def stand(self, until: float, cause: str) -> None:
        """Let the compute stream wait, and not the thread."""
        if until > self.now:
            self.stall[cause] += until - self.now
            self.now = until


@lru_cache(maxsize=512)  # a plan asks again for other amounts of memory, which change nothing here
def simulate(rates: Rates, split: Split, config: ZenFlowConfig) -> Steady:
    """Run the pipeline until it is steady and measure whole windows of it.

    `update_interval` "auto" is taken as its longest window. The optimizer is assumed to know the model, so that
    forward waits layer by layer.
    """
    return _Pipeline(rates, split, config).run()


def _send_of(rates: Rates, piece: Piece) -> tuple[float, float, float, int]:
    """Of one rank: packing and copy in ms, bytes of the copy and of the log's entry."""
    own = piece.elements / rates.ranks
    return (
        rates.pack_ms(own),
        rates.down_ms(own),
        rates.element_bytes * own,
        _entry_bytes(piece.log_bytes, rates),
    )


def _entry_bytes(whole: int, rates: Rates) -> int:
    return padded(round(whole / rates.ranks))


class _Pipeline:
    def __init__(self, rates: Rates, split: Split, config: ZenFlowConfig) -> None:
        self.rates, self.split, self.config = rates, split, config
        self.window = config.longest_window
        self.streams = rates.streams(config)
        self.begins = False
        """Whether this is the first step."""
        self.steady = False
        self.state = _State()
        own = split.deferred / rates.ranks
        self.network = None
        if rates.ranks > 1 and not rates.keeps_whole:
            self.network = Collectives(
                [rates.gather_ms(elements) if elements else 0.0 for elements in split.gathered],
                [rates.reduce_ms(elements) if elements else 0.0 for elements in split.reduced],
                [rates.replicate_ms(elements) if elements else 0.0 for elements in split.reduced],
                beside=not rates.gloo,
            )
        self.logged: list[list[int]] = [[] for _ in split.pieces]
        """Of each piece, the open window's entries."""
        self.staging = StagingBytes(rates.element_bytes * own)
        """For what waits on the device for the link, as the training thread sees it."""
        self.packed = StagingBytes(math.inf)
        """That, as it is."""
        self.by_stage: list[list[int]] = [[] for _ in range(split.layers + 1)]
        self.begun = -math.inf
        """When the host began with its last piece."""
        self.sends = [_send_of(rates, piece) for piece in split.pieces]
        largest = _entry_bytes(split.largest_log_bytes, rates)
        entries = ((piece.turn, send[-1]) for piece, send in zip(split.pieces, self.sends, strict=True))
        self.log = Log(logged_bytes(config, entries) + self.window * largest)
        self.before_layers: list[int] = []
        for number, piece in enumerate(split.pieces):
            (self.before_layers if piece.before_layers else self.by_stage[piece.stage]).append(number)
        self.last_end = 0.0
        """When the step before ended."""
        self.arrived = [0.0] * len(split.pieces)
        """When each piece's newest gradient is on the host."""
        self.copied = [0.0] * len(split.pieces)
        """When each piece's last result had left the host."""
        by_unit = self.network is None or not config.overlap_step
        self.in_forward = config.pipeline == "bucket" and by_unit and not rates.keeps_whole
        numbers = list(range(len(split.pieces)))
        if self.network is not None and self.in_forward:
            numbers.sort(key=lambda number: self._unit(split.pieces[number]) < split.layers)  # the rest is first
        self.needed = numbers
        """The pieces in the order in which they are needed."""

    def run(self) -> Steady:
        windows = max(_LEAST_WINDOWS, -(-_LEAST_STEPS // self.window))
        warm = windows // 2 * self.window
        ends: list[float] = []
        for step in range(1, windows * self.window + 1):
            # Of several ranks the first gradients begin the weights in `step()`.
            self.streams = self.rates.streams(self.config) and (step > 1 or self.rates.ranks == 1)
            self.begins = step == 1
            self._forward()
            self._accumulate()
            self._backward()
            self._step(step)
            ends.append(self.state.now)
            if step == warm:
                self.state.stall = dict.fromkeys(CAUSES, 0.0)
                self.state.host.busy = 0.0
                self.steady = True
        return self._steady(ends, warm)

    def _steady(self, ends: list[float], warm: int) -> Steady:
        steps, elapsed = len(ends) - warm, ends[-1] - ends[warm - 1]
        last = [0.0, *ends][-self.window - 1 :]
        return Steady(
            step_ms=elapsed / steps,
            stall_ms={cause: ms / steps for cause, ms in self.state.stall.items()},
            host_utilisation=min(1.0, self.state.host.busy / elapsed) if elapsed else 0.0,
            steps_ms=tuple(b - a for a, b in itertools.pairwise(last)),
            packed_bytes=self.packed.peak,
            arrived_bytes=self.state.arrived_peak,
        )

    # --- a step ----------------------------------------------------------------------------------------------------

    def _forward(self) -> None:
        state, layers = self.state, self.split.layers
        late, state.late = state.late, []
        if self.network is not None:
            self.network.begin_forward(state.now)
            self._gather_late(self.network, layers, late)
        for stage in range(layers + 1):
            if self.network is None:
                for flight in [flight for flight in late if flight.piece.stage == stage]:
                    self._show(flight)
            elif stage < layers:
                self._gather_late(self.network, stage, late)
            if stage < layers:
                self._launch(self.rates.thread.forward_ms, self.rates.forward_ms / layers)
                state.now += self.rates.forward_ms / layers

    def _accumulate(self) -> None:
        """The other passes of a step, from which nothing leaves."""
        more, thread = self.rates.accumulation - 1, self.rates.thread
        calls = more * (thread.forward_ms + thread.backward_ms)
        duration = more * (self.rates.forward_ms + self.rates.backward_ms)
        self.state.call(calls, queued=min(calls, duration))
        self.state.now += duration

    def _launch(self, thread_ms: float, pad: float) -> None:
        """Launch a layer's share of a pass, which takes the device `pad` and may begin with the first launch."""
        duration = thread_ms / self.split.layers
        self.state.call(duration, queued=min(duration, pad))

    def _unit(self, piece: Piece) -> int:
        """What FSDP2 gathers a piece with."""
        return self.split.layers if piece.before_layers else piece.stage

    def _gather_late(self, network: Collectives, unit: int, late: list[_Flight]) -> None:
        """Begin with a unit; where some of it was late, it is gathered on the compute stream, in order."""
        for flight in (own := [flight for flight in late if self._unit(flight.piece) == unit]):
            self._show(flight)
        if own:
            network.begin_forward(self.state.now)
        self._gather(network, unit, ahead=2)
        self._need(unit)
        if own:
            network.begin_forward(self.state.now)  # and then FSDP2's streams wait for that one

    def _gather(self, network: Collectives, unit: int, *, ahead: int) -> None:
        network.gather(unit, self.state.now, ahead=ahead)
        if not network.beside:
            self.state.stand(network.there(unit), "comm")

    def _need(self, unit: int) -> None:
        """Begin with a unit's compute."""
        assert self.network is not None
        self.state.stand(self.network.there(unit), "comm")
        self.network.show(self.state.now)

    def _backward(self) -> None:
        """A layer's own work follows the staging of its gradients, which are whole when that work is done."""
        pad = self.rates.backward_ms / self.split.layers
        if self.network is not None:
            self._backward_of_units(self.network, pad)
            return
        for stage in reversed(range(self.split.layers)):
            self._launch(self.rates.thread.backward_ms, pad)
            if stage == self.split.layers - 1:
                self._stage(self.by_stage[self.split.layers], pad)
            self._stage(self.by_stage[stage], pad)
            self.state.now += pad
        self._stage(self.before_layers, 0.0)

    def _backward_of_units(self, network: Collectives, pad: float) -> None:
        """Of FSDP2: a unit's gradients are reduced when its backward is over, and then staged; the rest's at last."""
        layers, again = self.split.layers, self.rates.reshard
        if again:
            self._gather(network, layers - 1, ahead=1)
        for stage in reversed(range(layers)):
            if again:
                self._need(stage)
                if stage:
                    self._gather(network, stage - 1, ahead=1)
            self._launch(self.rates.thread.backward_ms, pad)
            self.state.now += pad
            self._reduce(network, stage, self.by_stage[stage])
        self._reduce(network, layers, self.before_layers + self.by_stage[layers])

    def _reduce(self, network: Collectives, unit: int, numbers: list[int]) -> None:
        if self.split.reduced[unit]:
            self.state.stand(network.scattered, "comm")  # the last one's buffers are free then
            network.reduce(unit, self.state.now)
            if not network.beside:
                self.state.stand(network.reduced, "comm")
        self._stage(numbers, 0.0)

    def _stage(self, numbers: list[int], pad: float) -> None:
        if not self.streams:
            return
        for number in reversed(numbers) if self.network is None else numbers:
            piece = self.split.pieces[number]
            self.state.now += self.rates.stage_ms(piece.scored, piece.kept) / self.rates.ranks
            self._send(number, ahead=pad)

    def _send(self, number: int, *, ahead: float) -> None:
        """Pack a piece and queue its copy; what waits in backward still has half a layer to work off."""
        state, (pack_ms, down_ms, nbytes, log_bytes) = self.state, self.sends[number]
        state.call(self.split.pieces[number].buckets * self.rates.thread.bucket_ms, queued=ahead / 2)
        self._read_masters([self.split.pieces[number]] if self.streams else ())
        if self.streams and (room := self.staging.when(state.thread, nbytes, alone=True)) > state.thread:
            state.wait(room, "d2h", queued=ahead / 2)
        packed_at = state.now
        state.now += pack_ms
        there, entry = self.log.take(state.thread, log_bytes)
        if there > state.thread:
            state.wait(there, "host", queued=ahead / 2)
        self.logged[number].append(entry)
        ready = max(state.now + ahead, 0.0 if self.network is None else self.network.reduced)
        _, end = state.down.serve(ready, down_ms)
        self.arrived[number] = end
        if self.streams:
            self.staging.take(nbytes)
            self.staging.give_back(end, nbytes)
        if self.steady:
            self.packed.when(packed_at, nbytes)
            self.packed.take(nbytes)
            self.packed.give_back(end, nbytes)

    def _step(self, step: int) -> None:
        state = self.state
        closing = {n for n, piece in enumerate(self.split.pieces) if (step - piece.turn) % self.window == 0}
        state.thread = max(state.thread, self.last_end)  # it is ahead by a step at most
        state.call(self.split.weights * self.rates.thread.weight_ms)
        if self.network is not None:
            state.stand(self.network.reduced, "comm")
        if self.rates.keeps_whole:
            self._exchange(self.rates.reduce_ms)
        state.now += score_ms(self.rates, self.split, stream=self.streams)
        if self.network is not None:
            state.stand(self.network.add_up(state.now, self.rates.add_up_ms(self.split.words)), "comm")
        elif self.rates.keeps_whole:
            state.stand(state.now + self.rates.add_up_ms(self.split.words), "comm")
        self._read_masters(() if self.streams else self.split.pieces)
        behind = state.last_down > state.thread
        if behind:
            self._update()
            state.wait(state.last_down, "d2h")
        if not self.streams:
            for number in range(len(self.split.pieces)):
                self._send(number, ahead=0.0)
        state.last_down = state.down.free_at
        if not behind:
            self._update()
        self._apply(step, closing)
        if closing:
            self._close(step, closing)
        self._ask(step + 1)
        if self.rates.keeps_whole:
            self._exchange(self.rates.gather_ms)
        self.last_end = state.now

    def _exchange(self, duration_ms: Callable[[float], float]) -> None:
        """A collective of each bucket of whole weights, one after the other, beside no compute."""
        self.state.stand(self.state.now + sum(map(duration_ms, self.split.exchanged)), "comm")

    def _read_masters(self, pieces: Iterable[Piece]) -> None:
        """The host takes weights over, in the first step; which of several cycles follows may depend on it."""
        for piece in pieces if self.begins else ():
            own = piece.elements / self.rates.ranks
            _, end = self.state.down.serve(self.state.now, self.rates.down_ms(own))
            self.state.host.serve(end, self.rates.read_ms(own))

    def _update(self) -> None:
        """Resident and selected columns."""
        self.state.now += self.rates.update_ms(self.split.resident + self.split.selected) / self.rates.ranks

    # --- windows ---------------------------------------------------------------------------------------------------

    def _close(self, step: int, closing: Container[int]) -> None:
        state, synchronous = self.state, not self.config.overlap_step
        needed = [number for number in self.needed if number in closing]
        elements = sum(self.split.pieces[number].elements for number in needed)
        share = elements / max(1, self.split.deferred)
        buckets = sum(self.split.pieces[number].buckets for number in needed)
        state.call(buckets * self.rates.thread.job_ms)  # the host begins when it has all jobs
        in_turn = synchronous and self.config.pipeline == "none"
        arrived = [state.down.free_at] * len(self.arrived) if in_turn else self.arrived
        flights: dict[int, _Flight] = {}
        # Whether ranks skip the step they know at its end, and the host behind all of its gradients.
        told = state.down.free_at if self.network is not None and self.streams else 0.0
        inputs = [max(told, *pair) for pair in zip(arrived, self.copied, strict=True)]
        self._exchange_columns(step, told, share)
        left = list(needed)
        chosen = max(state.now, self.begun, told)
        in_order = not synchronous and self._rest_comes_soon(inputs, chosen, needed)
        while left:
            # The next is chosen when the one before begins, the first when the device has come to the window's close,
            # and the host knows what all of them wait for.
            chosen = max(state.now, self.begun, told)
            there = (at for at, number in enumerate(left) if in_order or inputs[number] <= chosen)
            number = left.pop(next(there, -1 if self.streams else 0))
            piece = self.split.pieces[number]
            duration = self._host_ms(piece.elements / self.rates.ranks, len(self.logged[number]))
            self.begun, end = state.host.serve(max(state.now, inputs[number]), duration)
            self.log.give_back(end, self.logged[number])
            self.logged[number] = []
            due = step if synchronous else step + piece.due
            flights[number] = _Flight(number, piece, due, arrived[number], end)
        state.flights += [flights[number] for number in needed]
        if synchronous:
            self._apply_synchronously(step, closing, in_turn=in_turn)

    def _host_ms(self, elements: float, steps: int) -> float:
        """A host pass over a rank's elements of one window."""
        return self.rates.host_ms(elements, steps, steps if self.config.deferred_update == "replay" else 1)

    def _exchange_columns(self, step: int, told: float, share: float) -> None:
        """At the first close nearly all selected columns are others than those that training began with."""
        selected = share * self.split.selected / self.rates.ranks
        if step > self.window or not selected or not self.split.deferred:
            return
        state, streams = self.state, _STATE / self.rates.element_bytes
        there = max(state.now, state.down.free_at, told)
        _, updated = state.host.serve(there, self._host_ms(selected, self.window))
        state.down.serve(there, self.rates.down_ms(streams * selected))
        _, end = state.up.serve(updated, self.rates.up_ms(streams * selected))
        state.thread, state.now = max(state.thread, end), max(state.now, end)

    def _rest_comes_soon(self, inputs: list[float], now: float, numbers: Sequence[int]) -> bool:
        """Whether the link brings the rest before the host could do two buckets of average size: then it waits."""
        coming = sum(self.sends[number][1] for number in numbers if inputs[number] > now)
        whole = self._host_ms(self.split.deferred / self.rates.ranks, self.window)
        return coming <= 2 * whole / max(1, self.split.buckets)

    def _apply_synchronously(self, step: int, closing: Container[int], *, in_turn: bool) -> None:
        if in_turn and self.state.flights:
            last = max(self.state.flights, key=lambda flight: flight.updated)
            self._wait_for(last, last.updated)
        self._ask(step)
        self._apply(step, closing if in_turn else ())

    def _ask(self, step: int) -> None:
        """Want what is due after a step: it is sent as soon as it is updated and there is room for it."""
        state = self.state
        known = set(map(id, state.wanted))
        for flight in state.flights:
            if flight.due <= step and flight.up is None and id(flight) not in known:
                state.wanted.append(flight)
        self._send_wanted()

    def _send_wanted(self) -> None:
        state = self.state
        asked: list[_Flight] = []
        asked_bytes = state.asked_bytes
        while state.wanted:
            nbytes = self._bytes(state.wanted[0])
            if asked_bytes and asked_bytes + nbytes > self.config.staging_bytes:
                break
            flight = state.wanted.popleft()
            if flight.up is None:
                asked.append(flight)
                asked_bytes += nbytes
        for flight in sorted(asked, key=lambda flight: max(flight.updated, state.now)):
            self._send_up(flight)

    def _send_up(self, flight: _Flight) -> None:
        state = self.state
        own = flight.piece.elements / self.rates.ranks
        flight.up = state.up.serve(max(flight.updated, state.now), self.rates.up_ms(own))
        state.asked_bytes += self._bytes(flight)
        state.arrived_peak = max(state.arrived_peak, state.asked_bytes)

    def _bytes(self, flight: _Flight) -> float:
        return self.rates.element_bytes * flight.piece.elements / self.rates.ranks

    def _apply(self, step: int, closing: Container[int]) -> None:
        """Show what is due, and what closes again; where it is not there yet, leave it to the forward of its layer."""
        state = self.state
        due = [flight for flight in state.flights if flight.number in closing or flight.due <= step]
        state.flights = [flight for flight in state.flights if not (flight.number in closing or flight.due <= step)]
        for flight in due:
            there = flight.up is not None and flight.up[1] <= state.now
            if self.in_forward and flight.number not in closing and not there:
                state.late.append(flight)
            else:
                self._show(flight)

    def _show(self, flight: _Flight) -> None:
        state = self.state
        if flight.up is None:
            self._send_up(flight)
        assert flight.up is not None
        self._wait_for(flight, flight.up[1])
        state.now += self.rates.scatter_ms(flight.piece.elements) / self.rates.ranks
        self.copied[flight.number] = flight.up[1]
        state.asked_bytes -= self._bytes(flight)
        self._send_wanted()

    def _wait_for(self, flight: _Flight, until: float) -> None:
        """Wait: until its gradients had arrived for D2H, then for the host, then for H2D."""
        state = self.state
        state.wait(min(until, flight.arrived), "d2h")
        state.wait(min(until, until if flight.up is None else max(flight.updated, flight.up[0])), "host")
        state.wait(until, "h2d")
