"""Where an idiom runs: with torch alone, which says what is right, and with DeepSpeed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from compatibility.idioms.script import DECAY, LR
from tests.support.oracle import ReferenceAdamW
from zenflow import CpuDevice, ZenFlowConfig, device
from zenflow.device import Arrived, HostSpan, Mark, Transfer

Make = Callable[[Iterable[nn.Parameter], nn.Module], torch.optim.Optimizer]


def oracle(config: dict[str, Any], *, windowed: bool) -> Make:
    """Makes the optimizer whose weights are right: torch's, or the reference of late updates.

    Args:
        config: the ds_config of the other side.
        windowed: whether its updates are late.
    """
    if not windowed:
        return lambda parameters, _: torch.optim.AdamW(parameters, lr=LR, weight_decay=DECAY)
    knobs = ZenFlowConfig.from_ds_config(config)

    def make(parameters: Iterable[nn.Parameter], model: nn.Module) -> ReferenceAdamW:
        trained = [parameter for parameter in parameters if parameter.requires_grad]  # as DeepSpeed has it
        return ReferenceAdamW(trained, lr=LR, weight_decay=DECAY, config=knobs, module=model)

    return make


class PlainEngine:
    """DeepSpeed's engine as far as the idioms use it, on a torch optimizer."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module = model
        self.optimizer = optimizer

    def __call__(self, *inputs: Tensor) -> Any:
        return self.module(*inputs)

    def backward(self, loss: Tensor) -> None:
        """The loss's gradients are added up."""
        loss.backward()

    def step(self) -> None:
        """A step, after which there are no gradients; as the engine does it."""
        self.optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """No gradients of the model."""
        self.module.zero_grad()


class Plain:
    """Torch alone."""

    def __init__(self, make: Make) -> None:
        self._make = make

    def engine(self, model: nn.Module, parameters: list[nn.Parameter]) -> PlainEngine:
        """With an optimizer of these parameters."""
        return PlainEngine(model, self._make(parameters, model))

    def trainer(self, model: nn.Module) -> dict[str, Any]:
        """The optimizer; the Trainer makes the scheduler."""
        return {"optimizers": (self._make(model.parameters(), model), None)}

    def accelerator(self, model: nn.Module) -> tuple[Any, Any, Any]:
        """Accelerate without DeepSpeed."""
        accelerator = _accelerator()
        return accelerator, *accelerator.prepare(model, self._make(model.parameters(), model))


class DeepSpeed:
    """Real engines of a ds_config, with zftune if that is enabled."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    def engine(self, model: nn.Module, parameters: list[nn.Parameter]) -> Any:
        """Of `deepspeed.initialize`."""
        import deepspeed

        return deepspeed.initialize(model=model, model_parameters=parameters, config=copy.deepcopy(self._config))[0]

    def trainer(self, model: nn.Module) -> dict[str, Any]:
        """The ds_config."""
        return {"deepspeed": copy.deepcopy(self._config)}

    def accelerator(self, model: nn.Module) -> tuple[Any, Any, Any]:
        """Accelerate with a DeepSpeed plugin."""
        from accelerate import DeepSpeedPlugin
        from accelerate.utils import DummyOptim

        accelerator = _accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=copy.deepcopy(self._config)))
        optimizer = DummyOptim(model.parameters(), lr=LR, weight_decay=DECAY)
        return accelerator, *accelerator.prepare(model, optimizer)


def _accelerator(**given: Any) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # there was one of the other side, which it would share
    return Accelerator(**given)


class _OnItsWay(Arrived):
    def done(self) -> bool:
        return False


class SlowLink(CpuDevice):
    """Results of the host are still on their way when they are due.

    On a plain CPU they would always be there: whatever reads a weight too early would read the right one.
    """

    def h2d(self, source: Tensor, after: HostSpan, asked: Mark) -> tuple[Transfer, Tensor]:
        return _OnItsWay(self.mark(), source.nbytes), source.clone()


def slow_link() -> None:
    """Let optimizers that are made from now on have one."""
    device.CpuDevice = SlowLink  # type: ignore[misc]
