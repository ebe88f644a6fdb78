"""Follows an optimizer and tunes it: first a warm-up, then the search beside the training, then nothing more."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from statistics import fmean
from typing import Any

import torch

from zenflow import ZenFlowConfig, ZenFlowError
from zenflow.optimizer import ZenFlowOptimizer
from zftune.background import Background
from zftune.errors import BadInputError
from zftune.goodbye import PART_S, Goodbye
from zftune.quality import LossGuard, coverage_warning, highest_rate
from zftune.store.account import Counter
from zftune.tuner.drivers import Ended, SearchDriver
from zftune.tuner.executor import Change, Executor, Losses, TuningContext, Watch, counted, holds, leave_tried
from zftune.tuner.ranks import KnobConsensus
from zftune.tuner.search import Search
from zftune.tuner.setup import WarmupStats
from zftune.tuner.space import Setting
from zftune.tuner.states import Remark

CONCLUDES = "concludes"
"""Attribute of the log records that report the result at the end."""
_JOIN_S = 90.0  # a daemon that is told goodbye may take most of it
_DEPART_S = 1.0
_RATES_EVERY = 16  # steps in which all groups are looked at, which may be hundreds
_WARM_UP_STEPS = 8
_LONGEST_WARM_UP = 32
_logger = logging.getLogger("zftune")
_open: weakref.WeakSet[Tuner] = weakref.WeakSet()
_left: weakref.WeakKeyDictionary[ZenFlowOptimizer, tuple[ZenFlowConfig, ZenFlowConfig]] = weakref.WeakKeyDictionary()
"""The knobs that a closed tuner has left, and those that the script had asked for before."""


def open_tuners() -> list[Tuner]:
    """Those that were not closed."""
    return list(_open)


def warm_up_steps(config: ZenFlowConfig) -> int:
    """Steps before a search: the first are slow, and the first selection sees untrained weights."""
    every = config.select_interval
    second = 0 if every == "auto" else min(every + 1, _LONGEST_WARM_UP)
    return max(_WARM_UP_STEPS, 2 * counted(config).longest_window, second)


class StepCount:
    """Counts steps, whatever numbers they have: those jump where a saved state is loaded, at the begin or later.

    The warm-up is over after `begins` followed steps.
    """

    def __init__(self, optimizer: ZenFlowOptimizer) -> None:
        self.followed, self._optimizer, self._last = 0, optimizer, optimizer.steps
        self.begin_warm_up()

    def begin_warm_up(self) -> None:
        """From here on: earlier steps do not count."""
        self.warm_up = warm_up_steps(self._optimizer.config)
        full = max(0, self._optimizer.config.full_warm_up_rounds - self._last)
        self.begins = self.followed + full + self.warm_up

    @property
    def begins_anew(self) -> bool:
        """Whether the training resumes from no saved state: all of its steps were seen, since the first."""
        if self.followed == self._optimizer.steps:
            return True
        known = self._optimizer.history()  # steps that were taken before anybody followed them, too
        return bool(known) and known[0].step == 1 and known[-1].step == len(known)

    def after_step(self) -> bool:
        """Whether a saved state was loaded."""
        before, self._last = self._last, self._optimizer.steps
        loaded = self._last not in (before, before + 1)  # a step that a gradient scaler leaves out is none
        self.followed += 1 if loaded else self._last - before
        return loaded


class Tuner:
    """Follows an optimizer: `attach` makes it. In a fork's child it does nothing: the training is its parent's.

    Args:
        driver: makes the search and runs its worker; closed with the tuner.
        disturbance: tells that a measurement does not count; closed with the tuner.
        consensus: how several ranks change knobs, and reports changes on this one; None: there is one rank.
    """

    def __init__(
        self,
        optimizer: ZenFlowOptimizer,
        driver: SearchDriver,
        *,
        tokens: int,
        disturbance: Watch | None = None,
        eval_fn: Callable[[], float] | None = None,
        on_change: Change | None = None,
        consensus: KnobConsensus | None = None,
    ) -> None:
        self.notices: list[str] = []
        """Sentences: failures, choices at the start, and what the staleness probe saw."""
        self._remarks: list[Remark] = []
        self.conclusion = ""
        """The result, or why there is none, in up to four lines; there after `close()`."""
        self._optimizer, self._tokens, self._eval_fn, self._on_change = optimizer, tokens, eval_fn, on_change
        self._asked, self._since = asked_config(optimizer), optimizer.steps
        self.driver, self._disturbance, self._consensus = driver, disturbance, consensus
        self._losses, self._has_loss = Losses(optimizer.device, LossGuard()), False
        self._count = StepCount(optimizer)
        self._first_rate = self._highest_rate = 0.0
        self._best: tuple[Setting, Mapping[str, Any]] | None = None
        self._counter = Counter(optimizer.device.clock.now())
        self._finishing: Background[None] | None = None
        self.live: Executor | None = None
        self._probed: Setting | None = None
        self._over = self._closed = self._given_up = False
        self._pid = os.getpid()
        self._hook = optimizer.register_step_post_hook(self._after_step)
        self._close_hook = optimizer.register_close_hook(self.depart)
        if not _open:
            atexit.register(_close_all)
            importlib.import_module("torch._dynamo.trace_rules").add("zftune")  # the hook is in steps that it compiles
        _open.add(self)
        if consensus is None:  # a launcher sends it to a rank since another one has crashed
            _goodbye.hear()
            weakref.finalize(self, _deafen).atexit = False  # where it is thrown away

    def __enter__(self) -> Tuner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def incumbent(self) -> Setting:
        """The best knobs so far; where `update_interval` is "auto", what a search begins with."""
        if self.live is not None:
            return self.live.incumbent
        keeps = None if self._consensus is None or self._consensus.is_first else self._consensus.keeps
        return Setting.of(counted(self._optimizer.config)) if keeps is None else Setting.from_knobs(keeps)

    @property
    def searching(self) -> bool:
        """Whether the search goes on, or has yet to begin."""
        return not self._closed and self._finishing is None and not self._is_elsewhere

    @property
    def search(self) -> Search | None:
        return self.driver.search

    @property
    def run_id(self) -> str | None:
        return self.driver.run_id

    @property
    def gain(self) -> float:
        """What the best settings so far save, a share of the step time of those at the start."""
        return 0.0 if self.live is None else self.live.gain_share

    def follows(self, optimizer: ZenFlowOptimizer) -> bool:
        return self._optimizer is optimizer

    def log_loss(self, loss: torch.Tensor | float) -> None:
        """Give a step's loss, a scalar on any device or a number, to the guard; it never waits. Raises BadInputError:
        it is more than one number.
        """
        if self.searching:
            self._has_loss = True
            add = self._losses.add if self.live is None else self.live.log_loss
            add(self._optimizer.steps, loss)

    def log_tokens(self, tokens: int) -> None:
        """Set the tokens of a step from now on; scores are in time per token. Raises BadInputError: it is no number."""
        if tokens < 1:
            raise BadInputError(f"tokens is {tokens!r}; it must be an integer >= 1")
        self._tokens = tokens
        if self.live is not None and not self._is_elsewhere:
            self.live.log_tokens(tokens)

    @property
    def _is_elsewhere(self) -> bool:
        return os.getpid() != self._pid

    @property
    def meets_ranks(self) -> bool:
        """Whether several ranks still agree on knobs; for some steps after `close()`, too."""
        return self._consensus is not None and not self._consensus.over

    def close(self, reason: str | None = None) -> None:
        """End the tuning, on all ranks; the incumbent's knobs stay, and the result is written down.

        Several ranks get these knobs after their next steps. `reason`: why it ends before the search is over, a
        sentence; None: the training has ended.
        """
        if self._closed or self._is_elsewhere:
            return
        self._closed = True
        try:
            if self.live is not None and not self.live.over:
                self.live.stop(reason or "")
            if self._finishing is None:
                self._end_search()  # here: a thread could not be started any more where the interpreter ends
        finally:
            self._close_hook.remove()
            _open.discard(self)
            if not _open:
                atexit.unregister(_close_all)
            _deafen()
            if self._consensus is None or self._consensus.over:
                self._hook.remove()
            else:
                self._consensus.leave()  # with the next steps
            if self._disturbance is not None:
                self._disturbance.close()
            if self._finishing is not None:
                self._finishing.join(_JOIN_S)
            self.driver.close()
            self._note_best()
            asked = self._optimizer.asked_config
            if self.live is not None and holds(asked, self.live.incumbent.knobs()):
                _left[self._optimizer] = asked, self._asked  # the search's, for the next tuner of the optimizer

    def part(self) -> None:
        """Say goodbye in the middle of a step, in another thread than the training's: its knobs stay as they are."""
        if self._closed or self._is_elsewhere:
            return
        self._closed = True
        if self._finishing is not None:
            self._finishing.join(PART_S)
        else:
            if self.live is not None:
                self.live.stop("", restores=False)
            self._end_search()

    def depart(self) -> None:
        """Close it at the end of the process or of its optimizer, where no step comes any more."""
        self.close()
        if self._consensus is not None and not self._is_elsewhere:
            self._consensus.close(_DEPART_S)

    # --- step by step ------------------------------------------------------------------------------------------------

    def _after_step(self, *_: Any) -> None:
        if self._is_elsewhere:
            return
        before = self._count.followed
        loaded, now_s = self._count.after_step(), self._optimizer.device.clock.now()
        self._counter.step(now_s, self._count.followed - before, self._tokens, self._rate())
        self._counter.last_step = self._optimizer.steps
        consensus = self._consensus
        if loaded:
            self._resume_from_saved()
        if consensus is not None:
            with self._giving_up():
                consensus.hear()
            back, consensus.back = consensus.back, ""
            if consensus.is_first:
                self.say(back, logging.INFO)
        if not self._closed:
            if self._finishing is None:
                with self._giving_up():
                    self._follow()
            if self._eval_fn is not None:
                self._probe(self._eval_fn)
        self._note_best()
        if consensus is not None:  # all ranks do, after every step, whatever has come of the tuning here
            if self._finishing is not None:
                consensus.leave()
            if self.live is not None:
                consensus.keeps = self._best_knobs()
            consensus.say()
            if consensus.over and self._closed:
                self._hook.remove()

    def _rate(self) -> float:
        """The highest learning rate; all groups are looked at where that of the first has changed, and now and then."""
        groups = self._optimizer.param_groups
        first = highest_rate(groups[:1])
        if first != self._first_rate or self._count.followed % _RATES_EVERY == 0:
            self._first_rate, self._highest_rate = first, highest_rate(groups)
        return self._highest_rate

    def _best_knobs(self) -> Mapping[str, Any] | None:
        """The same object as long as they are the same."""
        if self.live is not None and (self._best is None or self._best[0] != self.live.incumbent):
            self._best = self.live.incumbent, self.live.incumbent.knobs()
        return None if self._best is None else self._best[1]

    def _note_best(self) -> None:
        """Have a state that is saved while a setting is tried name the one to go back to, the same on all ranks."""
        optimizer, consensus = self._optimizer, self._consensus
        kept = optimizer.kept_knobs
        best = self._best_knobs() if consensus is None else consensus.keeps  # before rank 0 tells of another one
        if not self.searching if consensus is None else consensus.over:
            if kept is not None and holds(optimizer.config, kept):
                optimizer.kept_knobs = None
        elif best is not None and kept is not best:  # which a change of knobs has forgotten
            optimizer.kept_knobs = best

    def _resume_from_saved(self) -> None:
        """A saved state was loaded: earlier steps are of another course, and this one's first steps are slow."""
        if self._consensus is not None:
            self._consensus.resume_from_saved()  # whatever has come of the tuning here: the others do
        if not self.searching:
            return
        self._losses.forget()
        if not self.driver.begun:
            self._count.begin_warm_up()
        if self.live is None:
            self._since = self._optimizer.steps
            back = leave_tried(self._optimizer, self._on_change) if self._consensus is None else ""
            self.say(back, logging.INFO)
        elif self._consensus is None:
            self.live.resume_from_saved()
        else:
            self._give_up("Tuning ended: a saved state was loaded, and several ranks do not go on from one.")

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        """End the tuning, not the training, where something of ours fails; the runtime's errors are raised."""
        try:
            yield
        except ZenFlowError:
            raise
        except Exception as error:
            _logger.exception("Tuning ended; the training goes on.")
            if self._finishing is None and not self._closed:
                self._give_up(f"Tuning ended: {type(error).__name__}: {error}.")

    def _follow(self) -> None:
        consensus = self._consensus
        if consensus is not None and not consensus.is_first:
            self._follow_first(consensus)
        elif consensus is not None and consensus.wrong and self.live is not None:
            self.live.go_back(consensus.wrong)
            self._over = True
            self._finish()
        elif consensus is not None and (consensus.wrong or consensus.over):
            self._give_up(consensus.wrong or consensus.reason)
        elif self.live is not None:
            self._over = not self.live.on_step()
            self._listen()
            if self._over:
                self._finish()
        elif self.driver.begun and self._begin():
            return
        elif (wrong := self._losses.judge()) is not None:
            self._give_up(wrong)
        elif not self.driver.begun and self._count.followed >= self._count.begins:
            self._end_warm_up()

    def _follow_first(self, consensus: KnobConsensus) -> None:
        """Another rank than the first changes knobs with the others, and reports where its loss goes wrong."""
        if consensus.over:
            self.notices += filter(None, [consensus.reason])
            self._finish()
        elif not consensus.wrong_at and (wrong := self._losses.judge()) is not None:
            self.notices.append(wrong)
            consensus.wrong_at = self._optimizer.steps

    def _end_warm_up(self) -> None:
        steps = tuple(self._optimizer.history()[-self._count.warm_up :])
        covered = [one.coverage for one in steps if one.coverage is not None]
        mean = fmean(covered) if covered else None
        warning = coverage_warning(mean, asdict(self._optimizer.config), tuned=True)
        if warning is not None:
            _logger.warning("%s", warning)  # no notice: what shows a run tells of its coverage as it is then
        self._asked = asked_config(self._optimizer)
        config, asked = (counted(one) for one in (self._optimizer.config, self._asked))
        seen = WarmupStats(config, steps, self._has_loss, asked, self._count.begins_anew)
        self.driver.prepare(seen, self._counter)

    def _begin(self) -> bool:
        scene = TuningContext(
            optimizer=self._optimizer,
            tokens=self._tokens,
            since=self._since,
            disturbance=self._disturbance,
            losses=self._losses if self._has_loss else None,
            on_change=None if self._consensus is not None else self._on_change,  # which reports it itself
            changes=self._consensus,
            counter=self._counter,
        )
        self.live = self.driver.live(scene)
        self._listen()
        if self.live is not None and self.run_id is not None:
            called = self.run_id[:8]
            _logger.info("zftune tunes this training as run %s; watch it with: zftune explain %s", called, called)
        return self.live is not None

    def _listen(self) -> None:
        for level, sentence in self.driver.said():  # a warning is of the store, whose rows take no remark of it
            self.say(sentence, level, is_remark=level < logging.WARNING)

    def _probe(self, eval_fn: Callable[[], float]) -> None:
        """Once before the search and for each incumbent, where nothing is measured and nothing older is pending."""
        live = self.live
        if live is None:
            is_due = self._probed is None and self.driver.begun and self._optimizer.config.update_interval != "auto"
        else:
            settled = live.incumbent.update_interval + live.incumbent.apply_lag
            is_due = self._probed != live.incumbent and live.request is None and live.steady_steps > settled
        if not is_due:
            return
        setting = self._probed = self.incumbent
        with torch.no_grad():
            before = float(eval_fn())
            self._optimizer.flush()
            after = float(eval_fn())
        when = f"Staleness probe after step {self._optimizer.steps} under {setting}"
        self.say(f"{when}: the loss is {before:.6g} before and {after:.6g} after a flush.", logging.INFO)

    # --- the end -----------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        if self._finishing is None:  # in simulated time the machine's, in which it is written down, does not count
            self._finishing = Background(self._end_search, "zftune-finish", self._optimizer.device.clock, takes_s=0.0)

    def _end_search(self) -> None:
        """Once no worker is at work any more, so that the search is ours."""
        try:
            if self.live is not None:
                self.live.close()
            ended = Ended(
                steps=self._count.followed,
                begins=self._count.begins,
                over=self._over,
                given_up=self._given_up,
                remarks=tuple(self._remarks),
                count=self._counter.count,
                incumbent=None if self.live is None else self.live.incumbent,
                gain=None if self.live is None else self.live.gain,
            )
            for level, sentence in self.driver.end(ended):
                self.conclusion = self.conclusion or sentence
                _logger.log(level, "%s", sentence, extra={CONCLUDES: True})
                if level >= logging.WARNING:
                    self.notices.append(sentence)
        except Exception:
            _logger.exception("The result could not be written down; the training is not concerned.")

    def _give_up(self, reason: str) -> None:
        self._given_up = True
        self.say(reason)
        if self.live is not None and not self.live.over:
            self.live.stop(reason)
        self._finish()

    def say(self, sentence: str, level: int = logging.WARNING, *, is_remark: bool = True) -> None:
        if sentence:
            self.notices.append(sentence)
            now = self._counter.count.seconds, time.time(), self._counter.last_step
            self._remarks += [Remark(sentence, *now)] if is_remark else []
            _logger.log(level, "%s", sentence)


def asked_config(optimizer: ZenFlowOptimizer) -> ZenFlowConfig:
    """The knobs that the script asks for, which are not those that an earlier tuner has left."""
    left, before = _left.get(optimizer, (None, None))
    asked = optimizer.asked_config
    return before if before is not None and asked == left else asked


def _part_all() -> None:
    for tuner in open_tuners():
        try:
            tuner.part()
        except Exception:
            _logger.exception("The end of a tuning could not be written down.")


_goodbye = Goodbye(_part_all)


def _deafen() -> None:
    if not open_tuners():  # `_open` may still count one that is gone
        _goodbye.deafen()


def _close_all() -> None:
    for tuner in open_tuners():
        try:
            tuner.depart()
        except KeyboardInterrupt:  # a traceback would tell nobody anything
            _logger.warning("Interrupted while the end of the tuning was being written down.")
            break
        except Exception:
            _logger.exception("A tuner could not be closed.")
    if getattr(sys, "last_type", None) is KeyboardInterrupt:
        # Python then ends by SIGINT, as shells expect, unless code was compiled since: SQLAlchemy does that.
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")
