"""A search in a training loop: knobs change through `set_knobs`, without a restart.

    live = LiveSearch(optimizer, search, tokens=micro_batch * sequence)
    try:
        for batch in batches:
            loss = train_step(batch)      # forward, backward, optimizer.step(), optimizer.zero_grad()
            if not live.on_step(loss):
                break                     # or go on: the knobs that were found hold
    finally:
        live.close()

Nothing here waits: step times come from the optimizer's own history, two steps late, and a desk (see
`zftune.tuner.thinking`) thinks and writes in a thread of its own, while training goes on under the incumbent's knobs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from zenflow import ConfigError, HostMemoryError, StepStats
from zenflow.errors import HostThreadsError
from zenflow.optimizer import ZenFlowOptimizer
from zftune.planner.choosing import HEADROOM, LEAST_HEADROOM_BYTES
from zftune.tuner.guard import Losses, LossGuard
from zftune.tuner.outside import Outside
from zftune.tuner.search import Search
from zftune.tuner.settings import Setting
from zftune.tuner.states import Between, Outcome, Request
from zftune.tuner.thinking import Answer, DeskMaker, Recorder, ThreadDesk

Disturbance = Callable[[], str | None]
"""Asked at the end of a measurement: why it does not count, or None. What came before is over then."""
Change = Callable[[int, Mapping[str, Any]], None]
"""Told of the step after which new knobs hold (before the first step: that with which they do), and of the knobs."""

_REFUSALS = (ConfigError, HostMemoryError, HostThreadsError, MemoryError, torch.OutOfMemoryError)
"""Of knobs: nothing has changed then, and the training goes on."""
_logger = logging.getLogger("zftune")

__all__ = ["Change", "Disturbance", "LiveSearch", "Recorder"]


class LiveSearch:
    """Carries out what a search asks for.

    Args:
        optimizer: that trains.
        search: begins at the optimizer's knobs. While a desk thinks it is the desk's: read it after `close()`.
        tokens: of a step.
        recorder: where it is written down.
        disturbance: says that a measurement does not count.
        guard: watches over the loss; None: nobody does.
        desk: where it is thought about.
        on_change: told of every change of knobs.
    """

    def __init__(
        self,
        optimizer: ZenFlowOptimizer,
        search: Search,
        *,
        tokens: int,
        recorder: Recorder | None = None,
        disturbance: Disturbance = lambda: None,
        guard: LossGuard | None = None,
        desk: DeskMaker = ThreadDesk,
        on_change: Change | None = None,
    ) -> None:
        self.search = search
        self.request: Request | None = None
        """What is measured now; None: nothing, somebody thinks."""
        self.incumbent = search.book.incumbent.setting
        """The best setting so far, as of the last answer."""
        self.over = False
        """Whether the search has ended."""
        self.overhead_s = 0.0
        """Time spent in here by the training thread."""
        self.outside = Outside()
        """The steps that belong to no measurement."""
        search.book.device_limit_bytes = _device_limit(optimizer)
        self._start = search.book.trials[0].setting
        self._optimizer, self._tokens = optimizer, tokens
        self._disturbance, self._on_change = disturbance, on_change
        self._losses = None if guard is None else Losses(optimizer.device, guard)
        self._desk = desk(search, recorder)
        self._handed = False
        self._applied = Setting.of(optimizer.config)
        self._from = self._seen = optimizer.steps
        self._discarded: list[float] = []
        self._steps: list[float] = []
        self._between = Between()

    @property
    def steady_steps(self) -> int:
        """Steps since the last change of knobs took hold."""
        return self._optimizer.steps - self._from

    def on_step(self, loss: torch.Tensor | float | None = None) -> bool:
        """Call it after each step.

        Args:
            loss: of the step, a scalar on any device.

        Returns:
            Whether the search goes on. When it ends, the incumbent's knobs are set.

        Raises:
            HostEngineError: host work failed.
        """
        began = time.perf_counter()
        try:
            return self._on_step(loss)
        finally:
            self.overhead_s += time.perf_counter() - began

    def log_loss(self, loss: torch.Tensor | float) -> None:
        """Give the guard a loss of the step that is under way or was just taken; does not wait for the device."""
        if self._losses is not None and not self.over:
            self._losses.add(self._optimizer.steps, loss)

    def stop(self, reason: str) -> None:
        """End the search early; the incumbent's knobs are set.

        Args:
            reason: a sentence.
        """
        self.close()
        if not self.over:
            self.search.stop(reason)
            self._end()

    def close(self) -> None:
        """End the thinking, within seconds; the search may be read and written down from here on."""
        self._desk.close()

    def _on_step(self, loss: torch.Tensor | float | None) -> bool:
        if self.over:
            return False
        if loss is not None:
            self.log_loss(loss)
        if self._is_wrong():
            return False
        for stats in self._new():
            self._seen = stats.step
            self._take(stats)
        if self.request is None and not self._handed:
            self._hand(None)
        answer = self._desk.poll() if self._handed else None
        while answer is not None and self._carry_out(answer):
            answer = self._desk.poll()
        return not self.over

    def _new(self) -> list[StepStats]:
        """The steps that were not seen yet, oldest first."""
        history = self._optimizer.history()
        seen = next((back for back, stats in enumerate(reversed(history)) if stats.step <= self._seen), len(history))
        return history[len(history) - seen :]

    # --- one request -------------------------------------------------------------------------------------------------

    def _carry_out(self, answer: Answer) -> bool:
        """Apply what is asked for; whether there is another answer to be had at once."""
        self._handed = False
        self.incumbent, self.request = answer.incumbent, answer.request
        self._discarded, self._steps = [], []
        if self.request is None:
            self.search.idle(self.outside.taken())
            self._end()
            return False
        try:
            self._apply(self.request.setting)
        except _REFUSALS as error:
            reason = str(error) or type(error).__name__
            self._between = self.outside.taken()
            self._hand(Outcome("crashed", tokens=self._tokens, reason=reason, between=self._between))
            return True
        self._disturbance()  # what was before does not count
        return False

    def _apply(self, setting: Setting) -> None:
        """Change knobs; also where they stay the same, since this closes the window and the next one begins whole."""
        begun = self._optimizer.steps > 0
        step = self._optimizer.set_knobs(**setting.knobs())
        self._from = step if begun else 0
        self._applied = setting
        self.outside.change(self._from, challenges=setting != self.incumbent)
        if self._on_change is not None:
            self._on_change(step, setting.knobs())

    def _take(self, stats: StepStats) -> None:
        """Count a step, and hand over what came of the request where it is over."""
        request, step_ms = self.request, stats.step_ms or 0.0
        if request is None or stats.step <= self._from:
            self.outside.add(stats.step, step_ms)
            return
        if not self._discarded and not self._steps:
            self._between = self.outside.taken()
        (self._discarded if len(self._discarded) < request.discard else self._steps).append(step_ms)
        reason = request.abort_reason(self._discarded, self._steps)
        if reason is None and len(self._steps) < request.steps:
            return
        disturbed = self._disturbance()
        if disturbed is not None:
            self._hand(self._outcome("void", disturbed))
        elif reason is not None:
            self._hand(self._outcome("aborted", reason))
        else:
            self._hand(self._outcome("measured", ""))

    def _outcome(self, status: str, reason: str) -> Outcome:
        return Outcome(
            status=status,  # type: ignore[arg-type]
            steps_ms=tuple(self._steps),
            discarded_ms=tuple(self._discarded),
            tokens=self._tokens,
            device_bytes=self._optimizer.device.peak_bytes(),
            host_bytes=sum(v for use, v in self._optimizer.host_bytes().items() if use != "peak"),
            reason=reason,
            between=self._between,
        )

    def _hand(self, outcome: Outcome | None) -> None:
        """Let the desk think; meanwhile nothing but the incumbent runs."""
        self.request, self._handed = None, True
        self._desk.hand(outcome)
        self._restore()

    def _restore(self) -> None:
        """Let the incumbent run, if something else does."""
        if self._applied == self.incumbent:
            return
        try:
            self._apply(self.incumbent)
        except _REFUSALS as error:
            _logger.warning("The knobs %s stay for now: they could not be changed (%s).", self._applied, error)

    # --- the end -----------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        self.request, self.over = None, True
        self._restore()

    def _is_wrong(self) -> bool:
        """Look at the losses that are there; restore the starting point's knobs where training goes wrong."""
        found = None if self._losses is None else self._losses.judge()
        if found is None:
            return False
        self._desk.guard(found)
        self.incumbent = self._start
        self._end()
        return True


def _device_limit(optimizer: ZenFlowOptimizer) -> int | None:
    """Bytes of device memory that a live trial may reach; None where there is no such memory."""
    total = optimizer.device.total_bytes()
    return None if total is None else round(total - max(HEADROOM * total, LEAST_HEADROOM_BYTES))
