"""A zenflow optimizer as DeepSpeed's engine drives one: it knows the loss scale, overflows and the gradient norm."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, overload

import torch
from torch import nn
from torch.optim import Optimizer

from zenflow import UnsupportedError, ZenFlowConfig
from zenflow.optimizer import ZenFlowOptimizer
from zenflow.partition import Partition
from zenflow.rules import RULES
from zenflow.sharded import are_sharded
from zftune.checkpoint.sources import IN_FOLDER, STEPS
from zftune.errors import BadInputError
from zftune.integrations.deepspeed.accessors import ParameterOffload, link, unlink
from zftune.integrations.deepspeed.optimizers import Recipe
from zftune.integrations.deepspeed.section import INSTEAD
from zftune.integrations.deepspeed.sharded_files import load_folder

_logger = logging.getLogger("zftune")
_SCALER = "loss_scaler"
_SAVED = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class EngineOptimizer(ZenFlowOptimizer):
    """What DeepSpeed's engine gets as its optimizer.

    Hooks around `step()` of the script's own optimizer run around this one's, once a step, and get this one: its
    gradients are those of the model's parameters, neither clipped nor, with fp16, unscaled yet. So with fp16 one that
    comes before `step()` is refused; one that comes after is left out at steps that are skipped, as DeepSpeed has it.

    Args:
        params: where the recipe has no groups of its own.
        scaler: DeepSpeed's loss scaler; None: the loss is not scaled.
        partition: how ranks share out the state of a whole model; None: they do not.
    """

    parameter_offload: ParameterOffload
    """At stage 3."""

    def __init__(
        self,
        params: Any,
        recipe: Recipe,
        config: ZenFlowConfig,
        module: nn.Module,
        scaler: Any,
        partition: Partition | None = None,
    ) -> None:
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        groups = _trained(recipe.groups or params)
        super().__init__(groups, recipe.defaults, RULES[recipe.rule], config=config, module=module, partition=partition)
        self._client: Optimizer | None = recipe.client
        if recipe.client is not None:
            recipe.client.param_groups[:] = self.param_groups  # the same dictionaries: its scheduler drives both
            self.register_step_pre_hook(_run_before)
            self.register_step_post_hook(_run_after)
        self.loss_scaler = scaler
        """DeepSpeed's; None where the loss is not scaled."""
        self.given_stage: int | None = None
        """The ZeRO stage of the user's ds_config; the engine itself has none. None: not known."""
        self._overflow = self._slept = False
        self._norm: torch.Tensor | None = None
        self._folder: Path | None = None

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"engine.optimizer has no '{name}' with the backend zenflow, whose optimizer has no parts of ZeRO's: use "
            f"what torch's optimizers have, or the accessors in deepspeed.utils, or {INSTEAD}"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with the model's names for its parameters: a checkpoint tells whose state is whose.

        Raises:
            ValueError: a parameter is in another group already; as in torch.
            UnsupportedError: a parameter cannot be split.
            ConfigError: a hyperparameter is not allowed.
            HostEngineError: host work failed.
        """
        given, number = param_group["params"], len(self.param_groups)
        parameters = [given] if isinstance(given, torch.Tensor) else list(map(_without_name, given))
        names = [self._names.get(id(parameter), f"{number}.{i}") for i, parameter in enumerate(parameters)]
        param_group.update(params=parameters, param_names=names)
        super().add_param_group(param_group)
        link(self, self.param_groups[-1]["params"])

    @property
    def _global_grad_norm(self) -> torch.Tensor | None:
        return self._norm

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped; only where the loss is scaled, since it takes a wait for the device."""
        if self.loss_scaler is None:
            raise AttributeError("overflow: the loss is not scaled")
        return self._overflow

    @property
    def cur_scale(self) -> float:
        """What the loss is multiplied with."""
        return 1.0 if self.loss_scaler is None else float(self.loss_scaler.cur_scale)

    loss_scale = cur_scale

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step; where the loss is scaled, look for an overflow and adapt the scale.

        Raises:
            HostEngineError: host work failed.
            UnsupportedError: a sparse gradient, or a parameter was given another shape, dtype or device.
        """
        if self._client is not None:
            self._client._opt_called = True  # type: ignore[attr-defined]  # else torch's schedulers warn
        if self.loss_scaler is None:
            loss = _step(self, closure)
            self._norm = self.grad_norm
            return loss
        # Filled there: a number of the host would be copied, and the copy wait for backward.
        self.grad_scale = torch.full((), self.cur_scale, dtype=torch.float32, device=self.device.torch_device)
        try:
            loss = _step(self, closure)
        finally:
            del self.grad_scale
        self._norm = self.grad_norm
        self._overflow = self._norm is not None and not bool(torch.isfinite(self._norm))
        self.loss_scaler.update_scale(self._overflow)
        return loss

    def get_lr(self) -> float:
        """The learning rate of the first group."""
        return float(self.param_groups[0]["lr"])

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all groups."""
        for group in self.param_groups:
            group["lr"] = lr

    def offload_states(self, *_: Any, **__: Any) -> None:
        """Move nothing, and say so once: gradients and state have left the device, but for selected columns."""
        if not self._slept:
            _logger.warning(
                "offload_states() moves nothing: the optimizer's state is on the host, and weights stay where they are"
            )
        self._slept = True

    def reload_states(self, *_: Any, **__: Any) -> None:
        """Move nothing back."""

    def refresh_fp32_params(self) -> None:
        """Nothing is left to do: masters follow whatever is written to the weights."""

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, **_: Any) -> None:
        """What engines before 0.19 leave to an optimizer in 16 bits."""
        scaled = loss if self.loss_scaler is None else LossScaling(self).scale(loss)
        scaled.backward(retain_graph=retain_graph)

    def destroy(self) -> None:
        """End the host engine, as `engine.destroy()` asks, and apply what is pending where no other rank is needed."""
        if self.is_partitioned:  # the engine's collector may ask for this, on one rank, long after the others
            self.abandon()
        else:
            self.close()
        unlink(self, (parameter for group in self.param_groups for parameter in group["params"]))

    @property
    def is_sharded(self) -> bool:
        """Whether each rank has state of its rows alone."""
        return self.is_partitioned or are_sharded(self.param_groups)

    @contextmanager
    def kept_in(self, folder: Path) -> Iterator[None]:
        """Within it a `state_dict()` holds no state: that is in a folder, which is loaded with it."""
        self._folder = folder
        try:
            yield
        finally:
            self._folder = None

    def state_dict(self) -> dict[str, Any]:
        """As zenflow's, and the state of the loss scaler."""
        state: dict[str, Any] = (
            {IN_FOLDER: True, STEPS: self.steps} if self._folder is not None else super().state_dict()
        )
        if self.loss_scaler is not None:
            state[_SCALER] = {
                name: getattr(self.loss_scaler, name) for name in _SAVED if hasattr(self.loss_scaler, name)
            }
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any] | None, **_: Any) -> None:
        """Go on from a saved state.

        Raises:
            BadInputError: the checkpoint holds no optimizer, as ZeRO's have it elsewhere; its folder is not there, or
                of another step.
            CheckpointError: it is truncated or not of this optimizer.
        """
        if state_dict is None:
            raise BadInputError(
                "the checkpoint is of ZeRO, and the backend zenflow loads its own: `zftune checkpoint import` makes one"
            )
        scaler = state_dict.get(_SCALER, {})
        if IN_FOLDER in state_dict:
            load_folder(self, self._folder, state_dict[STEPS])
        else:
            super().load_state_dict({name: value for name, value in state_dict.items() if name != _SCALER})
            self.gather()
        for name, value in scaler.items() if self.loss_scaler is not None else ():
            setattr(self.loss_scaler, name, value)


def _step(optimizer: EngineOptimizer, closure: Any) -> float | None:
    """`ZenFlowOptimizer.step` without the hooks that torch gives it once a plain one was made: this one has its own."""
    loss: float | None = inspect.unwrap(ZenFlowOptimizer.step)(optimizer, closure)
    return loss


def _run_before(optimizer: EngineOptimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The step hooks of the script's optimizer, which may be registered at any time; likewise `_run_after`."""
    assert optimizer._client is not None
    for hook in list(optimizer._client._optimizer_step_pre_hooks.values()):
        if optimizer.loss_scaler is not None:
            raise UnsupportedError(
                f"with fp16 a hook before step() would get gradients that are scaled still: use bf16, or {INSTEAD}"
            )
        args, kwargs = hook(optimizer, args, kwargs) or (args, kwargs)
    return args, kwargs


def _run_after(optimizer: EngineOptimizer, args: Any, kwargs: Any) -> None:
    assert optimizer._client is not None
    for hook in list(optimizer._client._optimizer_step_post_hooks.values()):
        if not optimizer._overflow:
            hook(optimizer, args, kwargs)


def _trained(params: Iterable[Any]) -> list[Any]:
    """Parameters or groups without what is frozen and without empty groups, as DeepSpeed has them."""
    found = []
    for one in params:
        if isinstance(one, dict):
            given = [one["params"]] if isinstance(one["params"], torch.Tensor) else one["params"]
            one["params"] = _trained(given)
            found += [one] if one["params"] else []
            continue
        parameter = _without_name(one)
        if parameter.requires_grad:
            found.append(parameter)
    return found


def _without_name(parameter: Any) -> Any:
    return parameter[1] if isinstance(parameter, tuple) else parameter


class LossScaling:
    """Stands where the engine keeps a GradScaler: scales the loss, and leaves the rest to the optimizer."""

    def __init__(self, optimizer: EngineOptimizer) -> None:
        self._optimizer = optimizer

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss that backward is to begin with, in fp32, in which the scale does not overflow."""
        return loss.float() * self._optimizer.cur_scale

    def step(self, optimizer: Optimizer) -> None:
        optimizer.step()

    def update(self) -> None:
        """The optimizer's step has adapted the scale."""
