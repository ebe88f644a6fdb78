"""Carries out in a training loop what a desk asks for: knobs change through `set_knobs`, without a restart.

Nothing here waits: step times come from the optimizer's own history, two steps late, and a desk (see
`zftune.tuner.thinking`) answers when it can, while training goes on under the incumbent's knobs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch

from zenflow import StepStats
from zenflow.optimizer import ZenFlowOptimizer
from zftune.tuner.changing import AtOnce, Change, Changes, Verdict
from zftune.tuner.drift import Pace
from zftune.tuner.guard import Losses
from zftune.tuner.outside import Outside
from zftune.tuner.settings import Setting
from zftune.tuner.states import Between, Outcome, Request
from zftune.tuner.thinking import Answer, Desk

Disturbance = Callable[[], str | None]
"""Asked at the end of a measurement: why it does not count, or None. What came before is over then."""
_logger = logging.getLogger("zftune")


class Executor:
    """Measures what a desk asks for.

    Args:
        optimizer: that trains.
        desk: where it is thought about.
        start: the setting that the search begins from: where training goes wrong, it is set again.
        incumbent: the best setting so far.
        tokens: of a step.
        disturbance: says that a measurement does not count.
        losses: are watched over; None: nobody does.
        on_change: told of every change of knobs.
        changes: how knobs change; None: at once.
    """

    def __init__(
        self,
        optimizer: ZenFlowOptimizer,
        desk: Desk,
        *,
        start: Setting,
        incumbent: Setting,
        tokens: int,
        disturbance: Disturbance = lambda: None,
        losses: Losses | None = None,
        on_change: Change | None = None,
        changes: Changes | None = None,
    ) -> None:
        self.request: Request | None = None
        """What is measured now; None: nothing, somebody thinks."""
        self.incumbent = incumbent
        """The best setting so far, as of the last answer."""
        self.over = False
        """Whether the search has ended."""
        self.overhead_s = 0.0
        """Time spent in here by the training thread."""
        self.outside = Outside()
        """The steps that belong to no measurement."""
        self.losses = losses
        """That are watched over; None: nobody does."""
        self._start = start
        self._optimizer, self._tokens = optimizer, tokens
        self._disturbance, self._on_change = disturbance, on_change
        self._desk = desk
        self._changes = changes or AtOnce(optimizer)
        self._asked: Setting | None = None
        """What knobs are about to change to; None: nothing is under way."""
        self._stays = False
        """Whether that is what they are, so that nothing but the window's end is waited for."""
        self._asked_for: Request | None = None
        self._handed = False
        self._applied: Setting | None = Setting.of(optimizer.config)
        """None: windows have no known length."""
        self._from = self._seen = optimizer.steps
        self._discarded: list[float] = []
        self._steps: list[float] = []
        self._stats: list[StepStats] = []
        """Of the steps that count."""
        self._recounted = False
        """Whether steps have another number of tokens than what is measured began with."""
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
        if self.losses is not None and not self.over:
            self.losses.add(self._optimizer.steps, loss)

    def log_tokens(self, tokens: int) -> None:
        """Say that steps have another number of tokens from now on: what was measured before does not count.

        Args:
            tokens: of a step.
        """
        self._recounted = self._recounted or tokens != self._tokens
        self._tokens = tokens

    def stop(self, reason: str) -> None:
        """End the search early; the incumbent's knobs are set.

        Args:
            reason: a sentence.
        """
        self.close()
        if not self.over:
            self._desk.stop(reason)
            self._end()

    def close(self) -> None:
        """End the thinking, within seconds; the search may be read and written down from here on."""
        self._desk.close()

    def go_on_from_saved(self) -> None:
        """Call it after the first step of a state that was loaded: the incumbent's knobs are set in it.

        What is measured is given up, and a change that was on its way has gone with the state that it was for.
        """
        config = self._optimizer.config
        self._from = self._seen = self._optimizer.steps - 1
        self._applied = Setting.of(config) if config.update_interval != "auto" else None
        self._asked, self._stays = None, False
        self.outside.forget_changes()
        if self.request is None:
            self._restore()
        else:
            self._hand(replace(self._void("a saved state was loaded"), called_off=True))

    def _on_step(self, loss: torch.Tensor | float | None) -> bool:
        if self.over:
            return False
        if loss is not None:
            self.log_loss(loss)
        if self._is_wrong():
            return False
        self._settle()
        for stats in self._new():
            self._seen = stats.step
            self._desk.observe(stats)
            self._take(stats)
            self._stay(stats)
        self._count_anew()
        self._give_up()
        if self.request is None and not self._handed:
            self._hand(None)
        while self._handed and self._asked is None:
            answer = self._desk.poll()
            if answer is None:
                break
            self._carry_out(answer)
        return not self.over

    def _new(self) -> list[StepStats]:
        """The steps that were not seen yet, oldest first."""
        return self._optimizer.history(after=self._seen)

    # --- one request -------------------------------------------------------------------------------------------------

    def _carry_out(self, answer: Answer) -> None:
        """Apply what is asked for; where that is refused there may be another answer at once."""
        self._handed = False
        self.incumbent, self.request = answer.incumbent, answer.request
        self._start = answer.start or self._start
        self._discarded, self._steps, self._stats = [], [], []
        if self.request is None:
            self._desk.idle(self.outside.taken())
            self._end()
        else:
            self._ask(self.request.setting)

    def _ask(self, setting: Setting) -> None:
        """Change knobs; where they run already, wait for the window's end: to watch a training is not to alter it."""
        self._asked, self._asked_for = setting, self.request
        config = self._optimizer.config
        known = config.update_interval != "auto"
        self._stays = setting == self._applied and known and setting == Setting.of(config)
        if not self._stays:
            self._changes.ask(setting.knobs())
            self._settle()

    def _stay(self, stats: StepStats) -> None:
        """The knobs stay, and what is measured begins with the next window, once this step has closed one."""
        setting = self._asked
        of_these = stats.step >= self._from  # steps are seen late: before it other knobs closed windows
        if not self._stays or not stats.closed or not of_these or setting is None:
            return
        self._asked, self._stays, self._from = None, False, stats.step
        self._desk.applied(stats.step, setting)
        self._disturbance()  # what was before does not count

    def _settle(self) -> None:
        """Take note of what became of a change, once that is known."""
        verdict = None if self._asked is None or self._stays else self._changes.verdict()
        if verdict is None or self._asked is None:
            return
        setting, self._asked = self._asked, None
        wanted = self.request is not None and self._asked_for is self.request
        if verdict.step is not None:
            self._applied_after(verdict.step, setting)
        if verdict.step is None and wanted:
            self._fail(verdict)
        elif verdict.refused:
            _logger.warning(
                "The knobs %s stay for now: they could not be changed (%s).", self._applied, verdict.refused
            )
        elif wanted:
            self._disturbance()  # what was before does not count
        elif verdict.void or self._applied != self.incumbent:
            self._restore()  # it was given up meanwhile

    def _applied_after(self, step: int, setting: Setting) -> None:
        self._from, self._applied = step, setting
        self.outside.change(step, challenges=setting != self.incumbent)
        self._desk.applied(step, setting)
        if self._on_change is not None:
            self._on_change(step or 1, setting.knobs())

    def _fail(self, verdict: Verdict) -> None:
        """What was asked for cannot be measured."""
        between = self._between = self.outside.taken()
        reason = verdict.refused or verdict.void
        status: Literal["crashed", "void"] = "crashed" if verdict.refused else "void"
        self._hand(Outcome(status, tokens=self._tokens, reason=reason, between=between))

    def _take(self, stats: StepStats) -> None:
        """Count a step, and hand over what came of the request where it is over."""
        request, step_ms = self.request, stats.step_ms or 0.0
        if request is None or self._asked is not None or stats.step <= self._from:
            self.outside.add(stats.step, step_ms)
            return
        if not self._discarded and not self._steps:
            self._between = self.outside.taken()
        if len(self._discarded) < request.discard:
            self._discarded.append(step_ms)
            if len(self._discarded) == request.discard:
                self._disturbance()  # the change itself may look like one, and these do not count
        else:
            self._steps.append(step_ms)
            self._stats.append(stats)
            if len(self._steps) == 1:
                self._optimizer.device.reset_peak_bytes()  # the setting before had a peak of its own
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
            pace=Pace.of(self._stats),
        )

    def _void(self, reason: str) -> Outcome:
        """Of a measurement that is given up, perhaps before its first step."""
        if not self._discarded and not self._steps:
            self._between = self.outside.taken()
        return self._outcome("void", reason)

    def _hand(self, outcome: Outcome | None) -> None:
        """Let the desk think; meanwhile nothing but the incumbent runs."""
        self.request, self._handed = None, True
        self._desk.hand(outcome)
        self._restore()

    def _count_anew(self) -> None:
        """Give up what is measured, where its steps are not all of one size."""
        recounted, self._recounted = self._recounted, False
        if recounted and self.request is not None:
            self._hand(self._void("the tokens of a step have changed"))

    def _give_up(self) -> None:
        """Give up what is measured, where the desk asks for that."""
        recall = self._desk.recall()
        if recall is None:
            return
        self.incumbent = recall.incumbent or self.incumbent
        if self.request is None:
            self._restore()
        else:
            self._hand(replace(self._void(recall.reason), called_off=True))

    def _restore(self) -> None:
        """Let the incumbent run, if something else does, or is about to."""
        if self._stays:
            self._asked, self._stays = None, False
        if self._asked is not None and self._asked != self.incumbent:
            self._changes.withdraw()  # its verdict comes first
        elif self._asked is None and self._applied != self.incumbent:
            self._ask(self.incumbent)

    # --- the end -----------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        self.request, self.over = None, True
        self._restore()

    def _is_wrong(self) -> bool:
        """Look at the losses that are there; restore the starting point's knobs where training goes wrong."""
        found = None if self.losses is None else self.losses.judge()
        if found is not None:
            self.go_back(found)
        return found is not None

    def go_back(self, reason: str) -> None:
        """End the search because training goes wrong; the starting point's knobs are set.

        Args:
            reason: a sentence.
        """
        self._desk.guard(reason)
        self.incumbent = self._start
        self._end()
