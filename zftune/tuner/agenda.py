"""What a search looks at next: what was planned, then what Optuna proposes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from zftune.store.types import TrialState
from zftune.tuner.book import Book
from zftune.tuner.propose import MOST_REJECTIONS, Proposer, propose
from zftune.tuner.settings import Setting
from zftune.tuner.states import Sampler, Trial


class Agenda:
    """Settings that are still to be tried.

    Args:
        book: what is known.
        planned: the planner's choices, best first.
        sampler: Optuna's.
        seed: of the questions.
    """

    def __init__(self, book: Book, planned: Sequence[Setting], sampler: Sampler, seed: int) -> None:
        self.propose: Proposer = propose
        """Who answers what to look at next, where nothing is planned."""
        self._book, self._sampler, self._seed = book, sampler, seed
        start = book.trials[0].setting
        self._planned = [(setting, "planner") for setting in planned if setting != start]
        self._plan: Callable[[], Sequence[Setting]] | None = None

    def suggest(self, setting: Setting, source: str) -> None:
        """Look at a setting before all others that are planned.

        Args:
            setting: any; the planner judges it before it runs.
            source: who proposes it.
        """
        if setting != self._book.trials[0].setting:
            self._planned.insert(0, (setting, source))

    def plan_again(self, plan: Callable[[], Sequence[Setting]]) -> None:
        """Ask the planner anew, once the next setting is wanted: what it planned before is out of date.

        Args:
            plan: gives its choices, best first; may take seconds.
        """
        self._planned = [(setting, source) for setting, source in self._planned if source != "planner"]
        self._plan = plan

    def repeat(self, trial: Trial) -> None:
        """Propose the setting of a trial again that its run did not come to."""
        self._book.drop(trial)
        if (trial.setting, trial.source) not in self._planned:
            self._planned.insert(0, (trial.setting, trial.source))

    def next_trial(self) -> Trial | None:
        """The next one; None: everything that is allowed was tried."""
        return self._planned_trial() or self._searched_trial()

    def _take_plan(self) -> None:
        """The first of the planner's new choices that may run; the incumbent is one that does."""
        plan, self._plan = self._plan, None
        for setting in () if plan is None else plan():
            if setting == self._book.incumbent.setting:
                return
            if not self._book.judge(setting).rejected:
                self._planned.append((setting, "planner"))
                return

    def _planned_trial(self) -> Trial | None:
        self._take_plan()
        while self._planned:
            setting, source = self._planned[0]
            known = self._book.find(setting)
            if known is not None and known.state is TrialState.PLANNED and not self._book.judge(setting).rejected:
                return known  # it was too dear before
            self._planned.pop(0)
            if known is not None:
                continue
            judged = self._book.judge(setting)
            trial = self._book.add(judged, source)
            if not judged.rejected:
                return trial
        return None

    def _searched_trial(self) -> Trial | None:
        waiting = self._book.waiting()
        if waiting is not None and not self._book.judge(waiting.setting).rejected:
            return waiting
        book = self._book
        seed = int(np.random.SeedSequence([self._seed, book.tried]).generate_state(1)[0])
        proposal = self.propose(book.space, book.told(), book.judge, sampler=self._sampler, seed=seed)
        for judged in proposal.rejected[:MOST_REJECTIONS]:
            book.add(judged, "search")
        return None if proposal.chosen is None else book.add(proposal.chosen, "search")
