"""When a job may start: at once, at the end of a step, or as soon as somebody waits for it."""

from __future__ import annotations

from zenflow.clock import Clock


class Turnstile:
    """Holds jobs back in the order in which they come; any thread may call it.

    For a device that computes on the host's own cores: work that starts long before it is due then only slows the steps
    down that come next, and all of it the same one.
    """

    def __init__(self, clock: Clock) -> None:
        self._poll_s = clock.poll_s
        self._changed = clock.condition("its turn")
        self._step = 0
        self._urgent = 0
        self._open = False

    def reach(self, step: int) -> None:
        """Say which step is over."""
        with self._changed:
            self._step = step
            self._changed.notify_all()

    def hurry(self, number: int) -> None:
        """Hold nothing back up to a job, since somebody waits for it.

        Args:
            number: of the job, counted from 1 in the order of submission.
        """
        with self._changed:
            self._urgent = max(self._urgent, number)
            self._changed.notify_all()

    def open(self) -> None:
        """Hold nothing back any more."""
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def wait(self, number: int, not_before: int) -> None:
        """Block until a job may start.

        Args:
            number: of the job.
            not_before: the step that must be over.
        """
        with self._changed:
            while not (not_before <= self._step or number <= self._urgent or self._open):
                # Not for ever: a finalizer that runs in this very thread may open it just before it sleeps.
                self._changed.wait(self._poll_s)
