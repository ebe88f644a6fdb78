"""Exceptions of the runtime.

ZenFlowError
├── ConfigError (ValueError)       a setting has a value that is not allowed
├── UnsupportedError               something this runtime does not do, and what to use instead
└── HostEngineError (RuntimeError) the host engine failed; raised in the training thread
"""


class ZenFlowError(Exception):
    """Base of every exception that zenflow raises on purpose."""


class ConfigError(ZenFlowError, ValueError):
    """A setting is not allowed; the message names the field, the value and what is allowed."""


class UnsupportedError(ZenFlowError):
    """A use that the runtime refuses; the message says what to do instead."""


class HostEngineError(ZenFlowError, RuntimeError):
    """Work on the host failed; the message names the parameter and the cause."""
