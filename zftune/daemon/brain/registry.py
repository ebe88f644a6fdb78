"""The runs that the daemon follows, each as long as its agent is heard of: a lease, not a process id."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from zftune.daemon.brain.brain import Brain
from zftune.daemon.brain.listener import Disturbance
from zftune.daemon.brain.states import NotAllowedError
from zftune.daemon.brain.thinkers import Thinkers
from zftune.daemon.brain.thought import Begun
from zftune.daemon.wire import PROTOCOL, Directive, Farewell, Goodbye, Hello, Report, Welcome, decode
from zftune.errors import ZftuneError
from zftune.store.runs import LEASE_S as STORE_LEASE_S
from zftune.tuner.beginning import Again
from zftune.tuner.facts import TrainingFacts
from zftune.tuner.preparing import Prepared, prepare
from zftune.tuner.thinker import Thinker, gentle_share

if TYPE_CHECKING:
    from zftune.store.store import Store

LEASE_S = 30.0
MOST_RUNS = 1000
MOST_ENDED = 200
"""Runs that have ended and are still shown."""
Command = Literal["pause", "resume", "rollback", "stop"]
_LOOKS_A_LEASE = 8
_LONGEST_LOOK_S = 5.0
_BETWEEN_S = 0.05
"""Two renewals of leases: all at once they would keep agents waiting, 0.4 s for 200 runs."""
_JOIN_S = 5.0
_LEASES = 2
"""To wait for at most: a run that is renewed again and again is another daemon's."""
_logger = logging.getLogger("zftune.daemon")


class UnknownRunError(ZftuneError):
    """A run that the daemon does not follow, or not any more: its agent has to say Hello."""


class Registry:
    """Keeps a brain for each run. `hello`, `report` and the readers never wait; the other methods may.

    Args:
        store: open; None: nothing is remembered.
        lease_s: without a report for so long a run counts as ended.
        thinkers: processes that think.
        disturbance: says that measurements of a run do not count, such as a sampler of its GPU.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        store: Store | None,
        *,
        lease_s: float = LEASE_S,
        thinkers: Thinkers | None = None,
        disturbance: Callable[[Hello], Disturbance] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self.lease_s = lease_s
        self._thinkers = thinkers or Thinkers(share=gentle_share())
        self._disturbance, self._clock = disturbance, clock
        self._brains: dict[str, Brain] = {}
        self._lock = threading.Lock()
        self._renewed_at_s = clock()
        self._closing = threading.Event()
        self._leases: threading.Thread | None = None

    def start(self) -> None:
        """Look after the leases, in a thread."""
        self._leases = threading.Thread(target=self._look_after, name="zftune-leases", daemon=True)
        self._leases.start()

    def close(self) -> None:
        """Leave every run as it is: other daemons may take them up. Takes some seconds at most."""
        self._closing.set()
        if self._leases is not None:
            self._leases.join(_JOIN_S)
        for brain in self.brains():
            try:
                brain.leave()
            except Exception:
                _logger.exception("Run %s could not be left as it should be.", brain.hello.run)
        self._thinkers.close()

    # --- in the event loop -------------------------------------------------------------------------------------------

    def hello(self, hello: Hello) -> Welcome:
        """Follow a run; said again, it is the same run.

        Raises:
            WireError: it is not a training that can be followed.
            NotAllowedError: there are too many.
        """
        facts = decode(TrainingFacts, hello.training, "hello.training")
        with self._lock:
            if self._closing.is_set():
                raise NotAllowedError("the daemon is ending, allowed is saying Hello to the next one")
            brain = self._brains.get(hello.run)
            if brain is None or brain.over:
                self._make_room()
                brain = self._brains[hello.run] = self._brain(hello, facts)
        brain.touch()
        return Welcome(protocol=PROTOCOL, session=brain.session, lease_s=self.lease_s)

    def report(self, run: str, report: Report) -> Directive:
        """Hear of a run, and say what to do.

        Raises:
            UnknownRunError: its agent has to say Hello first.
            WireError: what came of a request is none such.
        """
        return self._followed(run, report.session).report(report)

    def answer(self, run: str, report: Report) -> bytes:
        """What `report` says, as JSON.

        Raises:
            UnknownRunError: its agent has to say Hello first.
            WireError: what came of a request is none such.
        """
        return self._followed(run, report.session).answer(report)

    def brains(self) -> list[Brain]:
        """Those that live and the last that have ended, oldest first."""
        with self._lock:
            return list(self._brains.values())

    def brain(self, run: str) -> Brain:
        """Of a run.

        Raises:
            UnknownRunError: there is none.
        """
        with self._lock:
            found = self._brains.get(run)
        if found is None:
            raise UnknownRunError(f"run is {run[:40]!r}, allowed is one that this daemon follows")
        return found

    @property
    def live_runs(self) -> int:
        """That have not ended."""
        return sum(not brain.over for brain in self.brains())

    def silent_s(self, brain: Brain) -> float:
        """Since a run was heard of."""
        return self._clock() - brain.heard_at_s

    # --- in threads --------------------------------------------------------------------------------------------------

    def command(self, run: str, command: Command, by: str = "by hand") -> Brain:
        """Do what somebody asks for; it is written down when this returns.

        Args:
            run: which.
            command: what.
            by: who asks for it, in words.

        Raises:
            UnknownRunError: there is no such run.
            NotAllowedError: its state does not allow it.
            ZftuneError: it could not be written down.
        """
        brain = self.brain(run)
        {"pause": brain.pause, "resume": brain.resume, "rollback": brain.roll_back, "stop": brain.stop}[command](by)
        return brain

    def goodbye(self, run: str, message: Goodbye) -> Farewell:
        """A run ends.

        Raises:
            UnknownRunError: its agent has not said Hello.
            NotAllowedError: that takes its time; it may be said again.
        """
        brain = self.brain(run)
        if brain.session != message.session:
            raise UnknownRunError(f"session of run {run} is another one, allowed is saying Hello again")
        return brain.goodbye(message)

    def look_after_leases(self) -> list[str]:
        """End the runs that were not heard of for too long; which."""
        ended = []
        for brain in self.brains():
            try:
                if not brain.lose(self.lease_s):
                    continue
            except NotAllowedError:
                _logger.debug("Run %s is still being written down.", brain.hello.run)  # at the next look
                continue
            _logger.warning("Run %s has ended without goodbye.", brain.hello.run)
            ended.append(brain.hello.run)
        self._renew()
        return ended

    def _renew(self) -> None:
        if self._clock() - self._renewed_at_s < STORE_LEASE_S / 4:
            return
        self._renewed_at_s = self._clock()
        for brain in self.brains():
            if brain.over:
                continue
            if self._closing.wait(_BETWEEN_S):
                return
            try:
                brain.renew(STORE_LEASE_S)
            except ZftuneError as error:
                _logger.warning("The lease of run %s could not be renewed: %s.", brain.hello.run, error)

    def _look_after(self) -> None:
        while not self._closing.wait(min(self.lease_s / _LOOKS_A_LEASE, _LONGEST_LOOK_S)):
            try:
                self.look_after_leases()
            except Exception:
                _logger.exception("The leases could not be looked after.")

    # --- brains ------------------------------------------------------------------------------------------------------

    def _followed(self, run: str, session: str) -> Brain:
        brain = self.brain(run)
        if brain.session != session or (brain.over and not brain.failed):
            raise UnknownRunError(f"session of run {run} is over, allowed is saying Hello again")
        return brain

    def _make_room(self) -> None:
        ended = [run for run, brain in self._brains.items() if brain.over]
        if len(self._brains) - len(ended) >= MOST_RUNS:
            raise NotAllowedError(f"the daemon follows {MOST_RUNS} runs, allowed are not more")
        for run in ended[: max(0, len(ended) - MOST_ENDED)]:
            del self._brains[run]

    def _brain(self, hello: Hello, facts: TrainingFacts) -> Brain:
        notices: list[str] = []
        thinker = self._thinkers.lend()
        return Brain(
            hello,
            secrets.token_hex(16),
            lambda: self._begin(hello, facts, thinker, notices),
            thinker=thinker,
            notices=notices,
            clock=self._clock,
            disturbance=(lambda: None) if self._disturbance is None else self._disturbance(hello),
        )

    def _begin(self, hello: Hello, facts: TrainingFacts, thinker: Thinker, notices: list[str]) -> Begun:
        """Make a search that goes on watching when it has stopped."""
        options = replace(facts.wishes.search, hold=True, watch=True)
        facts = replace(facts, wishes=replace(facts.wishes, search=options))
        again = None if hello.again is None else Again(hello.again.record)
        if again is not None:
            self._outwait(again.run_id)
        with self._thinkers.turns.working():
            prepared = prepare(facts, self.store, thinker, notices, again)
        return Begun(prepared, paused=self._was_paused(prepared))

    def _outwait(self, record: str) -> None:
        """Wait for the end of a lease that the daemon before this one left, where no lock tells that it has ended."""
        ends_s = time.monotonic() + _LEASES * STORE_LEASE_S
        try:
            while self.store is not None and time.monotonic() < ends_s:
                left_s = self.store.lease_left_s(record)
                if not left_s or self._closing.wait(min(left_s, _LONGEST_LOOK_S)):
                    return
        except ZftuneError as error:
            _logger.warning("It is not known whether run %s can be gone on with: %s.", record, error)

    def _was_paused(self, prepared: Prepared) -> bool:
        if self.store is None or prepared.recorder is None:
            return False
        commands = ("pause", "unpause", "rollback", "stop")
        kinds = [one.kind for one in self.store.decisions(prepared.recorder.run_id) if one.kind in commands]
        return bool(kinds) and kinds[-1] == "pause"
