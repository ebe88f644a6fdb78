"""Who may use the page: a one-time token, traded for a cookie; and a token that reads the metrics.

Only hashes are kept in memory. Tokens lie in files of mode 0600 or are handed over the socket, which is the user's own.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import time
from collections.abc import Callable
from pathlib import Path

from zftune.errors import BadInputError

TOKEN_S = 60.0
"""How long the URL works that opens the page."""

SESSION_S = 12 * 3600.0
"""How long its cookie works."""

_MOST = 32
_TOKEN_BYTES = 32
_MAX_FILE_BYTES = 4096


class Secrets:
    """Secrets that end by themselves; the oldest go where there are too many.

    Args:
        life_s: of each.
        clock: in seconds, monotonic.
    """

    def __init__(self, life_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._life_s = life_s
        self._clock = clock
        self._ends_s: dict[bytes, float] = {}

    def issue(self) -> str:
        """A new one."""
        self._forget_old()
        while len(self._ends_s) >= _MOST:
            del self._ends_s[next(iter(self._ends_s))]
        secret = secrets.token_urlsafe(_TOKEN_BYTES)
        self._ends_s[_digest(secret)] = self._clock() + self._life_s
        return secret

    def is_good(self, secret: str) -> bool:
        """Whether it was issued and has not ended."""
        self._forget_old()
        return _digest(secret) in self._ends_s  # by hash: how long a look-up takes tells nothing of the secret

    def spend(self, secret: str) -> bool:
        """Whether it was good; from now on it is not."""
        self._forget_old()
        return self._ends_s.pop(_digest(secret), None) is not None

    def _forget_old(self) -> None:
        now_s = self._clock()
        for digest in [digest for digest, end_s in self._ends_s.items() if end_s <= now_s]:
            del self._ends_s[digest]


def kept_token(path: Path) -> str:
    """The token of a file that only this user can read; made where it is missing.

    Raises:
        BadInputError: the file is not this user's own, others can read it, or it cannot be made.
    """
    try:
        return _made_token(path)
    except FileExistsError:
        pass
    except OSError as error:
        raise BadInputError(f"the token '{path}' cannot be written ({error.strerror})") from error
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise BadInputError(f"the token '{path}' cannot be read ({error.strerror})") from error
    try:
        found = os.fstat(descriptor)
        own = stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
        token = os.read(descriptor, _MAX_FILE_BYTES).decode("ascii", "replace").strip() if own else ""
    finally:
        os.close(descriptor)
    if len(token) < _TOKEN_BYTES:
        raise BadInputError(
            f"the token '{path}': allowed is a file of your own with mode 0600 that holds a token; remove it"
        )
    return token


def _made_token(path: Path) -> str:
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(token + "\n")
    return token


def same(given: str, wanted: str) -> bool:
    """Whether two secrets are equal; takes as long for any."""
    return secrets.compare_digest(_digest(given), _digest(wanted))


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()
