"""The error of the store. No training run may fail because of it: callers turn it into a notice."""

from __future__ import annotations

from zftune.errors import ZftuneError


class StoreError(ZftuneError):
    """Something could not be kept or read; one sentence says what and why. What was there is as it was."""
