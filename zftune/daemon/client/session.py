"""The thread that talks to the daemon. Whatever happens to the daemon, it goes on trying, ever more slowly."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import random
import secrets
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from zenflow.clock import REAL_CLOCK, Clock
from zftune.background import taking_time
from zftune.daemon import PROTOCOL, SHOWN
from zftune.daemon.client.worker import RemoteWorker
from zftune.daemon.protocol.codec import WireError, decode, encode
from zftune.daemon.protocol.messages import Directive, Farewell, Goodbye, Hello, Reattach, Welcome, masked
from zftune.errors import DaemonError, NoDaemonError, StrangerError, ZftuneError
from zftune.store.account import Pulse
from zftune.store.location import meant_by
from zftune.store.locks import RunLocks
from zftune.tuner.setup import TrainingFacts
from zftune.tuner.states import OF_INCUMBENT

QUICK_S = 0.2
"""Between two reports while the training waits for an answer, at least: see `waiting_s`."""
SLOW_S = 1.0
"""Between two reports while it measures, at most; a lease has more of them."""
_WAITED_SHARE = 0.2
_REPORTS_A_LEASE = 4
_FIRST_BACKOFF_S = 0.2
_LONGEST_BACKOFF_S = 20.0
_REQUEST_S = 3.0
GOODBYE_S = 60.0
"""For the daemon to end what it thinks about, and to write down what was found, on a busy machine."""
_SILENCE_S = 15.0
"""Without any answer for so long, nobody is there as it seems: a daemon that is at work says so within seconds."""
_AGAIN_S = 0.1
_LOOK_S = 0.005
_FORGOTTEN = (404, 410)
_BUSY = 409
_THROWN_AWAY = "The training was thrown away before the search was over."
_WAITS = f"The daemon is slow: zftune waits up to {GOODBYE_S:.0f} s for it to write down what was found."
_logger = logging.getLogger("zftune")


class Transport(Protocol):
    """What asks the daemon, such as `zftune.daemon.client.http.DaemonClient`. For one thread at a time."""

    def post(self, route: str, document: Any = None, *, timeout_s: float | None = None) -> Any:
        """What a route answers to a document of JSON; raises DaemonError."""

    def close(self) -> None:
        """Close the connection."""


def waiting_s(waited_s: float) -> float:
    """Time between two reports of a training that has waited `waited_s`, s: an answer may come a fifth of it later."""
    return min(SLOW_S, max(QUICK_S, _WAITED_SHARE * waited_s))


_couriers: weakref.WeakSet[DaemonSession] = weakref.WeakSet()
"""That were started."""


def _leave_all() -> None:
    """Before the process ends: who is not heard of any more has crashed, as it seems."""
    ends_s = time.monotonic() + GOODBYE_S
    with contextlib.suppress(KeyboardInterrupt):  # who ends the process once more waits for nobody
        for daemon_session in list(_couriers):
            daemon_session.leave(ends_s - time.monotonic())


@functools.cache
def _leave_at_exit() -> None:
    atexit.register(_leave_all)


class DaemonSession:
    """Carries reports to the daemon and directives back, in the process that made it: a fork's child says nothing.

    Args:
        read: what the daemon has to know of the training; called once, in the thread.
        gpu_uuid: None: it trains on no GPU.
        clock: of the training. Where that is simulated, time stands still while the daemon thinks, and then moves on.
        thinking_s: by so much; None: as long as it really took.
        patience_s: that a daemon may be away before it is told: somebody starts one meanwhile.
    """

    def __init__(
        self,
        transport: Transport,
        worker: RemoteWorker,
        read: Callable[[], TrainingFacts],
        *,
        tokens: int,
        gpu_uuid: str | None = None,
        clock: Clock = REAL_CLOCK,
        thinking_s: float | None = None,
        patience_s: float = 0.0,
    ) -> None:
        self.run = secrets.token_hex(16)
        self.notices: list[str] = []
        """Sentences of the daemon, each once, and why it cannot be asked."""
        self._transport, self._worker = transport, worker
        self._read: Callable[[], TrainingFacts] | None = read
        self._tokens, self._gpu_uuid = tokens, gpu_uuid
        self._clock, self._thinking_s = clock, thinking_s
        self._obeyed: tuple[str, int] = "hold", 0
        """Kind and number of the newest directive."""
        self._training: TrainingFacts | None = None
        self._session: str | None = None
        self._last_session: str | None = None
        self._record: str | None = None
        self._database: str | None = None
        self._lease_s = SLOW_S * _REPORTS_A_LEASE
        self._may_be_followed = False
        """Whether Hello was said and nobody has answered: the daemon may have heard it all the same."""
        self._failures, self._patience_s = 0, patience_s
        self._failing_since_s = 0.0
        self._waits_since_s: float | None = None
        """Since when the training waits for an answer, by its clock; None: it does not."""
        self._pulse: Pulse | None = None
        self._abandoned = False
        self._began_unix_s = time.time()
        self._pid = os.getpid()
        self._thread = clock.thread(self._run, "zftune-agent")

    @property
    def record(self) -> str | None:
        """Its run in the store; None: it is not known that anything was written down."""
        return self._record

    @property
    def met(self) -> bool:
        """Whether a daemon has ever answered."""
        return self._last_session is not None

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()
        _couriers.add(self)
        _leave_at_exit()

    def abandon(self) -> None:
        """The training was thrown away: the thread says goodbye by itself. Takes no lock: a finalizer calls it."""
        self._abandoned = True

    def leave(self, most_s: float) -> None:
        """Let an abandoned session say goodbye now; waits `most_s` at most."""
        if self._abandoned and os.getpid() == self._pid:
            self._worker.wake.set()
            self._join(most_s)

    def goodbye(self, message: Callable[[str], Goodbye]) -> Farewell | None:
        """End it, waiting for a slow daemon. Returns the daemon's last words, None if it is gone."""
        if os.getpid() != self._pid:
            return None
        ends_s = time.monotonic() + GOODBYE_S
        self._worker.close()
        try:
            if not self._join(GOODBYE_S):
                return None
        except KeyboardInterrupt:
            self._beat(None)  # what ran has not crashed
            raise
        return self._part(message, ends_s, waits=True)

    def _join(self, most_s: float) -> bool:
        """Wait for the thread, which may be asking the daemon; whether it has ended."""
        self._thread.join(max(0.0, min(_REQUEST_S, most_s)))
        if self._thread.is_alive() and most_s > _REQUEST_S:
            _logger.warning(_WAITS)
            self._thread.join(most_s - _REQUEST_S)
        return not self._thread.is_alive()

    def _part(self, message: Callable[[str], Goodbye], ends_s: float, *, waits: bool) -> Farewell | None:
        """Say what was not said yet, and goodbye, again and again while somebody is there who may hear it."""
        silent_since_s, within_s = time.monotonic(), _REQUEST_S
        try:
            while True:
                try:
                    return self._say_goodbye(message, within_s)
                except ZftuneError as error:
                    _logger.debug("The daemon was not told goodbye: %s.", error)
                    forgotten, is_silent = self._forget(error), self._is_away(error)
                    if isinstance(error, DaemonError) and error.status == _BUSY:
                        silent_since_s = time.monotonic()
                    elif isinstance(error, NoDaemonError) or not (forgotten or is_silent):
                        return None
                within_s = min(silent_since_s + _SILENCE_S, ends_s) - time.monotonic()
                if within_s < _AGAIN_S:
                    return None
                if waits and not forgotten:
                    waits = False
                    _logger.warning(_WAITS)
                time.sleep(_AGAIN_S)
        finally:
            self._beat(None)  # where nobody was told, this is what is known
            self._transport.close()

    def _say_goodbye(self, message: Callable[[str], Goodbye], within_s: float) -> Farewell | None:
        """Where the last report is not taken, goodbye is said all the same; None: nobody knows of the run."""
        try:
            if self._session is not None:
                self._report()
        except NoDaemonError:
            raise
        except (DaemonError, WireError) as error:
            self._forget(error)
            _logger.debug("The daemon was not told the last steps: %s.", error)
        if self._session is None and (self._record is not None or self._may_be_followed):
            try:
                self._hello()  # to a daemon that was started again: else the run would count as crashed
            except DaemonError as error:
                if error.status is None:
                    raise
                _logger.debug("The daemon does not follow the run: %s.", error)
                return None
            self._report()
        if self._session is None:
            return None
        answer = self._post(f"/v1/runs/{self.run}/goodbye", message(self._session), timeout_s=within_s)
        farewell = decode(Farewell, answer, "farewell")
        if self._pulse is not None:
            self._pulse.close(remove=True)
        self._pulse = None
        return farewell

    def _part_alone(self) -> None:
        """Nobody waits for the last words."""

        def message(session: str) -> Goodbye:
            return Goodbye(protocol=PROTOCOL, session=session, steps=self._worker.steps, begins=0, reason=_THROWN_AWAY)

        self._part(message, time.monotonic() + max(self._lease_s, GOODBYE_S), waits=False)

    # --- in the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._worker.closing.is_set():
                if self._abandoned:
                    self._part_alone()
                    return
                self._worker.wake.clear()
                pause_s = self._exchange()
                self._wait(pause_s)
        except Exception as error:
            _logger.exception("The daemon is no longer used; the training goes on.")
            self._worker.fail(error)

    def _wait(self, pause_s: float) -> None:
        """Until the next message; what was counted is written down meanwhile, however long nobody answers."""
        while pause_s > 0 and not (self._worker.closing.is_set() or self._worker.wake.is_set()):
            self._worker.wake.wait(min(pause_s, SLOW_S))
            self._beat(self._worker.tries)
            pause_s -= SLOW_S

    def _exchange(self) -> float:
        """One message; how long to wait before the next."""
        try:
            if self._session is None:
                self._hello()
            if not self._worker.closing.is_set():
                self._report()
        except (DaemonError, WireError) as error:
            return self._failed(error)
        self._failures = 0
        return min(self._pause_s(), self._lease_s / _REPORTS_A_LEASE)

    def _pause_s(self) -> float:
        if not self._worker.waits:
            self._waits_since_s = None
            return SLOW_S
        now_s = self._clock.now()
        if self._waits_since_s is None:
            self._waits_since_s = now_s
        return waiting_s(now_s - self._waits_since_s)

    def _hello(self) -> None:
        if self._training is None:
            assert self._read is not None
            self._training = self._read()
            self._read = None  # it holds the model, which may be thrown away before this thread ends
        again = None if self._record is None else Reattach(record=self._record, trial=self._worker.trial)
        hello = Hello(
            protocol=PROTOCOL,
            run=self.run,
            training=self._training,
            pid=os.getpid(),
            began_unix_s=self._began_unix_s,
            tokens=self._tokens,
            argv=masked(sys.argv),
            gpu_uuid=self._gpu_uuid,
            database=meant_by(os.environ).value,
            again=again,
        )
        try:
            answer = self._post("/v1/runs", hello)
        except DaemonError as error:
            self._may_be_followed |= error.status is None and not isinstance(error, NoDaemonError)
            raise
        self._may_be_followed = False
        welcome = decode(Welcome, answer, "welcome")
        if welcome.session != self._last_session:
            self._worker.begin_session("the daemon was started again")
        self._session = self._last_session = welcome.session
        self._lease_s = welcome.lease_s

    def _report(self) -> None:
        directive = self._said()
        # A thought that was over before the answer was written is one all the same.
        if self._clock.simulated and (directive.thinks or self._obeyed != (directive.kind, directive.decision)):
            with taking_time(self._clock, self._thinking_s):
                directive = self._thought_over(directive)
        self._obeyed = directive.kind, directive.decision
        self._take_record(directive)
        request = directive.request
        if request is not None and request.role not in OF_INCUMBENT:
            self._beat(request.trial)  # before it may run
        for notice in directive.notices:
            self._tell(notice)
        self._worker.obey(directive)

    def _take_record(self, directive: Directive) -> None:
        """Say beside the run's rows that it is trained, from now on."""
        if directive.record is None or (directive.record, directive.database) == (self._record, self._database):
            return
        if directive.record != self._record:
            called = directive.record[:SHOWN]
            _logger.info("zftune tunes this training as run %s, watch it with: zftune top %s", called, called)
        self._record, self._database = directive.record, directive.database
        if self._pulse is not None:
            self._pulse.close(remove=True)
        self._pulse = None
        if directive.database is not None and self._record is not None:
            self._pulse = Pulse(RunLocks(Path(directive.database)), self._record, self.run)

    def _beat(self, trial: int | None) -> None:
        if self._pulse is not None and self._worker.counter is not None:
            self._pulse.beat(self._worker.counter.count, trial)

    def _thought_over(self, directive: Directive) -> Directive:
        """What the daemon says when it has thought."""
        while directive.thinks and not self._worker.closing.is_set():
            time.sleep(_LOOK_S)
            directive = self._said()
        return directive

    def _said(self) -> Directive:
        """What the daemon says to a report."""
        assert self._session is not None
        report = self._worker.report(PROTOCOL, self._session)
        directive = decode(Directive, self._post(f"/v1/runs/{self.run}/report", report), "directive")
        if directive.session != self._session:
            raise WireError(f"directive.session is {directive.session}; it must be {self._session}")
        self._worker.heard()
        return directive

    def _post(self, route: str, message: Any, *, timeout_s: float = _REQUEST_S) -> Any:
        return self._transport.post(route, encode(message), timeout_s=timeout_s)

    def _failed(self, error: ZftuneError) -> float:
        """Seconds to wait, ever more of them; somewhat at random, so that many runs do not come back at once."""
        self._failures += 1
        if self._failures == 1:
            self._failing_since_s = time.monotonic()
        patient = self._is_away(error) and time.monotonic() - self._failing_since_s < self._patience_s
        if self._forget(error):
            if self._failures == 1:
                return 0.0
        elif not patient:
            self._tell(f"The daemon cannot be reached ({error}): the best settings so far stay until it answers again.")
        longest_s = min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** min(self._failures, 16))
        return random.uniform(longest_s / 2, longest_s)

    @staticmethod
    def _is_away(error: ZftuneError) -> bool:
        """Whether nobody answers, so that who sees to it may start another one."""
        return isinstance(error, DaemonError) and not isinstance(error, StrangerError) and error.status is None

    def _forget(self, error: ZftuneError) -> bool:
        """Whether the daemon says that it does not know the run any more: Hello has to be said again."""
        if not (isinstance(error, DaemonError) and error.status in _FORGOTTEN and self._session is not None):
            return False
        self._session = None
        return True

    def _tell(self, sentence: str) -> None:
        if sentence not in self.notices:
            self.notices.append(sentence)
