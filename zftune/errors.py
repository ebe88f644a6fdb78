"""The errors of zftune.

    ZftuneError
    ├── BadInputError   what the user gave is wrong; the command line ends with exit code 2
    ├── ProfileError    a profile cannot be made or is not valid; exit code 1
    └── StoreError      the store cannot do what it was asked for (zftune.store.errors); exit code 1

A `BadInputError` is one sentence that names the field, the value and what is allowed, for example
`--model 'foo': allowed are tiny, small, medium or a directory that holds a config.json`.
"""

from __future__ import annotations


class ZftuneError(Exception):
    """The base of every error that zftune raises on purpose."""


class BadInputError(ZftuneError):
    """A value from the user that is not allowed; the message names the field, the value and what is allowed."""


class ProfileError(ZftuneError):
    """A profile that could not be measured, or a document that is not a valid profile."""
