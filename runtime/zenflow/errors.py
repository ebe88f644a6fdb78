"""Exceptions of the runtime."""

from __future__ import annotations

from typing import Self


class ZenFlowError(Exception):
    """Base of every exception that zenflow raises on purpose."""


class ConfigError(ZenFlowError, ValueError):
    """A setting is not allowed; the message names the field, the value and what is allowed."""

    field: str | None = None
    """Of the setting; None: the error is about something else than a value."""
    value: object = None
    allowed: str | None = None
    """What the value must be, in words."""

    @classmethod
    def of(cls, field: str, value: object, allowed: str) -> Self:
        """The error of a value: "topk_ratio is 1.5; it must be a number from 0 to 1"."""
        error = cls(f"{field} is {value!r}; it must be {allowed}")
        error.field, error.value, error.allowed = field, value, allowed
        return error


class UnsupportedError(ZenFlowError):
    """A use that the runtime refuses; the message says what to do instead."""


class CheckpointError(ZenFlowError, ValueError):
    """A state_dict cannot be loaded; the message says what is wrong with it, and nothing has changed."""


class HostMemoryError(ZenFlowError, MemoryError):
    """The host cannot give the memory that is needed; the message names both figures and what to lower."""


class HostEngineError(ZenFlowError, RuntimeError):
    """Work on the host failed; the message names the parameter and the cause."""


class HostThreadsError(HostEngineError):
    """Threads of the host engine could not be started; what is there goes on."""


class RankError(ZenFlowError):
    """Another rank could not do what all do together, and says why there; nothing has changed here."""
