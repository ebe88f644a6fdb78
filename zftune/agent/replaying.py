"""Gives an optimizer the knobs of another run, after the same steps: `zftune run --schedule FILE`."""

from __future__ import annotations

import atexit
import logging
import weakref
from collections import deque

from zenflow import ConfigError, HostMemoryError
from zenflow.errors import HostThreadsError, RankError
from zenflow.optimizer import ZenFlowOptimizer
from zftune.errors import BadInputError
from zftune.schedule import Entry, read_schedule

_logger = logging.getLogger("zftune")


class Replay:
    """Carries out a schedule with the one zenflow optimizer of a training; `zftune run` sees that nobody tunes it.

    Args:
        path: of the schedule.

    Raises:
        BadInputError: the schedule cannot be read.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._left = deque(read_schedule(path))
        self._count = len(self._left)
        self._optimizer: weakref.ref[ZenFlowOptimizer] | None = None
        self._steps = 0
        atexit.register(self.end)

    def begin(self, optimizer: ZenFlowOptimizer) -> None:
        """Do what comes before the first step; one that goes on from a checkpoint has done what comes before that.

        Raises:
            BadInputError: it is a second optimizer, or the schedule's knobs do not go with the training's.
        """
        if self._optimizer is not None:
            raise BadInputError(
                f"--schedule '{self._path}': a second zenflow optimizer takes steps, allowed is one that does"
            )
        self._optimizer = weakref.ref(optimizer)
        _logger.info("zftune replays the knobs of '%s' (%d changes).", self._path, self._count)
        while self._left and self._left[0].after_step < optimizer.steps:
            self._left.popleft()
        self.after(optimizer)

    def before(self, optimizer: ZenFlowOptimizer) -> None:
        """Nothing."""

    def after(self, optimizer: ZenFlowOptimizer) -> None:
        """Do what comes after this step.

        Raises:
            BadInputError: the schedule's knobs do not go with the training's, or this machine cannot have them.
        """
        self._steps = optimizer.steps
        while self._left and self._left[0].after_step <= self._steps:
            self._do(self._left.popleft(), optimizer)

    def end(self) -> None:
        """Say at the exit what was not done."""
        if self._left and self._optimizer is not None:
            _logger.warning(
                "The training ended after step %d: of the %d changes in '%s' %d did not come.",
                self._steps,
                self._count,
                self._path,
                len(self._left),
            )

    def _do(self, entry: Entry, optimizer: ZenFlowOptimizer) -> None:
        if entry.knobs is None:
            optimizer.flush()
            return
        try:
            optimizer.set_knobs(**entry.knobs)
        except (ConfigError, HostMemoryError, HostThreadsError, RankError) as error:
            raise BadInputError(f"--schedule '{self._path}', after step {entry.after_step}: {error}") from error
