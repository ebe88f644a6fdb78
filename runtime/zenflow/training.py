"""One training run as the optimizer drives it: steps, windows, and changes of the knobs in between."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from zenflow.config import ZenFlowConfig
from zenflow.control import StepControl, step_control
from zenflow.device import Device, Transfer
from zenflow.errors import ConfigError, ZenFlowError
from zenflow.gradients import Gradient, Gradients, OnDevice, guesses, log, norms, set_controls
from zenflow.history import History
from zenflow.importance import AutoInterval, Importance, select
from zenflow.knobs import KnobChange, prepare, reserve
from zenflow.late_weights import LateWeights, PendingUpdate
from zenflow.ledger import Balance
from zenflow.living import LastSave
from zenflow.model import Groups, ModelState, Split
from zenflow.rank_sums import RankSums
from zenflow.ranks import Ranks
from zenflow.rules import Hyper, Rule
from zenflow.runtime import make_runtime
from zenflow.schedule import BucketWindow, StepPlan, WindowClock, selects
from zenflow.selection import Move
from zenflow.sharded import Shards
from zenflow.signals import HeldSignals
from zenflow.stats import Traffic
from zenflow.weight import WeightState

PATIENCE_S = 60.0  # that the host gets at most for its work once nobody can ask for anything any more
_logger = logging.getLogger("zenflow")

Live = list[Gradient]  # of the parameters that have one in this step


class Training:
    """Owns everything that one optimizer's steps change, but for the parameter groups.

    Args:
        module: the model that owns the parameters, if it is known.
        made_with: the knobs that the user asked for in the beginning; None: these.
        ranks: that train the same model; None where there is one.
        shards: the rows that this rank holds; None: whole parameters.
    """

    def __init__(
        self,
        rule: Rule,
        config: ZenFlowConfig,
        module: nn.Module | None,
        device: Device,
        made_with: ZenFlowConfig | None = None,
        ranks: Ranks | None = None,
        shards: Shards | None = None,
    ) -> None:
        self.config = config
        """The knobs in force."""
        self.made_with = made_with or config
        """The knobs that the user asked for in the beginning."""
        self.brought: ZenFlowConfig | None = None
        """The knobs that a saved state has brought; None: there was none."""
        self.kept: Mapping[str, Any] | None = None
        """To go back to, where those in force are only tried; None: none are, as far as is known."""
        self.rule = rule
        self.history = History(device)
        self.runtime = make_runtime(device, rule, config, self.history, ranks)
        self.engine = self.runtime.engine
        self.model = ModelState(self.runtime, module)
        self.clock = WindowClock(config)
        self.importance = Importance()
        self.auto = AutoInterval(self.runtime, self.model.weights)
        self.shards = shards
        """The rows that this rank holds, where the parameters are sharded."""
        self._sums = None if shards is None else RankSums(self.runtime, shards)
        self._module = module
        self._device = device
        self.begun = False
        """Whether the parameters were split, which happens at the first step."""
        self._change: KnobChange | None = None
        self._waits: LateWeights | None = None
        self.hypers: list[Hyper] = []
        """Of each group, in the last step, or at the beginning."""
        self.grad_norm: torch.Tensor | None = None
        """Of the last step, where its knobs asked for it."""
        self._last_d2h: Transfer | None = None
        self._on_device = OnDevice(self.runtime)
        self.gradients = Gradients(
            self.runtime,
            self.model.windows.groups,
            # Without shards backward gives each of several ranks its own gradients, which are to be averaged first.
            stream=config.stream and (ranks is None if shards is None else shards.can_stream),
            least_firings=config.gradient_accumulation_steps,
            begin=self._begin_in_backward if shards is None else None,  # which may ask the other ranks
        )
        self.shows_flushed = False
        """Whether the weights are those of a flush for the time."""
        self.restored_flushed = False
        """Whether it was restored with a model's file of flushed weights, and has taken no step since."""
        self.last_save = LastSave(self)
        self._torn = False  # a step was interrupted half-way
        self.open = True
        """Whether steps can be taken."""
        self.ended_by = "close(): make a new optimizer"
        self._ending = False

    # --- a step ----------------------------------------------------------------------------------------------------

    def step(self, groups: Groups, grad_scale: torch.Tensor | None, found_inf: torch.Tensor | None) -> None:
        """Take one step with the gradients in `.grad`.

        Args:
            grad_scale: what the loss was multiplied with (GradScaler's protocol).
            found_inf: not 0 where GradScaler found a non-finite gradient.
        """
        if not self.open:
            raise ZenFlowError(f"step() was called after {self.ended_by}")
        if self._sums is not None:
            self._step_of_rows(self._sums, groups, grad_scale, found_inf)
            return
        self.engine.check()
        self._require_well()
        if not self.begun:
            self.begin(groups)
        live = self._live(groups)
        if self.runtime.ranks is not None:
            found_inf = self.runtime.ranks.any(found_inf, self._device.torch_device)
        self._take_step(live, groups, grad_scale, found_inf)
        self._end_step()

    def _step_of_rows(
        self, sums: RankSums, groups: Groups, grad_scale: torch.Tensor | None, found_inf: torch.Tensor | None
    ) -> None:
        """A step of sharded weights: no rank raises alone, and none leaves the others in a collective."""
        sums.require_well()
        if not self.begun:
            self._follow_shards()
            self.begin(groups)
        self.average_gradients(groups)
        live: Live = []
        if sums.error is None:
            with sums.keeping():
                self.engine.check()
                live = self._live(groups)
        with self._communicating():
            skip = sums.take(self.model.weights, live, self.clock.step + 1, found_inf)
        if sums.error is None:
            with sums.keeping():
                self._take_step(live, groups, grad_scale, skip)
        self.gather()
        if sums.error is None:
            with sums.keeping():
                self._end_step()
        if sums.error is not None:
            self.gradients.remove()  # the step that tells the others has gradients, but no room for them on the host

    def _take_step(
        self, live: Live, groups: Groups, grad_scale: torch.Tensor | None, found_inf: torch.Tensor | None
    ) -> None:
        self._require_room(live)
        self.hypers = [self.rule.hyper(group) for group in groups]
        self.model.take_outside_writes()
        self.restored_flushed = False
        self._torn = True
        self.gradients.hand_over()
        self._take(live, groups, self._control(live, grad_scale, found_inf), grad_scale)

    def _end_step(self) -> None:
        self.gradients.end_step()
        if self.shards is not None:
            self.shards.drop_gradients()
        traffic, self.runtime.traffic = self.runtime.traffic, Traffic()
        self.history.open.pin_s = self.runtime.memory.end_step()
        if self._sums is not None:
            self._sums.end_step(self.history.open)
        self.history.end_step(self.clock.step, traffic)
        self.leave_weights()
        self._torn = False

    def _live(self, groups: Groups) -> Live:
        """The gradients of a step that begins."""
        self._device.begin_step()
        if self._waits is not None:
            self._waits.begin_step()
        if self.shards is not None:
            self._follow_shards()
        self.history.begin_step()
        self._device.charge_thread(weights=len(self.model.weights))
        if self.shards is None:
            self.average_gradients(groups)
        return self.gradients.collect(self.model.weights)

    def _follow_shards(self) -> None:
        """Work on the memory that sharded parameters have by now, which nobody else reads meanwhile."""
        if self.shards is not None:
            self._device.let_go_of_weights()
            self.shards.follow()

    def _require_well(self) -> None:
        """Refuse to go on with a step that was interrupted, here or on another rank."""
        if self._sums is not None:
            self._sums.require_well(alone=True)
        if self._torn:
            raise ZenFlowError(
                "an earlier step() was interrupted half-way: go on with a new optimizer from saved weights"
            )

    def average_gradients(self, groups: Groups) -> None:
        """Average `.grad` over the ranks, unless it was and nobody has touched it since."""
        ranks = self.runtime.ranks
        if ranks is None:
            return
        with self._communicating():
            if self.shards is not None:
                self.shards.reduce(ranks, self._device)
            else:
                ranks.reduce((parameter for group in groups for parameter in group["params"]), self._device)

    def gather(self) -> None:
        """Let ranks that have whole parameters have each other's rows; to be called on all of them."""
        if self.shards is not None and self.runtime.ranks is not None:
            with self._communicating():
                self.shards.gather(self.runtime.ranks, self._device)

    def _communicating(self) -> AbstractContextManager[None]:
        """Count what is waited for as communication, where there are others to wait for."""
        alone = self.runtime.ranks is None
        return nullcontext() if alone else self.history.open.timed(self._device, "comm")

    def leave_weights(self) -> None:
        """Give the weights back to the script, at the end of whatever changes them."""
        self.model.watch()
        self.cover_weights()

    def cover_weights(self) -> None:
        """From now on, let what was left to the use of a weight happen before it."""
        if self._waits is not None:
            self._waits.end_step()

    def _require_room(self, live: Live) -> None:
        """Refuse parameters that were thawed where there is no host memory for them; nothing has changed yet."""
        late = [(one.weight.plan, one.weight.parameter.dtype) for one in live if not one.weight.started]
        if late and self.clock.step:
            nbytes = self.runtime.host_bytes_for(late, self.model.windows.buckets, self.config)
            self.runtime.require_host_bytes(
                [nbytes], "the state of parameters with their first gradient", "freeze them, or raise topk_ratio"
            )

    def _take(self, live: Live, groups: Groups, control: StepControl | None, grad_scale: torch.Tensor | None) -> None:
        change = self._change
        splits = change is not None and change.splits
        full = self.auto.closes(self.config, self.clock.window_steps + 1)
        plan = self.clock.advance(close=full or change is not None, at_once=splits)
        windows = self.model.windows
        closing = windows.closing(plan)
        # Where buckets close by turns, a selection waits for a later step: none of them has to wait for it.
        moves = windows.resolve_pending(closing, self.history.open) if closing and not plan.closes else {}
        skip = None if control is None else control.skip
        everyone = selects(plan.step, self.config.select_interval)
        apart = self.config.update_interval == "auto"
        selecting = select(
            self.runtime, self.history, self.importance, live, control, everyone=everyone, splits=splits, apart=apart
        )
        self.gradients.stream(selecting.started)
        for weight in self.model.moving(groups, change.config) if change is not None and splits else ():
            weight.drop_proposal()  # they are selected for another split
        if apart:
            self.auto.add(selecting.weights, selecting.energies, grad_scale, skip)
        if self.runtime.ledger is not None:
            for gradient in live:
                self.runtime.ledger.produce(gradient.weight.name, gradient.mass(), skip)
        if plan.closes:
            moves = windows.resolve_pending(None, self.history.open)
        self._split(plan, closing, moves, live)
        if change is not None:
            self._change = None
            self._take_change(change, groups)
        self.engine.reach(plan.step)
        windows.ask(plan.step + 1)

    def _split(
        self, plan: StepPlan, closing: Mapping[int, BucketWindow], moves: Mapping[WeightState, Move], live: Live
    ) -> None:
        """Log the deferred columns, update the others, make visible what is due, close windows."""
        windows = self.model.windows
        self.gradients.dispatch(live)  # behind what the host is told of this step, which is little
        self._on_device.update(live, self.hypers)
        # What waits for the link is bounded to one step's gradients.
        if self._last_d2h is not None and not self._last_d2h.done():
            with self.history.open.timed(self._device, "d2h"):
                self._device.block_on(self._last_d2h)
        log(live, plan.step, self.hypers)
        self._last_d2h = self.runtime.last_d2h
        windows.apply(plan.step, self.history.open, closing=closing)
        if self.runtime.guesses and not (plan.closes and plan.synchronous):
            windows.guess(guesses(live), self.hypers, moves)
        if closing:
            windows.close(plan, closing, self.hypers, moves, self.history.open, streamed=self.gradients.streamed)
        if plan.closes:
            self._end_window()

    def _end_window(self) -> None:
        self.clock.close()
        self.auto.begin_window()

    def _control(
        self, live: Live, grad_scale: torch.Tensor | None, found_inf: torch.Tensor | None
    ) -> StepControl | None:
        control = (
            None
            if not live
            else step_control(
                lambda: norms(live),
                self._device.torch_device,
                max_grad_norm=self.config.max_grad_norm,
                skip_nonfinite=self.config.skip_nonfinite,
                grad_scale=grad_scale,
                found_inf=found_inf,
            )
        )
        self.grad_norm = None if control is None else control.norm
        set_controls(self.runtime, live, control)
        return control

    # --- between steps ---------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Close the window and apply every pending host update now."""
        if not self.begun or not self.open:
            return
        try:
            self._flush()
        finally:
            self.gather()  # others wait for this rank
        self.leave_weights()

    def _flush(self) -> None:
        self._require_well()
        self._follow_shards()
        self.gradients.restore()  # columns may change tier below
        self.finish_late()
        self.model.take_outside_writes()
        windows, record = self.model.windows, self.history.open
        windows.apply(self.clock.step, record, closing=range(windows.buckets))
        if self.clock.window_steps or self.model.shows_ahead:
            plan = StepPlan(self.clock.step, self.clock.window_steps, closes=True, synchronous=True, exact=True)
            closing = windows.closing(plan)
            windows.close(plan, closing, self.hypers, windows.resolve_pending(None, record), record)
            self._end_window()
            self.finish_late()
        self.engine.drain()

    def finish_late(self) -> None:
        """Make visible what was left to the first use of a weight; applies nothing that is not due."""
        if self._waits is not None:
            self._waits.finish()
        if self._sums is not None and self._sums.error is not None:
            raise self._sums.error

    def let_go(self, advice: str) -> None:
        """Apply what is pending and end the host engine, or have it done before a weight is used.

        A collector may call this in any thread, also in one that the host engine needs. A host that does not get on is
        given up after `PATIENCE_S`, and at once what ranks with whole parameters would gather: each comes here alone.
        """
        self.last_save.warn(advice)
        alone = self.shards is None or not self.shards.keeps_whole
        pending = (
            alone and self.begun and not self._torn and not self.engine.failed and not self._device.clock.simulated
        )
        if threading.get_ident() == threading.main_thread().ident:
            self._let_go_now(pending=pending)
            return
        if pending and self._waits is not None:
            for weight in self.model.weights:
                self._waits.before_use(weight.parameter, self._flush_and_close)
            self._waits.end_step()
            weakref.finalize(self, self.engine.stop)  # where the weights are collected too
        else:
            self._close_hooks()
            self.engine.stop()

    def _let_go_now(self, *, pending: bool) -> None:
        try:
            if pending and self.engine.drained_within(PATIENCE_S):
                self._flush_and_close()
            elif pending:
                _logger.warning("updates were given up at the end: the host did not do them in %g s", PATIENCE_S)
        except (ZenFlowError, RuntimeError) as error:  # of weights that have another form, say: nobody can be told else
            _logger.warning("updates were given up at the end: %s", error)
        if self.open:
            self.close()

    def _flush_and_close(self) -> bool:
        if self.open and not self._ending:
            self._ending = True
            try:
                self.flush()
            finally:
                self.close()
        return True

    def set_knobs(self, knobs: Mapping[str, Any], groups: Groups) -> int:
        """Change knobs: the next step closes the window under the old ones, then the new ones hold.

        Args:
            knobs: fields of `ZenFlowConfig` by name.

        Returns:
            The number of the step after which they hold (before the first step: that with which they do).
        """
        config = (self.config if self._change is None else self._change.config).changed(knobs)
        if self.shards is not None:
            self.shards.require_knobs(config)
        self.engine.check()
        change = prepare(self.runtime, self.model, config, groups, self.config)
        self.kept = None
        if self.clock.step:
            self._change = change
        else:
            self.gradients.restore()  # those of the first step
            self._take_change(change, groups)
        return self.clock.step + 1

    def follow_groups(self, groups: Groups, fresh: Set[int]) -> None:
        """Train what is in the groups by now, `fresh` ids anew; flushes where training has begun."""
        if not self.begun:
            return
        reserved = reserve(self.runtime, self.model, self.model.split(groups, self.config), self.config)
        self.flush()
        reserved.clear()
        self.hypers = [self.rule.hyper(group) for group in groups]
        self.model.stop_watch()
        for weight in self.model.drop_others(groups, fresh):
            self.gradients.leave_alone(weight)
        self._resplit(groups)
        self.leave_weights()

    def close(self) -> None:
        """End the host engine without applying what is pending."""
        self._close_hooks()
        self.runtime.memory.close()
        self.engine.close()

    def _close_hooks(self) -> None:
        self.open = False
        if self._waits is not None:
            self._waits.remove()
        self.model.stop_watch()
        self.gradients.remove()
        self.history.stop_recording()

    # --- saved and restored ----------------------------------------------------------------------------------------

    @property
    def asked(self) -> ZenFlowConfig:
        """The knobs that the user asks for: not those that a saved state has brought, which a search may have set."""
        known = self.coming or self.config
        is_kept = self.kept is not None and known == known.changed(self.kept)
        return self.made_with if is_kept or known == self.brought else known

    @property
    def coming(self) -> ZenFlowConfig | None:
        """The knobs that hold after the next step, where a change was asked for."""
        return None if self._change is None else self._change.config

    def settle(self) -> None:
        """Wait for the host work that was submitted, and follow what others wrote; applies nothing that is not due.

        Raises:
            HostEngineError: host work failed.
            UnsupportedError: a parameter was given another shape, dtype or device.
        """
        self._require_well()
        self._follow_shards()
        if not self.open or self.shows_flushed:
            return  # nothing is under way any more, or it has been waited for
        self.finish_late()
        self.model.take_outside_writes(restored=False)
        self.engine.drain()
        self.leave_weights()

    @property
    def pending_steps(self) -> int:
        """How many steps have gradients of which the weights show nothing yet, or not everywhere."""
        entries = [entry for weight in self.model.weights for entry in weight.pending_entries()]
        flights = self.model.windows.in_flight
        flying = (step for flight in flights for window in flight.windows for step in window.steps)
        return len({*flying, *(entry.step for entry in entries if entry.live()[1])})

    def before_use(self, parameter: nn.Parameter, do: Callable[[], bool]) -> None:
        """Have something done before each use of a weight until it returns true or a step begins."""
        assert self._waits is not None
        self._waits.before_use(parameter, do)

    def weights_of(self, groups: Groups) -> list[WeightState]:
        """The weights; before the first step what they would be then."""
        if self.begun:
            return self.model.weights
        model = ModelState(self.runtime, self._module)
        model.take(self.model.split(groups, self.config), groups)
        return model.weights

    def another(self, config: ZenFlowConfig) -> Training:
        """A run that has not begun, of the same model on the same device."""
        made = Training(self.rule, config, self._module, self._device, self.made_with, self.runtime.ranks, self.shards)
        made.runtime.masters = self.runtime.masters  # of weights that have not begun
        return made

    def ledger(self) -> dict[str, Balance]:
        """Every parameter's account, by name.

        Raises:
            ConfigError: none is kept.
            HostEngineError: host work failed.
        """
        if self.runtime.ledger is None:
            raise ConfigError("the ledger was read, but none is kept: set ZenFlowConfig(ledger=True)")
        self.settle()
        ledger = self.runtime.ledger
        return {weight.name: ledger.balance(weight.name, weight.pending_mass()) for weight in self.model.weights}

    # --- splits ----------------------------------------------------------------------------------------------------

    def _begin_in_backward(self, groups: Groups) -> list[WeightState]:
        """Begin with the first gradient of all, so that none has to wait for the first step; which can leave."""
        if self.begun or not self.open or not self.engine.process.is_this:
            return []
        try:
            with HeldSignals(), torch.inference_mode(False), torch.no_grad():
                self.begin(groups)
        except (ZenFlowError, MemoryError):
            return []  # the step finds it again, and raises it
        return [weight for weight in self.model.weights if weight.plan.deferred and weight.parameter.requires_grad]

    def begin(self, groups: Groups, split: Split | None = None) -> None:
        """Split the parameters; at the first step, when it is known which of them are trained.

        Args:
            split: a saved one; None: by the knobs.

        Raises:
            UnsupportedError: a parameter is on another device than at the beginning.
            HostMemoryError: the host has less memory than the split needs.
        """
        split = split or self.model.split(groups, self.config)
        self.config = self.runtime.fitting(self.config, split.trained, split.plan.buckets)
        self.model.take(split, groups)
        self.hypers = [self.rule.hyper(group) for group in groups]
        self.begun = True
        self._take_knobs(self.config)

    def _take_knobs(self, config: ZenFlowConfig) -> None:
        self.config = self.clock.config = config
        self.runtime.deferred_update = config.deferred_update
        self.runtime.guesses = config.look_ahead == "guess" and self.rule.guesses
        self.runtime.log.follow(config)
        self.model.windows.config = config
        self._watch_uses()

    def _watch_uses(self) -> None:
        """Let the use of weights take over waits, where the model is known."""
        if self._waits is None:
            keeping = nullcontext if self._sums is None else self._sums.keeping
            self._waits = LateWeights(self._module, self._show_late, keeping, self.last_save.of_model)
        self.model.windows.waits = self._waits if self.config.pipeline == "bucket" else None

    def _show_late(self, flight: PendingUpdate) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.model.windows.show_late(flight, self.history.open)

    def _take_change(self, change: KnobChange, groups: Groups) -> None:
        """Let new knobs come into force: at the end of the step that closed the window, or before the first."""
        if change.splits:
            self.finish_late()
        if change.splits or change.change_threads is not None:
            self.engine.drain()
        if change.change_threads is not None:
            change.change_threads()
            self.runtime.cores = change.cores
        change.reserve.clear()
        self._take_knobs(change.config)
        if self.begun and change.splits:
            self._resplit(groups)

    def _resplit(self, groups: Groups) -> None:
        with self.history.open.timed(self._device, "select"):
            self.model.take(self.model.split(groups, self.config), groups)
        self.gradients.stream(weight for weight in self.model.weights if weight.started)
        self._watch_uses()
