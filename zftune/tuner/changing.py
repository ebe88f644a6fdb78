"""How knobs change: at once where a process trains alone; with several ranks once all of them agree."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zenflow import ConfigError, HostMemoryError
from zenflow.errors import HostThreadsError, RankError
from zenflow.optimizer import ZenFlowOptimizer

Change = Callable[[int, Mapping[str, Any]], None]
"""Told of the step after which new knobs hold (before the first step: that with which they do), and of the knobs."""

REFUSALS = (ConfigError, HostMemoryError, HostThreadsError, RankError, MemoryError, torch.OutOfMemoryError)
"""Of knobs: nothing has changed then, and the training goes on."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a change that was asked for."""

    step: int | None = None
    """After which the knobs hold, 0 where that is before the first; None: nothing has changed."""
    refused: str = ""
    """Why these knobs cannot be had."""
    void: str = ""
    """Why it was not tried."""


def change_knobs(optimizer: ZenFlowOptimizer, knobs: Mapping[str, Any]) -> Verdict:
    """Change knobs, or say why they cannot be; with several ranks all call this after the same step.

    Args:
        optimizer: that trains.
        knobs: as `set_knobs` takes them.

    Raises:
        HostEngineError: host work failed.
    """
    begun = optimizer.steps > 0
    try:
        step = optimizer.set_knobs(**knobs)
    except REFUSALS as error:
        return Verdict(refused=str(error) or type(error).__name__)
    return Verdict(step if begun else 0)


class Changes(ABC):
    """Takes wishes for knobs, one at a time. No call waits for anybody but as training itself does."""

    @abstractmethod
    def ask(self, knobs: Mapping[str, Any]) -> None:
        """Want knobs changed; not before the last verdict was taken."""

    @abstractmethod
    def verdict(self) -> Verdict | None:
        """What became of it, once; None: nobody knows yet."""

    def withdraw(self) -> None:  # noqa: B027 - what is done at once cannot be taken back
        """Want no change any more; there is a verdict all the same."""


class AtOnce(Changes):
    """Changes them when it is asked to.

    Args:
        optimizer: that trains.
    """

    def __init__(self, optimizer: ZenFlowOptimizer) -> None:
        self._optimizer = optimizer
        self._verdict: Verdict | None = None

    def ask(self, knobs: Mapping[str, Any]) -> None:
        self._verdict = change_knobs(self._optimizer, knobs)

    def verdict(self) -> Verdict | None:
        verdict, self._verdict = self._verdict, None
        return verdict
