"""The built-in workload in training: what `zftune tune` tunes where it is not given a training of the user's."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

import torch

from zenflow import ZenFlowAdamW, ZenFlowConfig, ZenFlowError
from zenflow.signals import HeldSignals
from zftune.errors import ProfileError
from zftune.profile.measure import Task, steady
from zftune.tuner.facts import Company
from zftune.tuner.ranks.accord import Accord
from zftune.tuner.ranks.exchange import GlooExchange
from zftune.workload import Batch

_LEARNING_RATE = 1e-4


class Training:
    """A model that trains, from entering to leaving; nothing that is pending is applied at the end.

    With several ranks each has one, and the first one's decides how long all of them train.

    Args:
        task: what is trained, and where.
        config: the knobs that it begins with.
    """

    def __init__(self, task: Task, config: ZenFlowConfig) -> None:
        self.task = task
        self.workload = task.build()
        self._feed = task.feed(self.workload)
        if task.ranks > 1:
            self.workload.shard()
        self.rig = task.rig_for(self.workload)
        self._cleanup = ExitStack()
        self.device = task.device_for(self.workload)
        self._cleanup.callback(self.device.close)
        module = self.workload.module
        try:
            self.optimizer = ZenFlowAdamW(
                module.parameters(), lr=_LEARNING_RATE, config=config, module=module, device=self.device
            )
        except ZenFlowError as error:
            self._cleanup.close()
            raise ProfileError(str(error)) from error
        self._cleanup.callback(self.optimizer.abandon)
        self.accord = Accord(self.optimizer, GlooExchange()) if task.ranks > 1 else None
        """How the ranks change knobs; None: there is one."""
        self._leads = self.accord is not None and self.accord.is_first
        self._silent = True
        """Whether this rank has nothing to say of the last step."""

    def __enter__(self) -> Training:
        self._cleanup.enter_context(steady(self.rig is not None))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and self._leads:
                self._dismiss()
        finally:
            self._cleanup.close()

    @property
    def company(self) -> Company:
        """The ranks, which share the model by rows on this machine."""
        ranks = self.task.ranks
        return Company(ranks=ranks, here=ranks, shards=ranks)

    @property
    def tokens(self) -> int:
        """Of a step of this rank."""
        return self.task.micro_batch * self.task.sequence

    def step(self) -> torch.Tensor:
        """One training step, on all ranks; this one's loss, on the device."""
        if self.accord is None or not self._leads:
            return self._step()
        with HeldSignals(patient=True):  # the others wait for the rest of the step
            if not self._silent:
                self._silent = True
                self.accord.say()
            loss = self._step()
            self.accord.hear()
            self._silent = False
        return loss

    def _dismiss(self) -> None:
        """Let the other ranks go, which hear of it in the next steps."""
        assert self.accord is not None
        self.accord.leave()
        while not self.accord.over:
            self.step()

    def _step(self) -> torch.Tensor:
        batch = Batch(*(self.device.send(tensor) for tensor in next(self._feed)))
        loss = self.workload.loss(batch)
        loss.backward()
        self.device.begin_step()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()
