"""The page on a loopback port."""

from __future__ import annotations

import logging
from pathlib import Path

from zftune.daemon.access import kept_token
from zftune.daemon.answers import App
from zftune.daemon.guard import Guarded
from zftune.daemon.protocols import LoopbackProtocol
from zftune.daemon.serving import Listener, loopback_socket
from zftune.errors import BadInputError

_log = logging.getLogger(__name__)


class PageServer:
    """An application that is served on 127.0.0.1, guarded."""

    def __init__(self, guarded: Guarded, listener: Listener) -> None:
        self._guarded = guarded
        self._listener = listener

    @classmethod
    async def serve(cls, app: App, port: int, token_path: Path) -> PageServer:
        """Serve from now on.

        Args:
            app: what is served.
            port: 0 takes a free one.
            token_path: the file of the token that reads /metrics.

        Raises:
            BadInputError: the port is taken, or the token's file cannot be trusted.
        """
        token = kept_token(token_path)
        try:
            listening = loopback_socket(port)
        except OSError as error:
            raise BadInputError(f"--port {port}: allowed is a port that is free ({error.strerror})") from error
        taken = listening.getsockname()[1]
        guarded = Guarded(app, taken, token)
        listener = Listener(guarded, LoopbackProtocol, listening)
        await listener.start()
        _log.info("the page and /metrics are on http://127.0.0.1:%d; %s reads the latter", taken, token_path)
        return cls(guarded, listener)

    def new_url(self) -> str:
        """A URL that opens the page once."""
        return self._guarded.new_url()

    async def stop(self) -> None:
        """Serve no more."""
        await self._listener.stop()
