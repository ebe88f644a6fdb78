"""A run's search as its brain sees it: what is asked for, what came of it, and who thinks. Under the brain's lock."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zftune.daemon.brain import states
from zftune.daemon.brain.desk import BrainDesk
from zftune.daemon.brain.states import Going, NotAllowedError
from zftune.daemon.wire import WireError
from zftune.tuner.preparing import Prepared
from zftune.tuner.search import Search
from zftune.tuner.states import OF_INCUMBENT, Outcome, Request
from zftune.tuner.thinker import Thinker


@dataclass(frozen=True, slots=True)
class Begun:
    """A search that can begin."""

    prepared: Prepared
    paused: bool
    """Whether somebody paused it in an earlier life."""


class Thought:
    """The search at work.

    Args:
        prepared: the search, and where it is written down.
        thinker: asks Optuna.
        tokens: of a step.
    """

    def __init__(self, prepared: Prepared, thinker: Thinker, tokens: int) -> None:
        self.prepared = prepared
        self.request: Request | None = None
        """That the agent has."""
        self.decision = 0
        """Its number."""
        self.taken = 0
        """The newest decision whose outcome is written down."""
        self.start = self.search.book.trials[0].setting
        self.incumbent = self.search.book.incumbent.setting
        """As of the last answer."""
        self.halted = False
        """Whether nobody thinks any more."""
        self.over = False
        """Whether there will be nothing more to do: the agent may end the tuning. A rollback stays to be looked at."""
        self._called_off = False
        """Whether the agent was told to let go of the request."""
        self._handed = 0
        self._tokens = tokens
        self._desk = BrainDesk(prepared, thinker)

    @property
    def search(self) -> Search:
        """Read it while nobody thinks."""
        return self.prepared.search

    def advance(self, *, paused: bool) -> Going | None:
        """Go on as far as that can be without waiting.

        Args:
            paused: whether nothing is to be asked for.

        Returns:
            The state of the search; None: as before, somebody thinks.
        """
        desk = self._desk
        if self.halted or desk.busy:
            return None
        self.taken = self._handed
        answer = desk.poll()
        state = self.state()
        if answer is None:
            if self.request is None and not paused:
                desk.hand(None)
            return state
        self.incumbent = answer.incumbent
        if answer.request is None:
            self.halted = True
            self.over = not any(note.kind == "rollback" for note in self.search.notes)
        elif paused:
            reason = "the run was paused before it began"
            desk.put_away(Outcome("void", tokens=self._tokens, reason=reason, called_off=True))
        else:
            self.decision += 1
            self.request, self._called_off = answer.request, False
        return state

    @property
    def busy(self) -> bool:
        """Whether somebody thinks, or what came of that is to be heard of."""
        return not self.halted and (self._desk.busy or self.request is None)

    def state(self) -> Going:
        """Of the search, while nobody thinks."""
        notes = self.search.notes
        return states.of_search(self.search.state, notes[-1] if notes else None)

    def call_off(self) -> None:
        """The agent lets go of the request: where nothing comes of it, that is no fault of its setting."""
        self._called_off = self.request is not None

    def awaits(self, decision: int) -> bool:
        """Whether it waits for what comes of a decision."""
        return self.request is not None and decision == self.decision and not self.halted

    def take(self, outcome: Outcome, *, paused: bool) -> None:
        """What came of the request; ask `awaits` before."""
        self.request, self._handed = None, self.decision
        if outcome.status == "void" and (paused or self._called_off):
            outcome = replace(outcome, called_off=True)
        if paused:
            self._desk.put_away(outcome)
        else:
            self._desk.hand(outcome)

    def check(self, outcome: Outcome) -> None:
        """Refuse what cannot have come of the request.

        Raises:
            WireError: it cannot.
        """
        if self.request is None:
            return
        asked = (self.request.discard, self.request.steps)
        counts = (len(outcome.discarded_ms), len(outcome.steps_ms))
        whole = outcome.status != "measured" or counts == asked
        if not whole or any(count > most for count, most in zip(counts, asked, strict=True)):
            raise WireError(f"report.done.outcome is {outcome.status} with {counts} steps, allowed are {asked}")
        if any(not 0 <= one <= 1e9 for one in (*outcome.discarded_ms, *outcome.steps_ms)):
            raise WireError("report.done.outcome has a step time that is out of range, allowed are 0 to 1e9 ms")
        if outcome.tokens < 1:
            raise WireError(f"report.done.outcome.tokens is {outcome.tokens}, allowed is an integer of 1 or more")

    def withdraw(self) -> Request | None:
        """Ask for nothing any more, and think of nothing; what was asked for."""
        self.halted = True
        asked, self.request = self.request, None
        if asked is not None:
            self.decision += 1  # what still comes of it is not taken
        return asked

    # --- in threads, without the lock --------------------------------------------------------------------------------

    def end(self, asked: Request | None, *, spare: bool) -> None:
        """End the thinking; the search is the caller's then.

        Args:
            asked: what was withdrawn.
            spare: whether the training lives: what was in flight is no crash.

        Raises:
            NotAllowedError: it does not end.
        """
        self._desk.close()
        if self._desk.busy:
            raise NotAllowedError("the search is being written down and takes its time, allowed is trying again")
        answer = self._desk.poll()
        for request in (asked, None if answer is None else answer.request):
            challenges = request is not None and request.role not in OF_INCUMBENT
            if spare and challenges and request is not None and self.prepared.recorder is not None:
                self.prepared.recorder.put_away(request.trial)

    def write_down(self) -> None:
        """What was decided, where somebody keeps it; while nobody thinks.

        Raises:
            ZftuneError: it could not be written.
        """
        if self.prepared.recorder is not None:
            self.prepared.recorder.write(self.search)

    def settle(self) -> Going:
        """Take in what a command has changed."""
        self.incumbent = self.search.book.incumbent.setting
        return self.state()
