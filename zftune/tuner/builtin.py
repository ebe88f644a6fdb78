"""The built-in workload in training: what `zftune tune` tunes where it is not given a training of the user's."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

import torch

from zenflow import ZenFlowAdamW, ZenFlowConfig, ZenFlowError
from zftune.errors import ProfileError
from zftune.profile.measure import Task, steady
from zftune.workload import Batch

_LEARNING_RATE = 1e-4


class Training:
    """A model that trains, from entering to leaving; nothing that is pending is applied at the end.

    Args:
        task: what is trained, and where.
        config: the knobs that it begins with.
    """

    def __init__(self, task: Task, config: ZenFlowConfig) -> None:
        self.task = task
        self.workload = task.build()
        self._feed = task.feed(self.workload)
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

    def __enter__(self) -> Training:
        self._cleanup.enter_context(steady(self.rig is not None))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cleanup.close()

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.task.micro_batch * self.task.sequence

    def step(self) -> torch.Tensor:
        """One training step; its loss, on the device."""
        batch = Batch(*(self.device.send(tensor) for tensor in next(self._feed)))
        loss = self.workload.loss(batch)
        loss.backward()
        self.device.begin_step()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()
