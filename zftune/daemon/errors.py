"""What a daemon that cannot be asked, or does not do what it is asked for, raises in its client."""

from __future__ import annotations

from zftune.errors import ZftuneError


class DaemonError(ZftuneError):
    """A daemon that cannot be reached, cannot be trusted, is too slow, or refuses.

    Args:
        message: a sentence.
        status: of HTTP, where it is the daemon that refuses; None where nobody answered as a daemon would.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class StrangerError(DaemonError):
    """What answers is another user's, no daemon, or one of another protocol: asking again is of no use."""
