"""What follows an optimizer and tunes it: first a warm-up, then the search beside the training, then nothing more."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from zenflow import ZenFlowError
from zenflow.optimizer import ZenFlowOptimizer
from zftune.errors import BadInputError
from zftune.tuner.background import Background
from zftune.tuner.changing import Change
from zftune.tuner.counsel import Counsel, Ended, Scene
from zftune.tuner.disturbances import Watch
from zftune.tuner.executor import Executor
from zftune.tuner.facts import Seen
from zftune.tuner.guard import Losses, LossGuard
from zftune.tuner.ranks.accord import Accord
from zftune.tuner.search import Search
from zftune.tuner.settings import Setting
from zftune.tuner.step_count import StepCount
from zftune.tuner.windows import KnownWindow, counted

_JOIN_S = 20.0  # a daemon that is told goodbye may take most of it
_DEPART_S = 1.0
_logger = logging.getLogger("zftune")
_open: weakref.WeakSet[Tuner] = weakref.WeakSet()


def open_tuners() -> list[Tuner]:
    """Those that were not closed."""
    return list(_open)


class Tuner:
    """Follows an optimizer: `attach` makes it. In a fork's child it does nothing: the training is its parent's.

    Args:
        optimizer: that trains.
        counsel: makes the search and thinks about it; closed with the tuner.
        tokens: of a step.
        disturbance: says that a measurement does not count; closed with the tuner.
        eval_fn: the staleness probe; None: there is none.
        on_change: told of changes.
        accord: how several ranks change knobs, and on this one tells of it; None: there is one rank.
    """

    def __init__(
        self,
        optimizer: ZenFlowOptimizer,
        counsel: Counsel,
        *,
        tokens: int,
        disturbance: Watch,
        eval_fn: Callable[[], float] | None = None,
        on_change: Change | None = None,
        accord: Accord | None = None,
    ) -> None:
        self.notices: list[str] = []
        """Sentences: what is not as it should be, and what the staleness probe saw."""
        self._optimizer, self._tokens, self._eval_fn, self._on_change = optimizer, tokens, eval_fn, on_change
        self._counsel, self._disturbance, self._accord = counsel, disturbance, accord
        self._guard = LossGuard()
        self._losses: Losses | None = Losses(optimizer.device, self._guard)
        self._has_loss = False
        # With several ranks the accord tells of changes itself.
        self._window = KnownWindow(optimizer, accord, None if accord is not None else on_change)
        self._count = StepCount(optimizer)
        self._finishing: Background[None] | None = None
        self._live: Executor | None = None
        self._probed: Setting | None = None
        self._over = self._closed = self._given_up = False
        self._pid = os.getpid()
        self._hook = optimizer.register_step_post_hook(self._after_step)
        if not _open:
            atexit.register(_close_all)
        _open.add(self)

    def __enter__(self) -> Tuner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def incumbent(self) -> Setting:
        """The best knobs so far; where `update_interval` is "auto", what a search begins with."""
        return Setting.of(counted(self._optimizer.config)) if self._live is None else self._live.incumbent

    @property
    def searching(self) -> bool:
        """Whether the search goes on, or has yet to begin."""
        return not self._closed and self._finishing is None and not self._is_elsewhere

    @property
    def live(self) -> Executor | None:
        """The search at work; None: it has not begun."""
        return self._live

    @property
    def search(self) -> Search | None:
        """What was found, with every decision; read it after `close()`. None: the daemon has it, or nothing was."""
        return self._counsel.search

    def follows(self, optimizer: ZenFlowOptimizer) -> bool:
        """Whether it is this optimizer that it tunes."""
        return self._optimizer is optimizer

    def log_loss(self, loss: torch.Tensor | float) -> None:
        """Give a step's loss to the guard; it never waits.

        Args:
            loss: a scalar on any device, or a number.

        Raises:
            BadInputError: it is more than one number.
        """
        if not self.searching:
            return
        self._has_loss = True
        if self._live is not None:
            self._live.log_loss(loss)
        elif self._losses is not None:
            self._losses.add(self._optimizer.steps, loss)

    def log_tokens(self, tokens: int) -> None:
        """Say that steps have another number of tokens from now on; scores are in time per token.

        Args:
            tokens: of a step.

        Raises:
            BadInputError: it is no number of tokens.
        """
        if tokens < 1:
            raise BadInputError(f"tokens is {tokens!r}, allowed is an integer >= 1")
        self._tokens = tokens
        if self._live is not None and not self._is_elsewhere:
            self._live.log_tokens(tokens)

    @property
    def _is_elsewhere(self) -> bool:
        return os.getpid() != self._pid

    def close(self) -> None:
        """End the tuning; the incumbent's knobs stay, and what was found is written down.

        With several ranks it ends on all of them; they get the incumbent's knobs after their next steps.
        """
        if self._closed or self._is_elsewhere:
            return
        self._closed = True
        try:
            if self._live is not None and not self._live.over:
                self._live.stop(f"Tuning ended after {self._count.followed} steps, before the search was over.")
            if self._finishing is None:
                self._end_search()  # here: a thread could not be started any more where the interpreter ends
        finally:
            self._let_go()

    def depart(self) -> None:
        """Close it at the end of the process, where no step comes any more."""
        self.close()
        if self._accord is not None and not self._is_elsewhere:
            self._accord.close(_DEPART_S)

    def _let_go(self) -> None:
        _open.discard(self)
        if not _open:
            atexit.unregister(_close_all)
        if self._accord is None or self._accord.over:
            self._hook.remove()
        else:
            self._accord.leave()  # with the next steps
        self._disturbance.close()
        if self._finishing is not None:
            self._finishing.join(_JOIN_S)
        self._counsel.close()

    # --- step by step ------------------------------------------------------------------------------------------------

    def _after_step(self, *_: Any) -> None:
        if self._is_elsewhere:
            return
        if self._count.after_step() and self.searching:
            self._go_on_from_saved()
        if self._accord is not None:
            self._hear(self._accord)
        if not self._closed:
            self._go_on()
        if self._accord is not None:
            self._talk(self._accord)

    def _go_on_from_saved(self) -> None:
        """A saved state was loaded: what was seen before is of another course, and this one's first steps are slow."""
        for losses in (self._losses, None if self._live is None else self._live.losses):
            if losses is not None:
                losses.forget()
        if self._accord is not None:
            self._accord.go_on_from_saved()
        if not self._counsel.begun:
            self._count.begin_warm_up()
        elif self._live is not None and self._accord is None:
            self._live.go_on_from_saved()
        elif self._live is not None:
            self._give_up("Tuning ended: a saved state was loaded, and several ranks do not go on from one.")

    def _hear(self, accord: Accord) -> None:
        try:
            accord.hear()
        except ZenFlowError:
            raise
        except Exception as error:
            _logger.exception("Tuning ended; the training goes on.")
            self._fail(error)

    def _talk(self, accord: Accord) -> None:
        """All ranks do, after every step, whatever has come of the tuning here: they wait for each other."""
        if self._finishing is not None:
            accord.leave()
        if self._live is not None:
            accord.keeps = self._live.incumbent.knobs()
        accord.say()
        if accord.over and self._closed:
            self._hook.remove()

    def _go_on(self) -> None:
        if self._finishing is None:
            try:
                self._follow()
            except ZenFlowError:
                raise
            except Exception as error:
                _logger.exception("Tuning ended; the training goes on.")
                self._fail(error)
        if self._eval_fn is not None and self._probe_is_due():
            self._probe(self._eval_fn)

    def _fail(self, error: Exception) -> None:
        if self._finishing is None and not self._closed:
            self._give_up(f"Tuning ended: {type(error).__name__}: {error}.")

    def _follow(self) -> None:
        if self._accord is not None and self._heed(self._accord):
            return
        if self._live is not None:
            going = self._live.on_step()
            self._listen()
            if not going:
                self._over = True
                self._finish()
        elif not self._counsel.begun:
            self._warm()
        elif not self._begin():
            self._watch()

    def _heed(self, accord: Accord) -> bool:
        """Whether the other ranks have ended it."""
        if accord.wrong:
            self._end_wrong(accord.wrong)
        elif accord.over:
            self._give_up(accord.reason)
        return bool(accord.wrong) or accord.over

    def _end_wrong(self, why: str) -> None:
        if self._live is None:
            self._give_up(f"Nothing was tuned. {why}")
            return
        self._live.go_back(why)
        self._over = True
        self._finish()

    def _warm(self) -> None:
        if not self._watch() and self._count.followed >= self._count.begins:
            steps = tuple(self._optimizer.history()[-self._count.warm_up :])
            self._counsel.prepare(Seen(counted(self._optimizer.config), steps, self._has_loss))

    def _watch(self) -> bool:
        """Whether training goes wrong before the search begins, so that there is none."""
        wrong = None if self._losses is None else self._losses.judge()
        if wrong is not None:
            self._give_up(f"Nothing was tuned. {wrong}")
        return wrong is not None

    def _begin(self) -> bool:
        """Whether the search is there, so that it can begin."""
        if not self._window.there:
            self._listen()
            if self._counsel.ready:
                self._window.ask()
            return False
        self._live = self._counsel.live(
            Scene(
                optimizer=self._optimizer,
                tokens=self._tokens,
                disturbance=self._disturbance,
                guard=self._guard if self._has_loss else None,
                on_change=None if self._accord is not None else self._on_change,  # which tells itself
                changes=self._accord,
            )
        )
        self._listen()
        space = None if self._counsel.search is None else self._counsel.search.book.space
        if space is not None and space.fixed_because and self._live is not None:
            _logger.info("Knobs that change the trajectory stay: %s.", space.fixed_because)
        return self._live is not None

    def _listen(self) -> None:
        for sentence in self._counsel.said():
            self._say(sentence, logging.INFO)

    # --- the staleness probe -----------------------------------------------------------------------------------------

    def _probe_is_due(self) -> bool:
        """Once before the search and for each incumbent, where nothing is measured and nothing older is pending."""
        if self._live is None:
            return self._probed is None and self._counsel.begun and self._window.there
        setting = self._live.incumbent
        settled = setting.update_interval + setting.apply_lag
        return self._probed != setting and self._live.request is None and self._live.steady_steps > settled

    def _probe(self, eval_fn: Callable[[], float]) -> None:
        setting = self._probed = self.incumbent
        with torch.no_grad():
            before = float(eval_fn())
            self._optimizer.flush()
            after = float(eval_fn())
        self._say(
            f"Staleness probe after step {self._optimizer.steps} under {setting}: the loss is {before:.6g} before and "
            f"{after:.6g} after a flush.",
            logging.INFO,
        )

    # --- the end -----------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Say what was found, and write it down in a thread."""
        if self._finishing is None:
            self._finishing = Background(self._end_search, "zftune-finish", self._optimizer.device.clock)

    def _end_search(self) -> None:
        """Once nobody thinks any more, so that the search is ours."""
        try:
            if self._live is not None:
                self._live.close()
            self._conclude()
        except Exception:
            _logger.exception("What was found could not be written down; the training is not concerned.")

    def _conclude(self) -> None:
        ended = Ended(
            steps=self._count.followed,
            begins=self._count.begins,
            over=self._over,
            given_up=self._given_up,
            remarks=tuple(self.notices),
        )
        for level, sentence in self._counsel.end(ended):
            _logger.log(level, "%s", sentence)
            if level >= logging.WARNING:
                self.notices.append(sentence)

    def _give_up(self, reason: str) -> None:
        self._given_up = True
        self._say(reason)
        if self._live is not None and not self._live.over:
            self._live.stop(reason)
        self._finish()

    def _say(self, sentence: str, level: int = logging.WARNING) -> None:
        self.notices.append(sentence)
        _logger.log(level, "%s", sentence)


def _close_all() -> None:
    for tuner in open_tuners():
        try:
            tuner.depart()
        except Exception:
            _logger.exception("A tuner could not be closed.")
    if getattr(sys, "last_type", None) is KeyboardInterrupt:
        # Python then ends by SIGINT, as shells expect, unless code was compiled since: SQLAlchemy does that.
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")
