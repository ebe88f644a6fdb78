"""The daemon as a process: from the lock to its last request.

claim the socket -> services start -> serve, READY=1 -> drain, STOPPING=1 -> services stop -> give the socket back
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import zftune
from zftune.daemon.app import create_app
from zftune.daemon.errors import DaemonError
from zftune.daemon.limits import Limits
from zftune.daemon.listening import Claim, claim
from zftune.daemon.location import TEMPORARY, locate
from zftune.daemon.logs import log_to
from zftune.daemon.metrics import Metrics
from zftune.daemon.notify import Notifier
from zftune.daemon.page_server import PageServer
from zftune.daemon.pauses import COLLECT_S, Garbage, few_pauses
from zftune.daemon.protocols import SocketProtocol
from zftune.daemon.service import DaemonState, Service
from zftune.daemon.serving import Listener
from zftune.errors import BadInputError

PRIVATE_IDLE_S = 60.0
"""How long a private daemon waits for a run, where nothing else was said."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_IDLE_CHECKS = 10
_SOCKET_CHECK_S = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Of `zftune daemon`."""

    private: bool = False
    """Whether it ends with its runs."""
    idle_exit_s: float | None = None
    """Ends after so long without a run; None: never, a private one after `PRIVATE_IDLE_S`."""
    port: int | None = None
    """Of the page, from the start on; None: a free one when it is asked for."""
    metrics_textfile: Path | None = None
    limits: Limits | None = None
    """Of one request; None: the usual ones."""

    @property
    def idle_s(self) -> float | None:
        """Time without a run after which it ends."""
        return PRIVATE_IDLE_S if self.private and self.idle_exit_s is None else self.idle_exit_s


def serve(options: Options, host: Callable[[], AbstractContextManager[Sequence[Service]]]) -> None:
    """Be the daemon until a signal, a request or idleness ends it. Belongs into the main thread.

    Args:
        options: of it.
        host: makes the services once the socket is claimed, and ends what they need.

    Raises:
        BadInputError: the socket's place cannot be used, the port is taken.
        DaemonError: another daemon is there.
    """
    location = locate(os.environ)
    with claim(location) as claimed:
        log_to(sys.stderr, os.environ)
        if location.source == TEMPORARY:
            _log.warning("$XDG_RUNTIME_DIR is no folder of this user: the socket is in %s", TEMPORARY)
        with _ending_on_signals(), host() as services, few_pauses():
            asyncio.run(_Daemon(options, services, claimed).run())


@contextlib.contextmanager
def _ending_on_signals() -> Iterator[None]:
    """Leave in order while it is not yet ready: there is nothing to drain."""

    def handle(number: int, _: FrameType | None) -> None:
        _log.info("stopping: %s", signal.Signals(number).name)
        raise SystemExit(0)

    with _handling(handle):
        yield


@contextlib.contextmanager
def _handling(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    taken = [one for one in _SIGNALS if signal.getsignal(one) is not signal.SIG_IGN]  # nohup's stays ignored
    before = {one: signal.signal(one, handle) for one in taken}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


class _Daemon:
    def __init__(self, options: Options, services: Sequence[Service], claimed: Claim) -> None:
        self._options = options
        self._claim = claimed
        self._notifier = Notifier(os.environ)
        self._page: PageServer | None = None
        self._listener: Listener | None = None
        self._state = DaemonState(
            services=tuple(services), private=options.private, stop=self._stop, open_page=self._open_page
        )
        self._metrics = Metrics(self._state)
        self._app = create_app(self._state, self._metrics, options.limits)

    async def run(self) -> None:
        """Start everything, serve, stop everything in the opposite order."""
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(self._signals())
            for service in self._state.services:
                await service.start()
                stack.push_async_callback(service.stop)
            if self._options.port is not None:
                await self._serve_page(self._options.port)
            stack.push_async_callback(self._drain)
            await self._listen()
            self._notifier.send("READY=1", f"STATUS=serves {self._claim.location.socket}")
            _log.info("zftune %s serves %s (pid %d)", zftune.__version__, self._claim.location.socket, os.getpid())
            async with asyncio.TaskGroup() as chores:
                for chore in self._chores():
                    chores.create_task(chore)
        _log.info("ended")

    async def _listen(self) -> None:
        self._listener = Listener(self._app, SocketProtocol, self._claim.listener)
        await self._listener.start()

    async def _drain(self) -> None:
        await asyncio.gather(*(one.stop() for one in (self._listener, self._page) if one is not None))

    async def _keep_socket(self) -> None:
        """Serve on a socket of that path again where a clean-up, or somebody, removed it."""
        last_words = ""
        while not await self._state.stops_within(_SOCKET_CHECK_S):
            if self._claim.is_there:
                continue
            try:
                self._claim.rebind()
            except DaemonError as error:
                self._stop(f"the socket was removed, and {error}")
            except BadInputError as error:
                if str(error) != last_words:
                    _log.error("the socket was removed, nobody can connect any more: %s", error)
                last_words = str(error)
            else:
                _log.warning("the socket %s was removed, and is there again", self._claim.location.socket)
                before, last_words = self._listener, ""
                await self._listen()
                if before is not None:
                    await before.stop()  # who was connected comes again

    def _stop(self, reason: str) -> None:
        if not self._state.stopping.is_set():
            _log.info("stopping: %s", reason)
            self._notifier.send("STOPPING=1")
            self._state.stopping.set()

    async def _open_page(self) -> str:
        page = await self._serve_page(0)
        return page.new_url()

    async def _serve_page(self, port: int) -> PageServer:
        if self._page is None:
            self._page = await PageServer.serve(self._app, port, self._claim.location.metrics_token)
        return self._page

    def _chores(self) -> Iterator[Coroutine[None, None, object]]:
        """What goes on until it stops."""
        yield self._state.stopping.wait()
        yield self._keep_socket()
        if self._options.idle_s is not None:
            yield self._end_idle(self._options.idle_s)
        if self._notifier.watchdog_s is not None:
            yield self._feed_watchdog(self._notifier.watchdog_s)
        yield self._collect_garbage()
        if self._options.metrics_textfile is not None:
            yield self._metrics.keep_textfile(self._options.metrics_textfile)

    async def _end_idle(self, idle_s: float) -> None:
        last_s = time.monotonic()
        while not await self._state.stops_within(idle_s / _IDLE_CHECKS):
            now_s = time.monotonic()
            if self._state.live_runs:
                last_s = now_s
            elif now_s - last_s >= idle_s:
                self._stop(f"no run for {idle_s:g} s")

    async def _collect_garbage(self) -> None:
        garbage = Garbage()
        while not await self._state.stops_within(COLLECT_S):
            garbage.collect()

    async def _feed_watchdog(self, watchdog_s: float) -> None:
        while not await self._state.stops_within(watchdog_s / 3):
            self._notifier.send("WATCHDOG=1")  # from the event loop: one that hangs is found out

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        received: list[int] = []

        def handle(number: int, _: FrameType | None) -> None:
            received.append(number)
            if len(received) == 1:
                loop.call_soon_threadsafe(self._stop, signal.Signals(number).name)
                return
            self._claim.release()
            os._exit(128 + number)

        with _handling(handle):
            yield
