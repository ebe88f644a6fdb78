"""The course of a search: what it has decided and what that has cost, and the ways to end it from outside."""

from __future__ import annotations

from typing import Any

from zftune.tuner.book import Book
from zftune.tuner.scores import ExplorationCost
from zftune.tuner.states import Between, Note, Opening, SearchOptions, State, Stopped


class Course:
    """What `Search` adds its thoughts to.

    Args:
        book: what is known.
        options: of the search.
    """

    def __init__(self, book: Book, options: SearchOptions) -> None:
        self.book = book
        self.state: State = Opening()
        self.notes: list[Note] = []
        self.cost = ExplorationCost(options.cost_share, options.grant_s, options.grant_steps)

    def idle(self, between: Between) -> None:
        """Count steps that belong to no measurement; `tell` does so with those before an outcome."""
        step_s = self.book.incumbent_step_ms / 1e3
        self.cost.add(between.seconds, 0, None)
        self.cost.add(between.late_s, between.late_steps, step_s or None)
        if between.late_s and step_s:
            self.cost.changed(between.late_s, between.late_steps, step_s)

    def remark(self, reason: str) -> None:
        """Write down what was found out beside the search."""
        self._note("remark", reason, None)

    def stop(self, reason: str, *, final: bool = False) -> None:
        """End the search; the incumbent stays.

        Args:
            reason: a sentence.
            final: it does not begin again where step times change.
        """
        self._note("stop", reason, self.book.incumbent.number, **({"final": 1.0} if final else {}))
        self.state = Stopped(reason, final=final)

    def roll_back(self, reason: str) -> None:
        """End the search with the incumbent before the last one; that one is barred from now on.

        Args:
            reason: a sentence.
        """
        barred = self.book.roll_back()
        self._note("rollback", reason, barred.number, pinned=float(self.book.incumbent.number))
        self.state = Stopped(reason, final=True)

    def guard(self, reason: str) -> None:
        """End the search because training goes wrong: the starting point's knobs are the incumbent again."""
        self.book.restore_start()
        self._note("guard", reason, self.book.incumbent.number)
        self.state = Stopped(reason, final=True)

    def _note(self, kind: Any, reason: str, trial: int | None, **details: float) -> None:
        figures = {name: float(f"{value:.6g}") for name, value in details.items()}
        figures["spent_s"], figures["elapsed_s"] = round(self.cost.spent_s, 3), round(self.cost.elapsed_s, 3)
        self.notes.append(Note(kind, reason, trial, figures))
