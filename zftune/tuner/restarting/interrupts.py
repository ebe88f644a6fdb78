"""Ctrl-C and termination, kept for when there is time for them."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

from zftune.profile.command.child import held_signal, held_signals
from zftune.profile.command.keeper import FORWARDED


class Interrupts:
    """Holds them back while inside; in the main thread only."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self.mask: list[int] = []

    def came(self) -> bool:
        """Whether there was one."""
        if self.signum is None:
            self.signum = held_signal()
        return self.signum is not None

    def __enter__(self) -> Interrupts:
        self._holding = held_signals()
        self.mask = self._holding.__enter__()
        self._before = {signum: signal.signal(signum, self._note) for signum in FORWARDED}  # another thread may get it
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.came()
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._holding.__exit__(kind, error, trace)

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        self.signum = signum
