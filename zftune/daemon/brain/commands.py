"""What somebody asks of a run. Whoever asks waits: what a command has changed is written down when it returns."""

from __future__ import annotations

from zftune.daemon.brain import states
from zftune.daemon.brain.listener import Listener
from zftune.daemon.brain.states import NotAllowedError
from zftune.daemon.brain.thought import Thought
from zftune.tuner.states import Stopped

_PREPARING_S = 4.0
"""That a command waits for the search to be made; its client waits for little longer."""


class Commanded(Listener):
    """Follows one run, and does with it what somebody asks for. Its methods are called in threads."""

    def pause(self, by: str) -> None:
        """Let the incumbent run undisturbed; it is written down when this returns.

        Args:
            by: who asks for it, in words.

        Raises:
            NotAllowedError: the state does not allow it, or the search is still being made.
            ZftuneError: it could not be written down: nothing has changed.
        """
        self._wait_for_search()
        with self._commands:
            if states.paused(self.state) == self.state:
                return
            self._write_command("pause", f"Paused {by}: the incumbent's knobs stay.")
            with self._lock:
                self.state = states.paused(self.state)

    def resume(self, by: str) -> None:
        """Go on after a pause.

        Raises:
            NotAllowedError: it is not paused.
            ZftuneError: it could not be written down: nothing has changed.
        """
        with self._commands:
            states.resumed(self.state)
            self._write_command("unpause", f"Resumed {by}.")
            with self._lock:
                self.state = states.resumed(self.state)
                self._advance()

    def roll_back(self, by: str) -> None:
        """Pin the setting before the last adoption, and bar the one that was adopted.

        Raises:
            NotAllowedError: nothing was adopted, or the state does not allow it.
            ZftuneError: it could not be written down.
        """
        with self._commands:
            thought = self._begun("rolling back")
            if not thought.search.book.adoptions:
                raise NotAllowedError("nothing was adopted in this run, allowed is rolling back what was")
            self._halt(thought)
            barred = thought.search.book.incumbent.setting
            thought.search.roll_back(f"Rolled back {by}: {barred} is not tried again, the setting before it stays.")
            self._settle(thought)
            if thought.prepared.recording is not None:
                thought.prepared.recording.withdraw_preset(barred)

    def stop(self, by: str) -> None:
        """End the tuning; the incumbent's knobs stay.

        Raises:
            NotAllowedError: the state does not allow it.
            ZftuneError: it could not be written down.
        """
        with self._commands:
            thought = self._begun("stopping")
            self._halt(thought)
            state = thought.search.state
            if not (isinstance(state, Stopped) and state.final):
                thought.search.stop(f"Stopped {by}.", final=True)
            self._stopped = True
            self._settle(thought)

    def _wait_for_search(self) -> None:
        """Until there is something to write a command down in."""
        self._preparing.join(_PREPARING_S)
        if not self._preparing.done:
            raise NotAllowedError("the search is still being prepared, allowed is trying again in some seconds")
        with self._lock:
            if self._prepared is None:
                self._look_for_failure()

    def _begun(self, doing: str) -> Thought:
        if self._thought is None or self.over:
            raise NotAllowedError(f"the run is {self.state.name}, allowed is {doing} one whose search has begun")
        return self._thought

    def _halt(self, thought: Thought, *, spare: bool = True) -> None:
        with self._lock:
            asked = thought.withdraw()
        thought.end(asked, spare=spare)

    def _settle(self, thought: Thought) -> None:
        with self._lock:
            self.state = thought.settle()
        thought.write_down()

    def _write_command(self, kind: str, reason: str) -> None:
        recorder = None if self._prepared is None else self._prepared.recorder
        if recorder is not None:
            recorder.command(kind, reason)
