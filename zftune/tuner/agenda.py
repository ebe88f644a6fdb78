"""What a search looks at next: what was planned, then what Optuna proposes."""

from __future__ import annotations

from collections.abc import Sequence

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

    def suggest(self, setting: Setting, source: str) -> None:
        """Look at a setting before all others that are planned.

        Args:
            setting: any; the planner judges it before it runs.
            source: who proposes it.
        """
        if setting != self._book.trials[0].setting:
            self._planned.insert(0, (setting, source))

    def repeat(self, trial: Trial) -> None:
        """Propose the setting of a trial again that its run did not come to."""
        self._book.drop(trial)
        if (trial.setting, trial.source) not in self._planned:
            self._planned.insert(0, (trial.setting, trial.source))

    def next_trial(self) -> Trial | None:
        """The next one; None: everything that is allowed was tried."""
        return self._planned_trial() or self._searched_trial()

    def _planned_trial(self) -> Trial | None:
        while self._planned:
            setting, source = self._planned[0]
            known = self._book.find(setting)
            if known is not None and known.state is TrialState.PLANNED:
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
        if waiting is not None:
            return waiting
        book = self._book
        seed = int(np.random.SeedSequence([self._seed, book.tried]).generate_state(1)[0])
        proposal = self.propose(book.space, book.told(), book.judge, sampler=self._sampler, seed=seed)
        for judged in proposal.rejected[:MOST_REJECTIONS]:
            book.add(judged, "search")
        return None if proposal.chosen is None else book.add(proposal.chosen, "search")
