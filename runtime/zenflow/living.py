"""Optimizers that were made and not collected: what is done with them at the process's end, and before it forks."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import logging
import os
import sys
import warnings
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

from zenflow.errors import UnsupportedError, ZenFlowError
from zenflow.signals import HeldSignals

if TYPE_CHECKING:
    from zenflow.optimizer import ZenFlowOptimizer
    from zenflow.training import Training

_logger = logging.getLogger("zenflow")

_living: weakref.WeakSet[ZenFlowOptimizer] = weakref.WeakSet()


class LastSave:
    """Whether what the script saved of a model after the last step lacks updates that were pending then."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._step = self._lacking = 0
        """After this step the model was saved so often without them, and the optimizer's state, which has them, not."""
        self._whole = 0
        """After this step something was saved that lacks none."""

    def of_model(self) -> None:
        """Its `state_dict()` is taken."""
        training = self._training
        if training.shows_flushed or not training.model.may_lack_updates:
            self._whole = training.clock.step
            return
        deferred = [weight for weight in training.model.weights if weight.deferred is not None]
        # The best weights so far, say, were loaded. Who only looks at memory, as many who save do, seems to write,
        # and a layer that is not used is the same in all weights.
        is_loaded = all(one.may_be_written for one in deferred) and any(one.differs() for one in deferred)
        if not is_loaded:
            self._count(1)

    def of_state(self) -> None:
        """The optimizer's is."""
        if self._training.model.may_lack_updates:
            self._count(-1)

    def warn(self, advice: str) -> None:
        """Say so at the training's end, on one rank; `advice` says what to call."""
        step, ranks = self._training.clock.step, self._training.runtime.ranks
        if self._lacking > 0 and self._step == step != self._whole and (ranks is None or ranks.rank == 0):
            _logger.warning(
                "what model.state_dict() gave after step %d, the last one, lacks updates that were still pending: %s",
                self._step,
                advice,
            )

    def _count(self, change: int) -> None:
        step = self._training.clock.step
        self._step, self._lacking = step, change + (self._lacking if step == self._step else 0)


def add(optimizer: ZenFlowOptimizer) -> None:
    """Remember one, which is not kept alive."""
    _register()
    _living.add(optimizer)


def all_training() -> list[ZenFlowOptimizer]:
    """Those of this process that are not closed."""
    return [one for one in list(_living) if one.trains]


def sharing(taking: ZenFlowOptimizer) -> list[ZenFlowOptimizer]:
    """Other optimizers that train some of the same parameters: two would each send the gradients away.

    Raises UnsupportedError if each has some that the other has not, as those of an actor and a critic do.
    """
    mine, found = _trained(taking), []
    if any(mine.keys() & _trained(other).keys() for other in all_training()):
        gc.collect()  # an optimizer and its scheduler, which refer to each other, may be all that is left
    for other in all_training():
        theirs = _trained(other)
        shared = mine.keys() & theirs.keys()
        if shared and mine.keys() - shared and theirs.keys() - shared:
            named = {id(p): name for name, p in (taking.module or other.module or nn.Module()).named_parameters()}
            names = sorted(named.get(key, f"one of shape {tuple(mine[key].shape)}") for key in shared)
            raise UnsupportedError(
                f"another {type(other).__name__} trains some of these parameters, and others: {', '.join(names)}. Make "
                "one optimizer of all, with groups, or close() the other before"
            )
        found += [other] if shared else []
    return found


def take_over(others: Iterable[ZenFlowOptimizer]) -> None:
    """Close optimizers whose parameters another one trains now."""
    for other in others:
        warnings.warn(
            f"another {type(other).__name__} trained some of these parameters: it was closed, with all of its "
            "pending updates applied",
            stacklevel=4,
        )
        other.close()
        other._own.ended_by = "another optimizer had taken over some of its parameters: use one, with groups"


def _trained(optimizer: ZenFlowOptimizer) -> dict[int, nn.Parameter]:
    return {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}


def let_go(optimizer: ZenFlowOptimizer) -> None:
    """Apply what is pending, since nobody can ask for it any more, and end the host engine."""
    training: Training | None = getattr(optimizer, "_own", None)
    if training is not None and training.open and optimizer._process.is_this:
        with HeldSignals(), torch.inference_mode(False), torch.no_grad():
            training.let_go(optimizer._save_advice)


@functools.cache
def _register() -> None:
    atexit.register(_end_all)
    trace_rules = importlib.import_module("torch._dynamo.trace_rules")  # torch's optimizers have imported it by now
    trace_rules.add("zenflow")  # whose frames torch.compile would trace, within a train step that it compiles
    # A child that collects what its parent had left over destroys events of a GPU that it cannot use: PyTorch aborts.
    os.register_at_fork(before=_before_fork, after_in_child=gc.freeze)


def _end_all() -> None:
    """At the end of the process, leave nothing pending for what is called later, unless an error ends it."""
    for optimizer in list(_living):
        if getattr(sys, "last_value", None) is None:
            let_go(optimizer)
        else:
            optimizer.abandon()


def _before_fork() -> None:
    """Let weights arrive that are late: the child has them, but not the threads that bring them."""
    for optimizer in list(_living):
        with contextlib.suppress(ZenFlowError):  # which the next step raises again
            if optimizer._process.is_this and optimizer._own.open:
                with HeldSignals(), torch.inference_mode(False), torch.no_grad():
                    optimizer._own.finish_late()
