"""The runs that the daemon follows, each as long as its agent is heard of: a lease, not a process id."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from zftune.daemon import PROTOCOL, SHOWN
from zftune.daemon.protocol.messages import Directive, Farewell, Goodbye, Hello, Report, Welcome
from zftune.daemon.runs.session import Disturbance, RunSession
from zftune.daemon.runs.states import NotAllowedError
from zftune.errors import ZftuneError
from zftune.store.types import LEASE_S as STORE_LEASE_S
from zftune.tuner.setup import Prepared, prepare

if TYPE_CHECKING:
    from zftune.store.store import Store

LEASE_S = 30.0
REMOVED = "The file of a store was removed"
MOST_RUNS = 1000
MOST_ENDED = 200
"""Runs that have ended and are still shown."""
Command = Literal["pause", "resume", "rollback", "stop"]
_LOOKS_A_LEASE = 8
_LONGEST_LOOK_S = 5.0
_MOMENT_S = 3.0
"""A training's lock is free for a moment before the training has taken it: one that has just reported is not dead."""
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
        opened: opens the store at a path or URL; each is opened once, for the first run that names it.
        limits: a sentence for each limit of this process.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        opened: Callable[[str], Store],
        *,
        limits: Sequence[str] = (),
        lease_s: float = LEASE_S,
        disturbance: Callable[[Hello], Disturbance] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._opened = opened
        self._stores: dict[str, Store] = {}
        self._opening: dict[str, threading.Lock] = {}
        self._limits = tuple(limits)
        self.lease_s = lease_s
        self._disturbance, self._clock = disturbance, clock
        self._brains: dict[str, RunSession] = {}
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
        for store in self.stores:
            store.close()

    @property
    def stores(self) -> list[Store]:
        """Those of the runs so far."""
        return list(self._stores.values())

    def _store_of(self, database: str) -> Store:
        """The store that a run names; what is wrong with it is logged, and no run fails because of it."""
        with self._lock:
            opening = self._opening.setdefault(database, threading.Lock())
        with opening:  # no run waits for the store of another one
            if database not in self._stores:
                self._stores[database] = self._opened(database)
                for notice in self._stores[database].notices:
                    _logger.warning("%s", notice.rstrip("."))
            return self._stores[database]

    # --- in the event loop -------------------------------------------------------------------------------------------

    def hello(self, hello: Hello) -> Welcome:
        """Follow a run; said again, it is the same run. Raises NotAllowedError: there are too many."""
        with self._lock:
            if self._closing.is_set():
                raise NotAllowedError("the daemon is ending; say Hello to the next one")
            brain = self._brains.get(hello.run)
            if brain is None or brain.over:
                self._make_room()
                brain = self._brains[hello.run] = self._brain(hello)
        brain.touch()
        return Welcome(protocol=PROTOCOL, session=brain.session, lease_s=self.lease_s)

    def report(self, run: str, report: Report) -> Directive:
        """Hear of a run, and say what to do. Raises UnknownRunError: its agent has to say Hello first; WireError: what
        came of a request is none such.
        """
        return self._followed(run, report.session).report(report)

    def brains(self) -> list[RunSession]:
        """Those that live and the last that have ended, oldest first."""
        with self._lock:
            return list(self._brains.values())

    def shown(self) -> list[RunSession]:
        """`brains`, but of those that trained one run after the other, as after a crash, only the last."""
        brains = self.brains()
        last = {brain.record or brain.hello.run: brain for brain in brains}
        return [brain for brain in brains if last[brain.record or brain.hello.run] is brain]

    def brain(self, run: str) -> RunSession:
        """The session of a run, by its agent's name or a shortened one, as screens and the store show it. Raises
        UnknownRunError: there is none.
        """
        with self._lock:
            found = self._brains.get(run)
        if (found is None or found.over) and len(run) >= SHOWN:  # another training may have gone on with its record
            found = next((one for one in reversed(self.brains()) if (one.record or "").startswith(run)), found)
        if found is None:
            raise UnknownRunError(f"this daemon follows no run {run[:40]!r}")
        return found

    @property
    def notices(self) -> list[str]:
        """Sentences: what cannot be done for any run."""
        of_stores = [one for store in self.stores for one in store.notices]
        return [*(f"{one[0].upper()}{one[1:].rstrip('.')}." for one in of_stores), *self._lacking()]

    @property
    def live_runs(self) -> int:
        """That have not ended, by what is written down or by the lock that their training holds."""
        return sum(not (brain.over or self._has_died(brain)) for brain in self.brains())

    def silent_s(self, brain: RunSession) -> float:
        """Since a run was heard of."""
        return self._clock() - brain.heard_at_s

    # --- in threads --------------------------------------------------------------------------------------------------

    def command(self, run: str, command: Command, by: str = "by hand") -> RunSession:
        """Carry out a command; it is written down when this returns. `by` names the requester. Raises UnknownRunError:
        there is no such run; NotAllowedError: its state does not allow it; ZftuneError: it could not be written down.
        """
        brain = self.brain(run)
        {"pause": brain.pause, "resume": brain.resume, "rollback": brain.roll_back, "stop": brain.stop}[command](by)
        return brain

    def goodbye(self, run: str, message: Goodbye) -> Farewell:
        """A run ends. Raises UnknownRunError: its agent has not said Hello; NotAllowedError: that takes its time; it
        may be said again.
        """
        brain = self._brain_of(run)
        if brain.session != message.session:
            raise UnknownRunError(f"the session of run {run} is another one; say Hello again")
        farewell = brain.goodbye(message)
        if not farewell.sentence:
            raise UnknownRunError(f"run {run} was taken for dead, or left to another daemon; say Hello again")
        return farewell

    def look_after_leases(self) -> list[str]:
        """End the runs that were not heard of for too long, and renew the leases of the others; which have ended."""
        ended = self._lose()
        self._renew()
        return ended

    def _lose(self, but: Hello | None = None) -> list[str]:
        """End those that are not heard of; whose Hello is given looks itself, and cannot wait for itself."""
        ended = []
        for brain in self.brains():
            if brain.hello is but:
                continue
            try:
                if not brain.lose(self.lease_s, died=self._has_died(brain)):
                    continue
            except NotAllowedError:
                _logger.debug("Run %s is still being written down.", brain.hello.run)  # at the next look
                continue
            except Exception:
                _logger.exception("It is not known whether run %s still trains.", brain.hello.run)  # the others are
                continue
            _logger.warning("Run %s has ended without goodbye.", brain.hello.run)
            ended.append(brain.hello.run)
        return ended

    def _has_died(self, brain: RunSession) -> bool:
        """Whether its process is known to have ended, by the lock that it held."""
        if brain.over or brain.record is None or brain.store is None or self.silent_s(brain) < _MOMENT_S:
            return False
        return brain.store.has_died(brain.record)

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

    def _lacking(self) -> list[str]:
        removed = (store.path for store in self.stores if not store.is_there)
        return [*(f"{REMOVED} ('{path}'): its runs are lost when the daemon ends." for path in removed), *self._limits]

    def _brain_of(self, agent: str) -> RunSession:
        with self._lock:
            found = self._brains.get(agent)
        if found is None:
            raise UnknownRunError(f"this daemon follows no run {agent[:40]!r}")
        return found

    def _followed(self, run: str, session: str) -> RunSession:
        brain = self._brain_of(run)
        if brain.session != session or (brain.over and not brain.failed):
            raise UnknownRunError(f"the session of run {run} is over; say Hello again")
        return brain

    def _make_room(self) -> None:
        ended = [run for run, brain in self._brains.items() if brain.over]
        if len(self._brains) - len(ended) >= MOST_RUNS:
            raise NotAllowedError(f"this daemon already follows its maximum of {MOST_RUNS} runs")
        for run in ended[: max(0, len(ended) - MOST_ENDED)]:
            del self._brains[run]

    def _brain(self, hello: Hello) -> RunSession:
        notices = self._lacking()  # a recording has the store's own
        return RunSession(
            hello,
            secrets.token_hex(16),
            lambda: self._begin(hello),
            notices=notices,
            clock=self._clock,
            disturbance=(lambda: None) if self._disturbance is None else self._disturbance(hello),
        )

    def _begin(self, hello: Hello) -> Prepared | None:
        """Make a search that goes on as long as its training; None: its run ended while others were waited for."""
        facts = hello.training
        options = replace(facts.wishes.search, hold=True, watch=True)
        facts = replace(facts, wishes=replace(facts.wishes, search=options))
        # A daemon may have ended before the agent heard what its run is called: it is called as the agent is.
        run_id = hello.run if hello.again is None else hello.again.record
        store = self._store_of(hello.database)
        self._outwait(store, run_id)
        self._outwait_killed()
        self._lose(hello)  # a training that was killed and started again goes on with its search
        with self._lock:
            brain = self._brains.get(hello.run)
        if brain is None or brain.hello is not hello or brain.leaves:
            return None
        brain.store = store
        prepared = prepare(facts, store, run_id)
        return replace(prepared, paused=_was_paused(prepared))

    def _outwait(self, store: Store, record: str) -> None:
        """Wait for the end of a lease that the daemon before this one left, where no lock tells that it has ended."""
        ends_s = time.monotonic() + _LEASES * STORE_LEASE_S
        try:
            while time.monotonic() < ends_s:
                left_s = store.lease_left_s(record)
                if not left_s or self._closing.wait(min(left_s, _LONGEST_LOOK_S)):
                    return
        except ZftuneError as error:
            _logger.warning("It is not known whether run %s can be gone on with: %s.", record, error)

    def _outwait_killed(self) -> None:
        """Wait until trainings count as dead that may just be beginning: this one may be the next life of one."""
        for brain in self.brains():
            if brain.over or brain.record is None or brain.store is None or not brain.store.has_died(brain.record):
                continue
            if self._closing.wait(max(0.0, _MOMENT_S - self.silent_s(brain))):
                return


def _was_paused(prepared: Prepared) -> bool:
    commands = ("pause", "unpause", "rollback", "stop")
    kinds = [one.kind for one in prepared.search.notes if one.kind in commands]
    return bool(kinds) and kinds[-1] == "pause"
