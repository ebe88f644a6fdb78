"""A search in a training loop: knobs change through `set_knobs`, without a restart.

    live = LiveSearch(optimizer, search, tokens=micro_batch * sequence)
    for batch in batches:
        loss = train_step(batch)          # forward, backward, optimizer.step(), optimizer.zero_grad()
        if not live.on_step(loss):
            break                         # or go on: the knobs that were found hold

Nothing here waits for the device: step times come from the optimizer's own history, two steps late.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from zenflow import ConfigError, HostMemoryError, StepStats
from zenflow.device import Transfer
from zenflow.optimizer import ZenFlowOptimizer
from zftune.tuner.guard import LossGuard
from zftune.tuner.search import Search
from zftune.tuner.settings import Setting
from zftune.tuner.states import Outcome, Request

Disturbance = Callable[[], str | None]
"""Asked at the end of a measurement: why it does not count, or None. What came before is over then."""


class Recorder(Protocol):
    """Where a search is written down while it goes on."""

    def before(self, search: Search, request: Request) -> str | None:
        """Write down what is about to be applied; why it must not be, or None."""

    def after(self, search: Search, request: Request, outcome: Outcome) -> None:
        """Write down what came of it."""


class LiveSearch:
    """Carries out what a search asks for.

    Args:
        optimizer: that trains.
        search: begins at the optimizer's knobs.
        tokens: of a step.
        recorder: where it is written down.
        disturbance: says that a measurement does not count.
        guard: watches over the loss; None: nobody does.
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
    ) -> None:
        self.search = search
        self.request: Request | None = None
        """What is measured now."""
        self._optimizer, self._tokens = optimizer, tokens
        self._recorder, self._disturbance, self._guard = recorder, disturbance, guard
        self._applied: Setting | None = None
        self._from = 0
        self._seen = 0
        self._discarded: list[float] = []
        self._steps: list[float] = []
        self._losses: deque[tuple[int, torch.Tensor, Transfer]] = deque()
        self.overhead_s = 0.0
        """Time spent in here, the search's own thinking included."""

    def on_step(self, loss: torch.Tensor | None = None) -> bool:
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

    def _on_step(self, loss: torch.Tensor | None) -> bool:
        if self._guard is not None and loss is not None:
            device = self._optimizer.device
            target = device.host_empty((1,), torch.float32)
            sent = device.d2h(loss.detach().reshape(1).to(torch.float32), target)
            self._losses.append((self._optimizer.steps, target, sent))
        new = [stats for stats in self._optimizer.history() if stats.step > self._seen]
        if new:
            self._seen = new[-1].step
        if self._is_wrong():
            return False
        if self.request is None:
            return self._ask()
        for stats in new:
            if self._take(stats):
                return self._ask()
        return True

    # --- one request -------------------------------------------------------------------------------------------------

    def _ask(self) -> bool:
        """Apply what the search asks for next, until something can be applied."""
        while True:
            self.request = request = self.search.next()
            self._discarded, self._steps = [], []
            if request is None:
                self._apply(self.search.book.incumbent.setting)
                return False
            refused = None if self._recorder is None else self._recorder.before(self.search, request)
            if refused is not None:
                self.search.stop(refused)
                continue
            try:
                self._apply(request.setting)
            except (ConfigError, HostMemoryError, MemoryError, torch.OutOfMemoryError) as error:
                self._tell(Outcome("crashed", tokens=self._tokens, reason=str(error) or type(error).__name__))
                continue
            self._disturbance()  # what was before does not count
            return True

    def _apply(self, setting: Setting) -> None:
        """Change knobs; also where they stay the same, since this closes the window and the next one begins whole."""
        begun = self._optimizer.steps > 0
        step = self._optimizer.set_knobs(**setting.knobs())
        self._from = step if begun else 0
        self._applied = setting

    def _take(self, stats: StepStats) -> bool:
        """Count a step; whether the request is over."""
        request = self.request
        if request is None or stats.step <= self._from:
            return False
        into = self._discarded if len(self._discarded) < request.discard else self._steps
        into.append(stats.step_ms or 0.0)
        reason = request.abort_reason(self._discarded, self._steps)
        if reason is None and len(self._steps) < request.steps:
            return False
        disturbed = self._disturbance()
        if disturbed is not None:
            self._tell(self._outcome("void", disturbed))
        elif reason is not None:
            self._tell(self._outcome("aborted", reason))
        else:
            self._tell(self._outcome("measured", ""))
        return True

    def _outcome(self, status: str, reason: str) -> Outcome:
        return Outcome(
            status=status,  # type: ignore[arg-type]
            steps_ms=tuple(self._steps),
            discarded_ms=tuple(self._discarded),
            tokens=self._tokens,
            device_bytes=self._optimizer.device.peak_bytes(),
            host_bytes=sum(v for use, v in self._optimizer.host_bytes().items() if use != "peak"),
            reason=reason,
        )

    def _tell(self, outcome: Outcome) -> None:
        request = self.request
        if request is None:
            return
        self.search.tell(outcome)
        if self._recorder is not None:
            self._recorder.after(self.search, request, outcome)

    # --- the guard ---------------------------------------------------------------------------------------------------

    def _is_wrong(self) -> bool:
        """Look at the losses that are there; restore the starting point's knobs where training goes wrong."""
        while self._guard is not None and self._losses and self._losses[0][2].done():
            step, loss, _ = self._losses.popleft()
            reason = self._guard.add(float(loss))
            if reason is None:
                continue
            self.search.guard(f"Stopped at step {step}: {reason}; the starting point's knobs are back.")
            self._apply(self.search.book.incumbent.setting)
            self.request = None
            return True
        return False
