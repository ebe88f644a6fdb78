"""Who competes: anything that applies a window of logged bf16 gradients to fp32 state and leaves a bf16 result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hostupdate.machine import tensor

HYPERPARAMETERS: Mapping[str, Any] = {"lr": 2e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


class UnavailableError(Exception):
    """A contender cannot run here; the message is a sentence for the reader."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Where a contender starts from, and the log. All of it is read only: a contender copies what it changes."""

    master: torch.Tensor
    """[n] fp32"""
    moments: tuple[torch.Tensor, torch.Tensor]
    """exp_avg and exp_avg_sq, each [n] fp32."""
    updates: int
    """How many updates lie behind; the next one has this count plus 1."""
    log: Sequence[torch.Tensor]
    """bf16 gradients, each [n], oldest first. The same tensor may be there more than once; it is not to be copied."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A contender's state as it is now, for checking it."""

    master: torch.Tensor
    result: torch.Tensor


class Contender(Protocol):
    """One way to apply a window. Used by one thread; `apply` returns when the result is written."""

    name: str

    def prepare(self, inputs: Inputs) -> None:
        """Allocate and touch all memory, copy the state. Called once, before anything else."""

    def apply(self, interval: int, *, replay: bool, times: int = 1) -> None:
        """Apply the first `interval` gradients of the log: each its own AdamW update, or one with their mean.

        More times: one after the other, queued all at once by a contender that has a queue.
        """

    def outcome(self) -> Outcome:
        """Master and result, each [n]."""

    def close(self) -> None:
        """Give everything back."""


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """An optimizer class, ready to be made for parameters."""

    name: str
    make: Callable[[list[torch.nn.Parameter]], Any]
    step: Callable[[int], Any]
    """The form in which its state keeps the count of updates."""


class OptimizerContender:
    """A `torch.optim.Optimizer` on fp32 masters, with the passes around it that it needs.

    Its gradient has to be fp32. A bf16 gradient is copied into a scratch buffer before it is added to the sum:
    `sum.add_(bf16)` would allocate such a buffer in every call and is about three times as slow.
    """

    def __init__(self, kind: OptimizerKind) -> None:
        self.name = kind.name
        self._kind = kind

    def prepare(self, inputs: Inputs) -> None:
        n = inputs.master.numel()
        self._log = inputs.log
        self._parameter = torch.nn.Parameter(tensor(n, torch.float32).copy_(inputs.master))
        self._gradient, self._scratch = tensor(n, torch.float32), tensor(n, torch.float32)
        self._result = tensor(n, torch.bfloat16)
        self._parameter.grad = self._gradient
        self._moments = [tensor(n, torch.float32).copy_(moment) for moment in inputs.moments]
        self._optimizer = self._kind.make([self._parameter])
        self._optimizer.state[self._parameter] = self._state(inputs.updates, *self._moments)

    def _state(self, updates: int, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> dict[str, Any]:
        return {"step": self._kind.step(updates), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}

    def apply(self, interval: int, *, replay: bool, times: int = 1) -> None:
        for _ in range(times):
            self._window(self._log[:interval], self._gradient, self._scratch, replay=replay)
            self._result.copy_(self._parameter.detach())

    def _window(
        self, log: Sequence[torch.Tensor], gradient: torch.Tensor, scratch: torch.Tensor, *, replay: bool
    ) -> None:
        gradient.copy_(log[0])
        for logged in log[1:]:
            if replay:
                self._optimizer.step()
                gradient.copy_(logged)
            else:
                gradient.add_(scratch.copy_(logged))
        if len(log) > 1 and not replay:
            gradient.div_(len(log))
        self._optimizer.step()

    def outcome(self) -> Outcome:
        return Outcome(self._parameter.detach(), self._result)

    def close(self) -> None:
        self.__dict__ = {"name": self.name}  # the optimizer's destructor, too, runs now


class BlockedContender(OptimizerContender):
    """The same, block by block, so that the passes around the optimizer find their data in the cache.

    Nobody's training loop does that; it is the best that these optimizers can be made to do from Python. The optimizer
    is handed one block at a time as its only parameter.
    """

    def __init__(self, kind: OptimizerKind, block: int) -> None:
        super().__init__(kind)
        self.name = f"{kind.name}, in blocks"
        self._block = block

    def prepare(self, inputs: Inputs) -> None:
        super().prepare(inputs)
        n, block = inputs.master.numel(), min(self._block, inputs.master.numel())
        group = self._optimizer.param_groups[0]
        self._gradient, self._scratch = self._gradient[:block].clone(), self._scratch[:block].clone()
        self._blocks = []
        for first in range(0, n, block):
            part = slice(first, min(first + block, n))
            parameter = torch.nn.Parameter(self._parameter.detach()[part])
            parameter.grad = self._gradient[: parameter.numel()]
            self._optimizer.state[parameter] = self._state(inputs.updates, *(m[part] for m in self._moments))
            self._blocks.append((parameter, [logged[part] for logged in self._log], self._result[part]))
        del self._optimizer.state[self._parameter]
        self._one = group["params"]

    def apply(self, interval: int, *, replay: bool, times: int = 1) -> None:
        for parameter, log, result in self._blocks * times:
            self._one[:] = [parameter]
            n = parameter.numel()
            self._window(log[:interval], self._gradient[:n], self._scratch[:n], replay=replay)
            result.copy_(parameter.detach())


def fused_adamw() -> OptimizerKind:
    """PyTorch's own fused CPU kernel."""

    def make(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, **HYPERPARAMETERS, fused=True)

    return OptimizerKind("torch fused AdamW", make, lambda updates: torch.tensor(float(updates)))
