"""What systemd is told of a service of Type=notify. Without $NOTIFY_SOCKET nothing happens."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping

_log = logging.getLogger(__name__)


class Notifier:
    """Sends states to the service manager.

    Args:
        environment: $NOTIFY_SOCKET, a path or (with @) an abstract name; $WATCHDOG_USEC and $WATCHDOG_PID.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog = environment.get("WATCHDOG_USEC", "") if self._is_watched(environment) else ""

    @property
    def watchdog_s(self) -> float | None:
        """Within which time WATCHDOG=1 has to be sent again; None where nobody watches."""
        return int(self._watchdog) / 1e6 if self._address and self._watchdog.isdecimal() else None

    def send(self, *states: str) -> None:
        """Send states such as "READY=1"; a service manager that does not listen harms nobody."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
                channel.setblocking(False)
                channel.sendto("\n".join(states).encode(), self._address)
        except OSError as error:
            _log.warning("the service manager was not told %s (%s)", states[0], error.strerror)

    @staticmethod
    def _is_watched(environment: Mapping[str, str]) -> bool:
        return environment.get("WATCHDOG_PID", "") in ("", str(os.getpid()))
