"""A run's search as its session sees it, beside the worker that has a thread of its own."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from zftune.daemon.protocol.codec import WireError
from zftune.daemon.runs import states
from zftune.daemon.runs.states import Going, NotAllowedError
from zftune.errors import ZftuneError
from zftune.tuner.search import Search
from zftune.tuner.setup import Prepared
from zftune.tuner.states import Outcome, Request
from zftune.tuner.worker import ThreadWorker


class SearchHandle:
    """The search at work."""

    def __init__(self, prepared: Prepared, tokens: int) -> None:
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
        self.gain = self.search.book.gain
        """Of it over the start, or over what had to take its place; None: it is one of these."""
        self.halted = False
        """Whether nobody thinks any more."""
        self.over = False
        """Whether there will be nothing more to do: the agent may end the tuning. A rollback stays to be looked at."""
        self._withdrawn: Request | None = None
        """What was asked for, until the thinking has ended."""
        self._called_off = False
        """Whether the agent was told to let go of the request."""
        self._handed = 0
        self._tokens = tokens
        keep = None if prepared.recording is None else prepared.recording.keep_preset
        self._worker = ThreadWorker(prepared.search, prepared.recorder, keep=keep)

    @property
    def search(self) -> Search:
        """Read it while nobody thinks."""
        return self.prepared.search

    def advance(self, *, paused: bool) -> Going | None:
        """Continue as far as possible without waiting; `paused`: request nothing. Returns the state of the search;
        None: as before, while somebody thinks.
        """
        worker = self._worker
        if self.halted:
            return None
        if worker.busy:
            return None
        self.taken = self._handed
        answer = worker.poll()
        state = self.state()
        if answer is None:
            if self.request is None and not paused:
                worker.hand(None)
            return state
        self.incumbent, self.gain = answer.incumbent, answer.gain
        if answer.request is None:
            self.halted = True
            self.over = not any(note.kind == "rollback" for note in self.search.notes)
        elif paused:
            reason = "the run was paused before it began"
            worker.hand(Outcome("void", tokens=self._tokens, reason=reason, called_off=True), ask=False)
        else:
            self.decision += 1
            self.request, self._called_off = answer.request, False
        return state

    @property
    def busy(self) -> bool:
        """Whether somebody thinks, or what came of that is to be heard of."""
        return not self.halted and (self._worker.busy or self.request is None)

    def state(self) -> Going:
        """Of the search, while nobody thinks."""
        return states.of_search(self.search.state, self.search.notes)

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
        self._worker.hand(outcome, ask=not paused)

    def check(self, outcome: Outcome) -> None:
        """Refuse what cannot have come of the request. Raises WireError: it cannot."""
        if self.request is None:
            return
        asked = (self.request.discard, self.request.steps)
        counts = (len(outcome.discarded_ms), len(outcome.steps_ms))
        whole = outcome.status != "measured" or (counts[0] == asked[0] and counts[1] > 0)
        if not whole or any(count > most for count, most in zip(counts, asked, strict=True)):
            raise WireError(f"report.done.outcome is {outcome.status} with {counts} steps; asked for were {asked}")
        if any(not 0 <= one <= 1e9 for one in (*outcome.discarded_ms, *outcome.steps_ms)):
            raise WireError("report.done.outcome has a step time that is not from 0 to 1e9 ms")
        if outcome.tokens < 1:
            raise WireError(f"report.done.outcome.tokens is {outcome.tokens}; it must be an integer of 1 or more")

    def withdraw(self) -> None:
        """Ask for nothing any more, and think of nothing."""
        self.halted = True
        if self.request is not None:
            self._withdrawn, self.request = self.request, None
            self.decision += 1  # what still comes of it is not taken

    # --- in threads, without the lock --------------------------------------------------------------------------------

    def end(self, *, spare: bool) -> None:
        """End the thinking, once open requests are withdrawn; the search is the caller's then.

        `spare`: the training lives, so that what was in flight is no crash. Raises NotAllowedError: it does not end.
        """
        self._worker.close()
        if self._worker.busy:
            raise NotAllowedError("the search is still being written down; try again in some seconds")
        self._worker.poll()
        if spare and self.prepared.recorder is not None:
            with suppress(ZftuneError):  # its end writes it down
                self.prepared.recorder.write(self.search)  # what was in flight is not any more
        self._withdrawn = None

    def nothing_to_roll_back(self) -> str:
        """Why there is nothing that was adopted; without a full stop."""
        if any(note.kind == "guard" for note in self.search.notes):
            return "training went wrong, so that the settings that it began with are back"
        if any(note.kind == "rollback" for note in self.search.notes):
            return "it was rolled back already, and nothing else that was adopted is left"
        if any(note.kind in ("memory", "movement") for note in self.search.notes):
            return "what was adopted had to be, for GPU memory or the quality, and the search began again from there"
        return "nothing was adopted in this run"

    def settle(self) -> Going:
        """Take in what a command has changed."""
        self.incumbent, self.gain = self.search.book.incumbent.setting, self.search.book.gain
        return self.state()
