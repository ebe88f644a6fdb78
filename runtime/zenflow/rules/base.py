"""What an update rule is, and what the rules share: checks of a parameter group, scalars that depend on a count."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, ClassVar

import numpy as np
import torch

from zenflow.errors import ConfigError, UnsupportedError

NOT_HERE = {
    "maximize": "negate the loss instead",
    "differentiable": "autograd cannot follow updates that are made on the host",
}
"""Flags of torch's optimizers that must be false, and why."""


@dataclass(frozen=True, slots=True)
class Hyper:
    """One group's hyperparameters at one step. Subclasses declare the others in the order that kernels take them in."""

    lr: float

    @property
    def numbers(self) -> tuple[float, ...]:
        """All fields in order; a flag is 0 or 1."""
        return tuple(float(getattr(self, field.name)) for field in fields(self))

    @property
    def decay(self) -> float:
        """Factor that decoupled weight decay multiplies a weight with."""
        return 1.0


class Rule(ABC):
    """One way to update weights. It holds no state and works on every device."""

    name: ClassVar[str]
    moment_names: ClassVar[tuple[str, ...]]
    """Streams of state besides the master, under torch's names."""
    at_least_0: ClassVar[tuple[str, ...]] = ("lr", "weight_decay")
    """Hyperparameters of which every number >= 0 is allowed."""

    @property
    def moments(self) -> int:
        """How many streams of state there are besides the master."""
        return len(self.moment_names)

    @abstractmethod
    def hyper(self, group: Mapping[str, Any]) -> Hyper:
        """Copy a parameter group's hyperparameters; raises UnsupportedError if one is a tensor on a device."""

    def check(self, group: Mapping[str, Any]) -> None:
        """Refuse hyperparameters that make no sense, and what this rule does not do.

        Raises ConfigError; UnsupportedError if one is a tensor on a device, which only a wait could read.
        """
        for name in self.at_least_0:
            value = _real(group[name], name)
            if value is None or not value >= 0:
                raise ConfigError.of(name, group[name], "a number >= 0")
        for name, instead in NOT_HERE.items():
            check_flag(group, name, allowed=False, why=instead)

    def initial(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        """What each moment starts with."""
        return (0.0,) * self.moments

    def counts(self, hyper: Hyper) -> bool:
        """Whether an update with these hyperparameters adds to the update count."""
        return True

    def carried(self, hyper: Hyper) -> float:
        """Share of an update that the next one would be without a gradient: what momentum keeps."""
        return 0.0

    def coast(self, hyper: Hyper, missing: float) -> float:
        """How many times the last update is what the next `missing` ones would add without further gradients."""
        share = self.carried(hyper)
        return missing if share == 1 else share * (1 - share**missing) / (1 - share)

    @property
    def guesses(self) -> bool:
        """Whether `guess` is not 0."""
        return False

    def guess(self, hyper: Hyper, missing: float) -> float:
        """How far a fresh gradient moves each weight at once, against its sign, where so many updates are missing."""
        return 0.0

    @abstractmethod
    def update(
        self,
        master: torch.Tensor,
        moments: tuple[torch.Tensor, ...],
        count: torch.Tensor,
        gradient: torch.Tensor,
        hyper: Hyper,
        decay: float,
    ) -> None:
        """One update in place; never waits for the device.

        Args:
            master: [n, rows] fp32, the weights.
            moments: each [n, rows] fp32.
            count: [n] int32, updates so far per column.
            gradient: [n, rows] fp32; is left as it is.
            hyper: of this rule's own type.
            decay: factor on the weights (`hyper.decay`, or the product over a window).
        """


def number(group: Mapping[str, Any], name: str) -> float:
    """A hyperparameter as a float; raises ConfigError if it is no number."""
    value = _real(group[name], name)
    if value is None:
        raise ConfigError.of(name, group[name], "a number")
    return value


def betas(group: Mapping[str, Any]) -> tuple[float, float]:
    """A group's two decay rates; raises ConfigError if they are not two numbers."""
    found = _betas(group)
    if found is None:
        raise ConfigError.of("betas", group["betas"], "two numbers")
    return found


def check_betas(group: Mapping[str, Any]) -> None:
    """Raise ConfigError for decay rates with which moments would not be averages."""
    found = _betas(group)
    if found is None or not all(0 <= beta < 1 for beta in found):
        raise ConfigError.of("betas", group["betas"], "two numbers from 0 to below 1")


def check_flag(group: Mapping[str, Any], name: str, *, allowed: bool, why: str) -> None:
    """Raise ConfigError for a flag of torch's optimizers that is there and means something else."""
    value = group.get(name, allowed)
    if bool(value) is not allowed:
        raise ConfigError.of(name, value, f"{allowed}: {why}")


def per_count(count: torch.Tensor, *scalars: Callable[[Any], Any]) -> tuple[torch.Tensor, ...]:
    """Scalars that depend on a column's update count, each [n, 1] fp32, computed in fp64 and rounded once.

    On the CPU they are Python's floats, whose powers are libm's, as they are in a kernel; elsewhere they stay on the
    device. `count` is [n] int32, at least 1; each of `scalars` takes one, as a float or as an fp64 tensor.
    """
    if count.device.type != "cpu":
        counts = count.double().unsqueeze(1)
        return tuple(scalar(counts).float() for scalar in scalars)
    if bool((count == count[:1]).all()):
        distinct, place = count[:1], torch.zeros_like(count)
    else:
        distinct, place = count.unique(return_inverse=True)
    values = [float(value) for value in distinct.tolist()]
    tables = ([scalar(value) for value in values] for scalar in scalars)
    of_column = (torch.tensor(table, dtype=torch.float32, device="cpu").index_select(0, place) for table in tables)
    return tuple(column.unsqueeze(1) for column in of_column)


def root(value: Any) -> Any:
    """Square root of one of `per_count`'s floats or fp64 tensors."""
    return value.sqrt() if isinstance(value, torch.Tensor) else math.sqrt(value)


def rooted(values: torch.Tensor) -> torch.Tensor:
    """Square roots of fp32 numbers, each the nearest fp32 number.

    On the CPU torch may take MKL's, which on some processors are not the nearest for one number in six.
    """
    if values.device.type != "cpu":
        return values.sqrt()
    roots = torch.empty_like(values)
    with np.errstate(invalid="ignore"):
        np.sqrt(values.numpy(), out=roots.numpy())
    return roots


def with_decay(gradient: torch.Tensor, master: torch.Tensor, weight_decay: float) -> torch.Tensor:
    """The gradient with L2 weight decay; at 0 the gradient itself, for infinite weights have no product with 0."""
    return gradient.add(master.mul(weight_decay)) if weight_decay != 0 else gradient


def _betas(group: Mapping[str, Any]) -> tuple[float, float] | None:
    pair = group["betas"]
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        return None
    first, second = (_real(beta, "betas") for beta in pair)
    return None if first is None or second is None else (first, second)


def _real(value: object, name: str) -> float | None:
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise UnsupportedError(f"{name} is a tensor on {value.device}; use a float or a CPU tensor")
        real = value.numel() == 1 and not value.is_complex() and value.dtype != torch.bool
        return float(value) if real else None
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:  # a huge integer
        return None
