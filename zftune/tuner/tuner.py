"""What follows an optimizer and tunes it: first a warm-up, then the search beside the training, then nothing more."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

import torch

from zenflow import ZenFlowConfig, ZenFlowError
from zenflow.optimizer import ZenFlowOptimizer
from zftune.errors import BadInputError
from zftune.quality import coverage_warning, highest_rate
from zftune.store.account import Counter
from zftune.tuner.drivers import Ended, NullDriver, SearchDriver
from zftune.tuner.executor import Change, Executor, TuningContext
from zftune.tuner.guard import Losses, LossGuard, NoDisturbance, Watch
from zftune.tuner.rank_consensus import KnobConsensus
from zftune.tuner.search import Search
from zftune.tuner.space import Setting
from zftune.tuner.states import Remark
from zftune.tuner.training_info import WarmupStats
from zftune.tuner.warm_up import KnownWindow, StepCount, counted, go_back, holds
from zftune.tuner.worker import Background

_logger = logging.getLogger("zftune")


CONCLUDES = "concludes"
"""Attribute of the log records that say at the end what was found."""
_JOIN_S = 90.0  # a daemon that is told goodbye may take most of it
_DEPART_S = 1.0
PART_S = 10.0
"""Most time of the goodbye before a signal ends the process; the sender of a later SIGKILL waits about as long."""
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_MOST_EARLY_LOSSES = 512
_RATES_EVERY = 16  # steps in which all groups are looked at, which may be hundreds
_open: weakref.WeakSet[Tuner] = weakref.WeakSet()
_left: weakref.WeakKeyDictionary[ZenFlowOptimizer, tuple[ZenFlowConfig, ZenFlowConfig]] = weakref.WeakKeyDictionary()
"""The knobs that a closed tuner has left, and those that the script had asked for before."""


def open_tuners() -> list[Tuner]:
    """Those that were not closed."""
    return list(_open)


class Tuner:
    """Follows an optimizer: `attach` makes it. In a fork's child it does nothing: the training is its parent's.

    Args:
        driver: makes the search and thinks about it; closed with the tuner.
        disturbance: says that a measurement does not count; closed with the tuner.
        consensus: how several ranks change knobs, and on this one tells of it; None: there is one rank.
    """

    def __init__(
        self,
        optimizer: ZenFlowOptimizer,
        driver: SearchDriver,
        *,
        tokens: int,
        disturbance: Watch,
        eval_fn: Callable[[], float] | None = None,
        on_change: Change | None = None,
        consensus: KnobConsensus | None = None,
    ) -> None:
        self.notices: list[str] = []
        """Sentences: what is not as it should be, and what the staleness probe saw."""
        self._remarks: list[Remark] = []
        """The same, but for its last words, with when they were said."""
        self.conclusion = ""
        """What was found, or why nothing was, in up to four lines; there after `close()`."""
        self._optimizer, self._tokens, self._eval_fn, self._on_change = optimizer, tokens, eval_fn, on_change
        self._asked = asked_config(optimizer)
        self._since = optimizer.steps
        """After which step the knobs hold that the search finds."""
        self._driver, self._disturbance, self._consensus = driver, disturbance, consensus
        self._guard = LossGuard()
        self._early_losses: list[tuple[int, float]] = []
        """Of the steps before the search."""
        self._losses: Losses | None = Losses(optimizer.device, self._guard, self._hear_early)
        self._has_loss = False
        # With several ranks the consensus tells of changes itself.
        self._window = KnownWindow(optimizer, consensus, None if consensus is not None else on_change)
        self._count = StepCount(optimizer)
        self._first_rate = self._highest_rate = 0.0
        self._best: tuple[Setting, Mapping[str, Any]] | None = None
        """The incumbent as it was last, and its knobs."""
        self._counter = Counter(optimizer.device.clock.now())
        driver.count_by(self._counter)
        self._finishing: Background[None] | None = None
        self._live: Executor | None = None
        self._probed: Setting | None = None
        self._over = self._closed = self._given_up = False
        self._pid = os.getpid()
        self._hook = optimizer.register_step_post_hook(self._after_step)
        self._close_hook = optimizer.register_close_hook(self.depart)
        if not _open:
            atexit.register(_close_all)
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
        return self._driver.search

    @property
    def run_id(self) -> str | None:
        """Of the run in the store; None: the daemon writes it down, or nothing is written."""
        return self._driver.run_id

    @property
    def asks_daemon(self) -> bool:
        """Whether a daemon searches, rather than this process."""
        return self._driver.asks_daemon

    @property
    def registered(self) -> bool:
        """Whether a daemon that searches has ever answered for this training."""
        return self._driver.registered

    @property
    def begins(self) -> int:
        """After how many steps it begins to measure, at the earliest."""
        return self._count.begins

    @property
    def gain(self) -> float:
        """What the best settings so far save, a share of the step time.

        It is that of the settings that the search began with, or of earlier ones that had to take their place.
        """
        return 0.0 if self._live is None else self._live.gain_share

    def follows(self, optimizer: ZenFlowOptimizer) -> bool:
        """Whether it is this optimizer that it tunes."""
        return self._optimizer is optimizer

    def log_loss(self, loss: torch.Tensor | float) -> None:
        """Give a step's loss, a scalar on any device or a number, to the guard; it never waits.

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
        """Set the tokens of a step from now on; scores are in time per token.

        Raises:
            BadInputError: it is no number of tokens.
        """
        if tokens < 1:
            raise BadInputError(f"tokens is {tokens!r}; it must be an integer >= 1")
        self._tokens = tokens
        if self._live is not None and not self._is_elsewhere:
            self._live.log_tokens(tokens)

    @property
    def _is_elsewhere(self) -> bool:
        return os.getpid() != self._pid

    @property
    def meets_ranks(self) -> bool:
        """Whether the steps of several ranks still agree on knobs; for some steps after `close()`, too."""
        return self._consensus is not None and not self._consensus.over

    def close(self, reason: str | None = None) -> None:
        """End the tuning; the incumbent's knobs stay, and what was found is written down.

        With several ranks it ends on all of them; they get the incumbent's knobs after their next steps. `reason`: why
        it ends before the search is over, a sentence; None: the training has ended.
        """
        if self._closed or self._is_elsewhere:
            return
        self._closed = True
        try:
            if self._live is not None and not self._live.over:
                self._live.stop(reason or "")
            if self._finishing is None:
                self._end_search()  # here: a thread could not be started any more where the interpreter ends
        finally:
            self._let_go()
            self._note_best()
            self._note_left()

    def part(self) -> None:
        """Say goodbye in the middle of a step, in another thread than the training's: its knobs stay as they are."""
        if self._closed or self._is_elsewhere:
            return
        self._closed = True
        if self._finishing is not None:
            self._finishing.join(PART_S)
            return
        if self._live is not None:
            self._live.stop("", restores=False)
        self._end_search()

    def depart(self) -> None:
        """Close it at the end of the process or of its optimizer, where no step comes any more."""
        self.close()
        if self._consensus is not None and not self._is_elsewhere:
            self._consensus.close(_DEPART_S)

    def _let_go(self) -> None:
        self._close_hook.remove()
        _open.discard(self)
        if not _open:
            atexit.unregister(_close_all)
        _deafen()
        if self._consensus is None or self._consensus.over:
            self._hook.remove()
        else:
            self._consensus.leave()  # with the next steps
        self._disturbance.close()
        if self._finishing is not None:
            self._finishing.join(_JOIN_S)
        self._driver.close()

    # --- step by step ------------------------------------------------------------------------------------------------

    def _after_step(self, *_: Any) -> None:
        if self._is_elsewhere:
            return
        before = self._count.followed
        loaded = self._count.after_step()
        now_s = self._optimizer.device.clock.now()
        self._counter.step(now_s, self._count.followed - before, self._tokens, self._rate())
        self._counter.last_step = self._optimizer.steps
        if loaded and self._consensus is not None:
            self._consensus.go_on_from_saved()  # whatever has come of the tuning here: the others do
        if loaded and self.searching:
            self._go_on_from_saved()
        if self._consensus is not None:
            with self._giving_up():
                self._consensus.hear()
            self._say_back(self._consensus)
        if not self._closed:
            self._go_on()
        self._note_best()
        if self._consensus is not None:
            self._talk(self._consensus)

    def _rate(self) -> float:
        """The highest learning rate; of all groups where that of the first is another one, and now and then."""
        groups = self._optimizer.param_groups
        first = highest_rate(groups[:1])
        if first != self._first_rate or self._count.followed % _RATES_EVERY == 0:
            self._first_rate, self._highest_rate = first, highest_rate(groups)
        return self._highest_rate

    def _best_knobs(self) -> Mapping[str, Any] | None:
        """The incumbent's, once it is measured beside others; made anew where it is another one."""
        if self._live is None:
            return None
        if self._best is None or self._best[0] != self._live.incumbent:
            self._best = self._live.incumbent, self._live.incumbent.knobs()
        return self._best[1]

    def _note_best(self) -> None:
        """Have a state that is saved while a setting is tried name the one to go back to, the same on all ranks."""
        optimizer, consensus = self._optimizer, self._consensus
        if consensus.over if consensus is not None else not self.searching:
            if optimizer.kept_knobs is not None and holds(optimizer.config, optimizer.kept_knobs):
                optimizer.kept_knobs = None
            return
        best = self._best_knobs() if consensus is None else consensus.keeps  # before rank 0 tells of another one
        if best is not None and optimizer.kept_knobs is not best:  # which a change of knobs has forgotten
            optimizer.kept_knobs = best

    def _note_left(self) -> None:
        """Have the next tuner of the optimizer know that the knobs are not the script's, if the search has set them."""
        asked = self._optimizer.asked_config
        if self._live is not None and holds(asked, self._live.incumbent.knobs()):
            _left[self._optimizer] = asked, self._asked

    def _go_on_from_saved(self) -> None:
        """A saved state was loaded: what was seen before is of another course, and this one's first steps are slow."""
        for losses in (self._losses, None if self._live is None else self._live.losses):
            if losses is not None:
                losses.forget()
        if not self._driver.begun:
            self._count.begin_warm_up()
        if self._live is None:
            self._since = self._optimizer.steps
        if self._live is None and self._consensus is None:
            self.say(go_back(self._optimizer, self._on_change), logging.INFO)
        elif self._live is not None and self._consensus is None:
            self._live.go_on_from_saved()
        elif self._live is not None:
            self._give_up("Tuning ended: a saved state was loaded, and several ranks do not go on from one.")

    def _say_back(self, consensus: KnobConsensus) -> None:
        back, consensus.back = consensus.back, ""
        if consensus.is_first:
            self.say(back, logging.INFO)

    def _talk(self, consensus: KnobConsensus) -> None:
        """All ranks do, after every step, whatever has come of the tuning here: they wait for each other."""
        if self._finishing is not None:
            consensus.leave()
        if self._live is not None:
            consensus.keeps = self._best_knobs()
        consensus.say()
        if consensus.over and self._closed:
            self._hook.remove()

    def _go_on(self) -> None:
        if self._finishing is None:
            with self._giving_up():
                self._follow()
        if self._eval_fn is not None and self._probe_is_due():
            self._probe(self._eval_fn)

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        """End the tuning, not the training, where something of ours fails inside; the runtime's errors are raised."""
        try:
            yield
        except ZenFlowError:
            raise
        except Exception as error:
            _logger.exception("Tuning ended; the training goes on.")
            if self._finishing is None and not self._closed:
                self._give_up(f"Tuning ended: {type(error).__name__}: {error}.")

    def _follow(self) -> None:
        if self._consensus is not None and self._heed(self._consensus):
            return
        if self._live is not None:
            going = self._live.on_step()
            self._listen()
            if not going:
                self._over = True
                self._finish()
        elif not self._driver.begun:
            self._warm()
        elif not self._begin():
            self._watch()

    def _heed(self, consensus: KnobConsensus) -> bool:
        """Whether the other ranks have ended it."""
        if consensus.wrong:
            self._end_wrong(consensus.wrong)
        elif consensus.over:
            self._give_up(consensus.reason)
        return bool(consensus.wrong) or consensus.over

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
            self._warn_of_coverage([one.coverage for one in steps if one.coverage is not None])
            self._asked = asked_config(self._optimizer)
            config, asked = (counted(one) for one in (self._optimizer.config, self._asked))
            self._driver.prepare(WarmupStats(config, steps, self._has_loss, asked, self._count.begins_anew))

    def _warn_of_coverage(self, known: Sequence[float]) -> None:
        warning = coverage_warning(fmean(known) if known else None, asdict(self._optimizer.config), tuned=True)
        if warning is not None:
            _logger.warning("%s", warning)  # no notice: what shows a run tells of its coverage as it is then

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
            if self._driver.ready:
                self._window.ask()
            return False
        self._live = self._driver.live(
            TuningContext(
                optimizer=self._optimizer,
                tokens=self._tokens,
                since=self._since,
                disturbance=self._disturbance,
                guard=self._guard if self._has_loss else None,
                on_change=None if self._consensus is not None else self._on_change,  # which tells itself
                changes=self._consensus,
                counter=self._counter,
            )
        )
        self._tell_early_losses()
        self._listen()
        if self._live is not None and self.run_id is not None and self._driver.is_kept:
            called = self.run_id[:8]
            watch = f"its decisions: zftune explain {called} (live, with ZFTUNE_ONLINE=daemon: zftune top)"
            _logger.info("zftune tunes this training as run %s; %s", called, watch)
        return self._live is not None

    def _hear_early(self, step: int, loss: float) -> None:
        if len(self._early_losses) < _MOST_EARLY_LOSSES:
            self._early_losses.append((step, loss))

    def _tell_early_losses(self) -> None:
        """Once there is a search, to whoever keeps how the training goes."""
        losses = None if self._live is None else self._live.losses
        if losses is not None and losses.heard is not None:
            for step, loss in self._early_losses:
                losses.heard(step, loss)
        self._early_losses = []

    def _listen(self) -> None:
        for level, sentence in self._driver.said():  # a warning is of the store, and no remark to be written down there
            self.say(sentence, level, is_remark=level < logging.WARNING)

    # --- the staleness probe -----------------------------------------------------------------------------------------

    def _probe_is_due(self) -> bool:
        """Once before the search and for each incumbent, where nothing is measured and nothing older is pending."""
        if self._live is None:
            return self._probed is None and self._driver.begun and self._window.there
        setting = self._live.incumbent
        settled = setting.update_interval + setting.apply_lag
        return self._probed != setting and self._live.request is None and self._live.steady_steps > settled

    def _probe(self, eval_fn: Callable[[], float]) -> None:
        setting = self._probed = self.incumbent
        with torch.no_grad():
            before = float(eval_fn())
            self._optimizer.flush()
            after = float(eval_fn())
        self.say(
            f"Staleness probe after step {self._optimizer.steps} under {setting}: the loss is {before:.6g} before and "
            f"{after:.6g} after a flush.",
            logging.INFO,
        )

    # --- the end -----------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Say what was found, and write it down in a thread."""
        if self._finishing is None:
            # In simulated time the machine's, in which it is written down, does not count.
            self._finishing = Background(self._end_search, "zftune-finish", self._optimizer.device.clock, takes_s=0.0)

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
            remarks=tuple(self._remarks),
            count=self._counter.count,
            incumbent=None if self._live is None else self._live.incumbent,
            gain=None if self._live is None else self._live.gain,
        )
        for level, sentence in self._driver.end(ended):
            self.conclusion = self.conclusion or sentence
            _logger.log(level, "%s", sentence, extra={CONCLUDES: True})
            if level >= logging.WARNING:
                self.notices.append(sentence)

    def _give_up(self, reason: str) -> None:
        self._given_up = True
        self.say(reason)
        if self._live is not None and not self._live.over:
            self._live.stop(reason)
        self._finish()

    def say(self, sentence: str, level: int = logging.WARNING, *, is_remark: bool = True) -> None:
        """Log a sentence, and keep it for who looks at the search; "": there is nothing to be said."""
        if not sentence:
            return
        self.notices.append(sentence)
        if is_remark:
            now = self._counter.count.seconds, time.time(), self._counter.last_step
            self._remarks.append(Remark(sentence, *now))
        _logger.log(level, "%s", sentence)


def asked_config(optimizer: ZenFlowOptimizer) -> ZenFlowConfig:
    """The knobs that the script asks for, which are not those that an earlier tuner has left."""
    left, before = _left.get(optimizer, (None, None))
    asked = optimizer.asked_config
    return before if before is not None and asked == left else asked


def closed_tuner(optimizer: ZenFlowOptimizer) -> Tuner:
    """A closed tuner of an optimizer: it has the knobs, and nothing else."""
    tuner = Tuner(optimizer, NullDriver(), tokens=1, disturbance=NoDisturbance())
    tuner.close()
    return tuner


def _part_all() -> None:
    for tuner in open_tuners():
        try:
            tuner.part()
        except Exception:
            _logger.exception("The end of a tuning could not be written down.")


class Goodbye:
    """Calls `say` when a signal from outside ends this process, which then ends as before.

    A handler of the program's own stays, and ignored signals stay ignored; outside the main thread no handler can be
    set. A fork's child, such as a worker of a DataLoader, ends as it does without us.
    """

    def __init__(self, say: Callable[[], None]) -> None:
        self._say = say
        self._follows_forks = False
        self._forking = threading.local()

    def hear(self) -> None:
        """From now on."""
        if threading.current_thread() is not threading.main_thread():
            return
        if not self._follows_forks:
            self._follows_forks = True
            os.register_at_fork(
                before=self._hold, after_in_parent=self._take, after_in_child=lambda: self._take(of_child=True)
            )
        for number in _SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._end_by)

    def deafen(self) -> None:
        """No longer."""
        for number in self._heard() if threading.current_thread() is threading.main_thread() else ():
            signal.signal(number, signal.SIG_DFL)

    def _heard(self) -> list[signal.Signals]:
        return [number for number in _SIGNALS if signal.getsignal(number) == self._end_by]

    def _hold(self) -> None:
        """For the time of a fork: Python forgets a signal that comes to the child before its handlers are as before."""
        self._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS) if self._heard() else None

    def _take(self, *, of_child: bool = False) -> None:
        if of_child:
            self.deafen()
        mask = getattr(self._forking, "mask", None)
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _end_by(self, number: int, _: object) -> None:
        """Say goodbye, and end by the signal; a second one does not wait.

        In a thread of its own: what this one was interrupted in may hold the locks that it takes.
        """
        signal.signal(number, signal.SIG_DFL)
        goodbye = threading.Thread(target=self._say, name="zftune-goodbye", daemon=True)
        try:
            goodbye.start()  # not once Python is ending, from 3.12 on: the tuners part by themselves then
            goodbye.join(PART_S)
        finally:
            os.kill(os.getpid(), number)


_goodbye = Goodbye(_part_all)


def _deafen() -> None:
    """After the last tuner."""
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
