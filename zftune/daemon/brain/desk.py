"""The desk of a brain: the tuner's, which moreover keeps presets as soon as they are proven."""

from __future__ import annotations

from zftune.daemon.brain.thinkers import Borrowed
from zftune.daemon.brain.turns import Turns
from zftune.tuner.preparing import Prepared
from zftune.tuner.states import OF_INCUMBENT, Outcome
from zftune.tuner.thinker import Thinker
from zftune.tuner.thinking import ThreadDesk


class BrainDesk(ThreadDesk):
    """Thinks about a run's search in a thread of its own.

    Args:
        prepared: the search, and where it is written down.
        thinker: asks Optuna.
    """

    def __init__(self, prepared: Prepared, thinker: Thinker) -> None:
        super().__init__(prepared.search, prepared.recorder, thinker)
        self._prepared = prepared
        self._turns = thinker.turns if isinstance(thinker, Borrowed) else Turns()

    def _work(self, outcome: Outcome | None, ask: bool) -> None:
        with self._turns.working():
            super()._work(outcome, ask)

    def _take(self, outcome: Outcome) -> None:
        adopted = len(self._search.book.adoptions)
        super()._take(outcome)
        recording = self._prepared.recording
        if recording is not None and len(self._search.book.adoptions) > adopted:
            recording.keep_preset(self._search)  # confirmed: a daemon may be killed before the run ends

    def _put_away(self, outcome: Outcome) -> None:
        asked = self._asked
        super()._put_away(outcome)
        if asked is not None and asked.role not in OF_INCUMBENT and self._prepared.recorder is not None:
            self._prepared.recorder.put_away(asked.trial)
