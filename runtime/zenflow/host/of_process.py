"""What a process has and the children that are forked from it have not: threads, and the memory of the host state."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

from zenflow.errors import UnsupportedError


class OwnProcess:
    """The process that made this object."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_this(self) -> bool:
        """Whether it is the calling process, and not a child that was forked from it."""
        return os.getpid() == self._pid

    def require(self) -> None:
        """Refuse a use by a forked child.

        Raises:
            UnsupportedError: it is one.
        """
        if not self.is_this:
            raise UnsupportedError(
                f"process {os.getpid()} was forked from process {self._pid}, which alone has the optimizer's state and "
                "threads: allowed here is to read the model's weights"
            )


def finalize(owner: object, end: Callable[..., object], *arguments: Any) -> weakref.finalize[Any, Any]:
    """As `weakref.finalize`, for what a forked child has not got and must not end: there it does nothing.

    Args:
        owner: with whose end it is called.
        end: what to call.
        arguments: for that.
    """
    return weakref.finalize(owner, _unless_forked, OwnProcess(), end, arguments)


def _unless_forked(process: OwnProcess, end: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    if process.is_this:
        end(*arguments)
