"""The errors of zftune.

    ZftuneError
    ├── BadInputError   what the user gave is wrong; the command line ends with exit code 2
    ├── ProfileError    a profile cannot be made or is not valid; exit code 1
    └── StoreError      the store cannot do what it was asked for (zftune.errors); exit code 1

A `BadInputError` is one sentence that names the field, the value and what is allowed, for example
`--quality is 'best'; it must be exact, published or loose` (`BadInputError.of`); where no value is at fault, it says
what is wrong and what to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Self


class ZftuneError(Exception):
    """The base of every error that zftune raises on purpose."""


class BadInputError(ZftuneError):
    """A value from the user that is not allowed; the message names the field, the value and what is allowed."""

    field: str | None = None
    """The setting or option; None: the error is about something else than a value."""
    value: object = None
    allowed: str | None = None
    """What the value must be, in words."""

    @classmethod
    def of(cls, field: str, value: object, allowed: str) -> Self:
        """The error of a value: "topk_ratio is 1.5; it must be a number from 0 to 1", as zenflow words its own."""
        error = cls(f"{field} is {value!r}; it must be {allowed}")
        error.field, error.value, error.allowed = field, value, allowed
        return error


class ProfileError(ZftuneError):
    """A profile that could not be measured, or a document that is not a valid profile."""


class DaemonError(ZftuneError):
    """A daemon that cannot be reached, cannot be trusted, is too slow, or refuses.

    Args:
        status: of HTTP, where it is the daemon that refuses; None where nobody answered as a daemon would.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class NoDaemonError(DaemonError):
    """No daemon is there; what it kept is in the store."""


class SocketHeldError(DaemonError):
    """Another daemon holds the socket.

    Args:
        pid: of that daemon, as its lock has it; "": not known.
    """

    def __init__(self, message: str, pid: str) -> None:
        super().__init__(message)
        self.pid = pid


class StrangerError(DaemonError):
    """What answers is another user's, no daemon, or one of another protocol: asking again is of no use."""


class StoreError(ZftuneError):
    """Something could not be kept or read; one sentence says what and why. What was there is as it was."""


@contextmanager
def noting(notices: list[str], kind: type[ZftuneError] = ZftuneError) -> Iterator[None]:
    """Turn an error of what is inside into a notice, where something goes on without it."""
    try:
        yield
    except kind as error:
        notices.append(f"{error}.")


EXTRAS: Mapping[str, str] = {
    "accelerate": "huggingface",
    "deepspeed": "deepspeed",
    "plotly": "report",
    "psycopg": "postgres",
    "transformers": "huggingface",
}


class MissingPackageError(ZftuneError, ImportError):
    """A package that is not installed; the message has the command that installs it."""

    def __init__(self, package: str, needed_by: str) -> None:
        extra = EXTRAS.get(package)
        command = "pip install zftune" if extra is None else f"pip install 'zftune[{extra}]'"
        super().__init__(f"{needed_by} needs {package}, which is not installed: {command}")


def require(package: str, needed_by: str) -> None:
    """Refuse early what needs a package that is not installed. It is not imported.

    Raises:
        MissingPackageError: it is not installed.
    """
    if find_spec(package) is None:
        raise MissingPackageError(package, needed_by)
