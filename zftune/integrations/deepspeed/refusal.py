"""A setting that is not allowed. Of a table of them `zftune run` ends with the first, and `zftune check` shows all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from zftune.errors import BadInputError

INSTEAD = 'or "zftune": {"backend": "deepspeed"}'
"""How what is allowed ends where the other backend does it."""


class Refusal(NamedTuple):
    """A setting that is refused, and what is allowed."""

    field: str
    """Where it stands in the ds_config, with dots."""
    value: str
    """As a sentence has it."""
    allowed: str
    """Beginning with "is" or "are"."""

    @classmethod
    def of(cls, field: str, value: Any, allowed: str) -> Refusal:
        """With a value as Python writes it."""
        return cls(field, repr(value), allowed)

    def __str__(self) -> str:
        return f"{self.field} is {self.value}, allowed {self.allowed}"


def require_none(refusals: Iterable[Refusal]) -> None:
    """Let the first one end what is being done.

    Raises:
        BadInputError: there is one.
    """
    for refusal in refusals:
        raise BadInputError(str(refusal))
