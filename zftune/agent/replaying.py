"""Gives an optimizer the knobs of another run, after the same steps: `zftune run --schedule FILE`."""

from __future__ import annotations

import atexit
import logging
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from zenflow import ConfigError, HostMemoryError
from zenflow.errors import HostThreadsError
from zenflow.optimizer import ZenFlowOptimizer
from zftune.agent.patches import Patches
from zftune.errors import BadInputError
from zftune.schedule import Entry, read_schedule

if TYPE_CHECKING:
    from zftune.agent.arming import WhenImported

_logger = logging.getLogger("zftune")


class Replay:
    """Carries out a schedule with the one zenflow optimizer of a training; meanwhile nobody tunes it.

    Args:
        path: of the schedule.
        when_imported: calls back once a module of some name is there.

    Raises:
        BadInputError: the schedule cannot be read.
    """

    def __init__(self, path: str, when_imported: WhenImported) -> None:
        self._path = path
        self._left = deque(read_schedule(path))
        self._count = len(self._left)
        self._optimizer: weakref.ref[ZenFlowOptimizer] | None = None
        self._steps = 0
        self.patches = Patches()
        """Undo it to let tuners work again."""
        when_imported("zftune.tuner.attach", self._silence)
        _logger.info("zftune replays the knobs of '%s' (%d changes).", path, self._count)
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

    def _silence(self, module: Any) -> None:
        self.patches.replace(module, "attach", _idle)

    def _do(self, entry: Entry, optimizer: ZenFlowOptimizer) -> None:
        if entry.knobs is None:
            optimizer.flush()
            return
        try:
            optimizer.set_knobs(**entry.knobs)
        except (ConfigError, HostMemoryError, HostThreadsError) as error:
            raise BadInputError(f"--schedule '{self._path}', after step {entry.after_step}: {error}") from error


def _idle(original: Callable[..., Any]) -> Callable[..., Any]:
    """`zftune.attach` where knobs come from a schedule: a tuner that is closed."""

    def attach(optimizer: Any, **more: Any) -> Any:
        if not isinstance(optimizer, ZenFlowOptimizer):
            return original(optimizer, **more)  # which says what is wrong
        from zftune.agent.nobody import closed_tuner

        _logger.info("zftune.attach does nothing: the knobs come from a schedule.")
        return closed_tuner(optimizer)

    return attach
