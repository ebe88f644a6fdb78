"""Writes down which knobs an optimizer was given after which step: `zftune run --export-schedule FILE`."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

from zenflow.optimizer import ZenFlowOptimizer
from zftune.agent.patches import Patches
from zftune.errors import ZftuneError
from zftune.json_output import write_text
from zftune.schedule import Entry, encode

BEGINNING = (
    "topk_ratio",
    "select_interval",
    "update_interval",
    "max_update_interval",
    "auto_ratio",
    "overlap_step",
    "apply_lag",
    "deferred_update",
    "offload_ratio",
    "host_threads",
)
"""Knobs that a replay begins with, since a preset may have given them; clipping and its like are the script's own."""
_logger = logging.getLogger("zftune")


class Recording:
    """The schedule of the first zenflow optimizer that takes a step; its file is whole after every change.

    Args:
        path: of the file.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._entries: list[Entry] = []
        self._optimizer: weakref.ref[ZenFlowOptimizer] | None = None
        self._step_begun_at: int | None = None
        self._broken = False
        self.patches = Patches()
        """Undo it to record no more."""
        self.patches.replace(ZenFlowOptimizer, "set_knobs", self._set_knobs)
        self.patches.replace(ZenFlowOptimizer, "flush", self._flush)

    def begin(self, optimizer: ZenFlowOptimizer) -> None:
        """Note the knobs that it begins with; one that goes on from a checkpoint has them from there."""
        if self._optimizer is not None:
            _logger.warning(
                "A second zenflow optimizer takes steps: its knobs are not in '%s', which holds the first one's.",
                self._path,
            )
            return
        self._optimizer = weakref.ref(optimizer)
        if optimizer.steps == 0:
            knobs = {name: getattr(optimizer.config, name) for name in BEGINNING}
            self._entries.append(Entry(0, knobs))
        self._write()

    def before(self, optimizer: ZenFlowOptimizer) -> None:
        """What is flushed from here to `after` is flushed by a hook."""
        if self._is_ours(optimizer):
            self._step_begun_at = optimizer.steps

    def after(self, optimizer: ZenFlowOptimizer) -> None:
        """The step is over, and the tuner's hook with it: the optimizer's own come before this one."""
        if self._is_ours(optimizer):
            self._step_begun_at = None

    def _is_ours(self, optimizer: ZenFlowOptimizer) -> bool:
        return self._optimizer is not None and self._optimizer() is optimizer

    def _set_knobs(self, original: Callable[..., int]) -> Callable[..., int]:
        def set_knobs(optimizer: ZenFlowOptimizer, **knobs: Any) -> int:
            step = original(optimizer, **knobs)
            if self._is_ours(optimizer):
                self._add(Entry(step - 1, knobs))
            return step

        return set_knobs

    def _flush(self, original: Callable[..., None]) -> Callable[..., None]:
        def flush(optimizer: ZenFlowOptimizer) -> None:
            original(optimizer)
            if self._is_ours(optimizer) and self._step_begun_at not in (None, optimizer.steps):
                self._add(Entry(optimizer.steps, None))

        return flush

    def _add(self, entry: Entry) -> None:
        self._entries.append(entry)
        self._write()

    def _write(self) -> None:
        """Once it cannot be written it is given up: the training is not concerned."""
        if self._broken:
            return
        try:
            write_text(encode(self._entries), self._path, option="--export-schedule")
        except (ZftuneError, TypeError, ValueError) as error:
            self._broken = True
            _logger.warning("The schedule is not written any more: %s.", error)
