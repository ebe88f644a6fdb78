"""`ZenFlowOptimizer`: an update rule whose state is split between the GPU and the host."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from zenflow.config import ZenFlowConfig
from zenflow.control import StepControl, step_control
from zenflow.device import Device, Transfer, device_for
from zenflow.errors import ConfigError, UnsupportedError, ZenFlowError
from zenflow.forward_waits import Flight, ForwardWaits
from zenflow.history import History
from zenflow.host.tasks import Control
from zenflow.layout import conv1d_weights, plan_model, plan_order
from zenflow.rules import Hyper, Rule
from zenflow.runtime import make_runtime
from zenflow.schedule import StepPlan, WindowClock, selects
from zenflow.stats import StepStats, Traffic
from zenflow.weight import WeightState
from zenflow.windows import Windows

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_DTYPE_NAMES = "float32, bfloat16 and float16"

Live = list[tuple[WeightState, torch.Tensor]]
"""The parameters that have a gradient in this step, with it."""


class ZenFlowOptimizer(Optimizer):
    """An update rule with resident, selected and deferred columns (ZenFlow, arXiv 2505.12242; Twin-Flow).

    With `update_interval=1, overlap_step=False` it is the rule on fp32 masters, wherever the state lives; with a longer
    window the deferred columns receive the same updates later, at most S + L - 1 steps. Any elementwise rule fits the
    split; `zenflow.family` holds an optimizer for each.

    Args:
        params: parameters or parameter groups, fp32, bf16 or fp16, all on one device.
        defaults: the rule's hyperparameters, for groups that do not set their own.
        rule: the update rule.
        config: the knobs; None takes the defaults.
        module: the model that owns the parameters. Gives names, finds transformers' `Conv1D`, and lets a wait for a
            late host update be deferred to the forward of the layer that needs it. Weights that are read otherwise
            after `step()` and before that forward (by an average of weights, or by another module's forward that
            comes first) need `synchronize()` first.
        device: the accelerator; None takes the one that the parameters are on.

    Raises:
        ConfigError: a hyperparameter or knob is not allowed.
        UnsupportedError: a parameter's dtype or device, or several ranks.
    """

    # GradScaler then leaves unscaling and skipping to us, through `grad_scale` and `found_inf`.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        rule: Rule,
        *,
        config: ZenFlowConfig | None = None,
        module: nn.Module | None = None,
        device: Device | None = None,
    ) -> None:
        _refuse_ranks()
        self._rule = rule
        self._windows: Windows | None = None
        super().__init__(params, defaults)
        self.config = (config or ZenFlowConfig()).resolved()
        """The knobs, every "auto" replaced by what it stands for."""
        self._update_interval, self._select_interval = self.config.intervals
        self._clock = WindowClock(
            update_interval=self._update_interval,
            warm_up=self.config.full_warm_up_rounds,
            overlap=self.config.overlap_step,
        )
        first = next(iter(self._parameters()), None)
        if first is None:
            raise ConfigError("params holds no parameter, allowed is at least one")
        self._device = device or device_for(first.device)
        self._history = History(self._device)
        self._runtime = make_runtime(self._device, self._rule, self.config, self._history)
        self._engine = self._runtime.engine
        self._module = module
        self._weights: list[WeightState] = []
        self._waits: ForwardWaits | None = None
        self._hypers: list[Hyper] = []
        self._last_d2h: Transfer | None = None
        self._torn = False  # a step was interrupted half-way
        # Only a request: a collected optimizer may be finalised on any thread, which must not wait for another.
        self._finalizer = weakref.finalize(self, self._engine.stop)

    # --- torch.optim.Optimizer -------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group before the first step.

        Raises:
            UnsupportedError: training has begun, or a parameter cannot be split.
            ConfigError: a hyperparameter is not allowed.
        """
        if self._windows is not None:
            raise UnsupportedError("add_param_group after the first step is not supported: add groups before training")
        super().add_param_group(param_group)
        try:
            self._rule.check(self.param_groups[-1])
            for parameter in self.param_groups[-1]["params"]:
                if parameter.dtype not in _DTYPES:
                    raise UnsupportedError(f"a parameter is {parameter.dtype}, allowed are {_DTYPE_NAMES}")
        except ZenFlowError:
            self.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """Not supported yet.

        Raises:
            UnsupportedError: always; a state without masters and moments would lose them silently.
        """
        raise UnsupportedError("state_dict() of a ZenFlow optimizer is not supported yet: save the model after flush()")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Not supported yet.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError("load_state_dict() of a ZenFlow optimizer is not supported yet")

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step with the gradients in `.grad`; never synchronises the device.

        Raises:
            HostEngineError: host work failed, in this step or an earlier one.
            UnsupportedError: a sparse gradient, or a weight was written to while its update was in flight.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.inference_mode(False), torch.no_grad():
            self._take_step()
        return loss

    def __getstate__(self) -> dict[str, Any]:
        """Refuse copies: they would share the state or lose it.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "a ZenFlow optimizer cannot be copied or pickled: make a new optimizer for the copied model"
        )

    # --- beyond torch ----------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    @torch.no_grad()
    def flush(self) -> None:
        """Close the window and apply every pending host update now.

        Raises:
            HostEngineError: host work failed.
            UnsupportedError: a weight was written to while its update was in flight.
        """
        if self._windows is None:
            return
        self._refuse_torn()
        self.synchronize()
        for weight in self._weights:
            weight.take_outside_writes()
        self._windows.apply(self._clock.step, self._history.open, everything=True)
        if self._clock.window_steps:
            plan = StepPlan(self._clock.step, self._clock.window_steps, closes=True, synchronous=True)
            moves = self._windows.resolve_pending(self._history.open)
            self._windows.close(plan, self._hypers, moves, {}, self._history.open)
            self._clock.close()
            self.synchronize()
        self._engine.drain()

    @torch.inference_mode(False)
    @torch.no_grad()
    def synchronize(self) -> None:
        """Make visible now what a deferred wait has left to the next forward; applies nothing that is not due."""
        if self._waits is not None:
            self._waits.finish()

    def refresh(self) -> None:
        """Read the masters from the weights at the next step, after writes through `.data`, which torch does not count.

        Raises:
            UnsupportedError: host updates are in flight, which were computed from the old values.
        """
        for weight in self._weights:
            weight.refuse_in_flight()
        for weight in self._weights:
            weight.forget_version()

    def stats(self) -> StepStats | None:
        """The newest step that could be resolved without waiting; None before the first."""
        return next(reversed(self._history.steps(wait=False)), None)

    def history(self, *, wait: bool = False) -> list[StepStats]:
        """The last steps that could be resolved, oldest first (4096 at most).

        Args:
            wait: wait for the device, so that the newest step is among them.
        """
        return self._history.steps(wait=wait)

    def host_bytes(self) -> dict[str, int]:
        """Host memory by use, from its allocations: "state", "log", "staging", "migration"; and "peak" of their sum."""
        memory = self._runtime.memory
        return {**memory.bytes_by_use, "peak": memory.peak_bytes}

    @property
    def host_engine(self) -> tuple[str, int]:
        """Who updates on the host ("native", or "eager" for PyTorch), and with how many threads."""
        return self._engine.backend.name, self._engine.backend.threads

    def close(self) -> None:
        """Apply what is pending and end the host engine; afterwards `step()` fails.

        Raises:
            HostEngineError: host work failed; the engine is ended all the same.
        """
        if self._finalizer.alive:
            try:
                self.flush()
            finally:
                self.abandon()

    def abandon(self) -> None:
        """End the host engine without applying what is pending, for a model that is no longer needed."""
        if self._waits is not None:
            self._waits.remove()
        self._finalizer()
        self._engine.close()

    # --- a step ----------------------------------------------------------------------------------------------------

    def _parameters(self) -> Iterable[nn.Parameter]:
        return (parameter for group in self.param_groups for parameter in group["params"])

    def _begin(self) -> Windows:
        """Split the parameters; at the first step, when it is known which of them are trained."""
        ordered = plan_order(list(self._parameters()), self._module)
        devices = {str(parameter.device) for parameter in ordered}
        if devices != {str(self._device.torch_device)}:
            found = " and ".join(sorted(devices))
            raise UnsupportedError(
                f"parameters are on {found}, allowed is {self._device.torch_device}, where they were at the beginning: "
                "make the optimizer after moving the model"
            )
        model_plan = plan_model(ordered, self.config, conv1d_weights(self._module))
        self._runtime.require_host_memory(model_plan, [parameter.dtype for parameter in ordered])
        names = {} if self._module is None else {id(p): name for name, p in self._module.named_parameters()}
        groups = {id(p): number for number, group in enumerate(self.param_groups) for p in group["params"]}
        self._weights = [
            WeightState(
                parameter,
                names.get(id(parameter), str(number)),
                plan,
                groups[id(parameter)],
                self._runtime,
                self._rule.initial(self.param_groups[groups[id(parameter)]]),
            )
            for number, (parameter, plan) in enumerate(zip(ordered, model_plan.weights, strict=True))
        ]
        by_memory: dict[int, list[WeightState]] = {}
        for weight in self._weights:
            by_memory.setdefault(weight.parameter.untyped_storage().data_ptr(), []).append(weight)
        for weight in self._weights:
            weight.neighbours = by_memory[weight.parameter.untyped_storage().data_ptr()]
        lag = self.config.apply_lag or self._update_interval
        windows = Windows(self._runtime, self.config, self._weights, model_plan.buckets, lag)
        if self._module is not None and self.config.pipeline == "bucket":
            windows.waits = self._waits = ForwardWaits(self._module, _show_late(weakref.ref(self)))
        return windows

    def _take_step(self) -> None:
        if not self._finalizer.alive:
            raise ZenFlowError("step() was called after close(), allowed is a new optimizer")
        self._engine.check()
        self._refuse_torn()
        self._windows = self._windows or self._begin()
        self._device.begin_step()
        if self._waits is not None:
            self._waits.begin_step()
        self._history.begin_step()
        live = [(weight, weight.gradient()) for weight in self._weights if weight.parameter.grad is not None]
        for weight in self._weights:
            weight.take_outside_writes()
        self._hypers = [self._rule.hyper(group) for group in self.param_groups]
        self._torn = True
        plan = self._clock.advance()
        control = self._control(live)
        self._select(plan.step, live, None if control is None else control.skip)
        self._split(plan, live, control, self._windows)
        self._windows.ask(plan.step + 1)
        traffic, self._runtime.traffic = self._runtime.traffic, Traffic()
        self._history.end_step(plan.step, traffic)
        self._torn = False

    def _refuse_torn(self) -> None:
        if self._torn:
            raise ZenFlowError(
                "an earlier step() was interrupted half-way: go on with a new optimizer from saved weights"
            )

    def _split(self, plan: StepPlan, live: Live, control: StepControl | None, windows: Windows) -> None:
        """Log the deferred columns, update the others, make visible what is due, close the window."""
        moves = windows.resolve_pending(self._history.open) if plan.closes else {}
        ahead = {
            weight: weight.deferred.send_ahead(weight.plan.view(gradient), moves[weight])
            for weight, gradient in live
            if weight in moves and weight.deferred is not None
        }
        # What waits for the link is bounded to one step's gradients; a wait for that is spent updating.
        behind = None if self._last_d2h is None or self._last_d2h.done() else self._last_d2h
        if behind is not None:
            self._update_on_device(live, control)
            with self._history.open.timed(self._device, "d2h"):
                self._device.block_on(behind)
        for weight, gradient in live:
            if weight.deferred is not None:
                weight.deferred.log(weight.plan.view(gradient), plan.step, self._hypers[weight.group], control)
        self._last_d2h = self._runtime.last_d2h
        if behind is None:
            self._update_on_device(live, control)
        windows.apply(plan.step, self._history.open, everything=plan.closes)
        if plan.closes:
            windows.close(plan, self._hypers, moves, ahead, self._history.open)
            self._clock.close()

    def _update_on_device(self, live: Live, control: StepControl | None) -> None:
        for weight, gradient in live:
            weight.update_on_device(gradient, self._hypers[weight.group], control)

    def _control(self, live: Live) -> StepControl | None:
        control = step_control(
            [weight.parameter.grad for weight, _ in live if weight.parameter.grad is not None],
            max_grad_norm=self.config.max_grad_norm,
            skip_nonfinite=self.config.skip_nonfinite,
            grad_scale=getattr(self, "grad_scale", None),  # GradScaler sets and deletes these two around step()
            found_inf=getattr(self, "found_inf", None),
        )
        if control is not None and any(weight.plan.deferred for weight, _ in live):
            control.host = Control(*self._runtime.fetch(control.packed()))
            self._runtime.traffic.index_bytes += control.host.values.nbytes
        return control

    def _select(self, step: int, live: Live, skip: torch.Tensor | None) -> None:
        """Measure importance, propose selections where one is due, and start parameters at their first gradient."""
        scores = {}
        for weight, gradient in live:
            if weight.selects:
                scores[weight] = self._runtime.kernels.importance(weight.plan.view(gradient))
                self._device.charge(gradient.nbytes)
                if not weight.started or selects(step, self._select_interval):
                    weight.propose(scores[weight], skip)
        starting = [weight for weight, _ in live if not weight.started]
        if starting:
            with self._history.open.timed(self._device, "select"):
                for weight in starting:
                    weight.start()
        if scores:
            energies = torch.stack([weight.selected_energy(of_weight) for weight, of_weight in scores.items()])
            self._history.open.energy = self._runtime.fetch(energies.sum(dim=0))
            self._runtime.traffic.index_bytes += self._history.open.energy[0].nbytes


def _show_late(optimizer: weakref.ref[ZenFlowOptimizer]) -> Callable[[Flight], None]:
    """What the module's hooks call; they must not keep the optimizer alive."""

    def show(flight: Flight) -> None:
        owner = optimizer()
        if owner is not None and owner._windows is not None:
            with torch.inference_mode(False), torch.no_grad():
                owner._windows.show_late(flight, owner._history.open)

    return show


def _refuse_ranks() -> None:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        ranks = distributed.get_world_size()
        raise UnsupportedError(f"the world size is {ranks}, allowed is 1: gradients are not reduced across ranks yet")
