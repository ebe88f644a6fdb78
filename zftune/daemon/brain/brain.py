"""One run's brain: it hears what the agent reports, says what to do, does what somebody asks for, and ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from zftune.daemon.brain import states
from zftune.daemon.brain.commands import Commanded
from zftune.daemon.brain.ending import farewell
from zftune.daemon.wire import PROTOCOL, Farewell, Goodbye, decode
from zftune.tuner.preparing import Prepared
from zftune.tuner.recorder import StoreRecorder
from zftune.tuner.states import Between

_JOIN_S = 5.0


class Brain(Commanded):
    """Follows one run from its agent's Hello to its end. What ends it waits and writes: it is called in threads."""

    _farewell = Farewell(protocol=PROTOCOL)
    _lost: str | None = None
    """Why it is being ended without goodbye, if it is: there is no way back, its agent has to say Hello again."""

    def goodbye(self, message: Goodbye) -> Farewell:
        """The agent ends: what was found is written down.

        Raises:
            NotAllowedError: that takes its time; it may be said again.
            WireError: the message is none such.
        """
        between = None if message.idle is None else decode(Between, message.idle, "goodbye.idle")
        self._hurry()
        with self._commands:
            if self.over:
                return self._farewell
            prepared = self._come_to_rest()
            found = farewell(prepared, message, between)
            with self._lock:
                self._farewell = replace(found, notices=self.notices)
                self.state = states.ended(self.state, message.reason or "the training has ended")
        return self._farewell

    def lose(self, lease_s: float) -> bool:
        """End the run where its agent was not heard of any more: what was in flight is marked crashed.

        Args:
            lease_s: seconds for which it may be silent.

        Returns:
            Whether it has ended now.

        Raises:
            NotAllowedError: that takes its time, it is to be tried again.
        """
        with self._lock:
            silent_s = self._clock() - self.heard_at_s
            if self.over or (self._lost is None and silent_s <= lease_s):
                return False
            if self._lost is None:
                self._lost = f"its agent was not heard of for {silent_s:.0f} s, allowed are {lease_s:.0f} s"
        return self._end(self._lost, lambda recorder, _: recorder.lose(), spare=False)

    def leave(self) -> None:
        """The daemon ends, and the training goes on: another daemon may take the run up.

        Raises:
            NotAllowedError: that takes its time, it is to be tried again.
        """

        def close(recorder: StoreRecorder, prepared: Prepared) -> None:
            recorder.finish(prepared.search, unfinished=True)

        self._end("the daemon has ended", close, spare=True)

    def renew(self, lease_s: float) -> None:
        """Say in the store that the run lives.

        Args:
            lease_s: for so long.

        Raises:
            ZftuneError: it could not be written.
        """
        prepared = self._prepared
        if not self.over and prepared is not None and prepared.recorder is not None:
            prepared.recorder.renew(lease_s)

    def _end(self, reason: str, close: Callable[[StoreRecorder, Prepared], None], *, spare: bool) -> bool:
        """End the run; whether it had not ended before. It is shown as ended once the store can give it to others."""
        self._hurry()
        with self._commands:
            if self.over:
                return False
            prepared = self._come_to_rest(spare=spare)
            if prepared is not None and prepared.recorder is not None:
                close(prepared.recorder, prepared)
            with self._lock:
                self.state = states.ended(self.state, reason)
        return True

    def _come_to_rest(self, *, spare: bool = True) -> Prepared | None:
        """Think and begin nothing any more; what was prepared. Under the commands' lock."""
        with self._lock:
            self._leaving = True
            thought, prepared = self._thought, self._prepared
        if thought is not None:
            self._halt(thought, spare=spare)
        if prepared is not None:
            self._write_guard(prepared)
        return prepared

    def _hurry(self) -> None:
        """Let what is under way come to its end: nobody waits for the planner any more where the search is made."""
        if self._thought is None:
            self._thinker.close()
        for one in (self._preparing, self._ending):
            if one is not None:
                one.join(_JOIN_S)
