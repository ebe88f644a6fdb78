"""Messages as JSON and back, by pydantic: what does not fit their annotations is refused with one sentence.

Any dataclass will do, so that what the tuner has travels as it is. Types are strict (no text counts as a number),
fields that are not there are refused, and whatever has no limit of its own has one of `_LIMITS`.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, SchemaValidator

from zftune.errors import BadInputError, ZftuneError

T = TypeVar("T")
MOST_TEXT = 4096
"""Characters of a text that has no limit of its own."""
MOST_ITEMS = 20_000
"""Of a tuple, a set or a mapping that has no limit of its own."""
_MOST_INTEGER = 2**63 - 1  # more does not fit into a database
_LIMITS: dict[str, dict[str, Any]] = {
    "bool": {"strict": True},
    "int": {"strict": True, "ge": -_MOST_INTEGER, "le": _MOST_INTEGER},
    "float": {"strict": True, "ge": -1e300, "le": 1e300, "allow_inf_nan": False},
    "str": {"strict": True, "max_length": MOST_TEXT},
    "tuple": {"max_length": MOST_ITEMS},
    "frozenset": {"max_length": MOST_ITEMS},
    "dict": {"max_length": MOST_ITEMS},
    "dataclass-args": {"extra_behavior": "forbid"},
}
"""By the type of a pydantic schema, what it has unless it says otherwise."""
_SHOWN = 60  # characters of a value in a sentence


class WireError(BadInputError):
    """A message that is not allowed; the sentence names the field, the value and what is allowed."""


def encode(message: Any, name: str = "message") -> bytes:
    """A dataclass as JSON; of a text that is not Unicode, "?" takes the place of each such character. `name` is for
    errors. Raises WireError: a part of it cannot be sent.
    """
    document = _adapter(message.__class__).dump_python(message, mode="json", warnings=False)
    try:
        return json.dumps(document, allow_nan=False, ensure_ascii=False).encode("utf-8", "replace")
    except ValueError as error:  # a number that is not finite
        decode(message.__class__, document, name)  # names the field
        raise WireError(f"{name} cannot be sent: {error}") from error


def decode(kind: type[T], document: Any, name: str = "message") -> T:
    """A dataclass from what `json.loads` gave; `name` is for errors. Raises WireError: it is not such a message."""
    try:
        found: T = _validator(cast(Any, kind)).validate_python(document)
    except ValidationError as error:
        raise _refused(error.errors(include_url=False)[0], name) from None
    except WireError:
        raise
    except ZftuneError as error:  # what the class itself does not allow
        raise WireError(f"{name}: {error}") from error
    return found


def unicode(text: str) -> str:
    """A text that can be sent and kept: arguments and paths of other encodings have lone surrogates."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


@functools.cache
def _validator(kind: Any) -> SchemaValidator:
    return SchemaValidator(_limited(_adapter(kind).core_schema))


def _limited(schema: Any) -> Any:
    """A pydantic schema in which everything has a limit."""
    if isinstance(schema, list):
        return [_limited(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    limits = _LIMITS.get(kind, {}) if isinstance(kind, str) else {}
    return {**limits, **{name: _limited(one) for name, one in schema.items()}}


# --- sentences --------------------------------------------------------------------------------------------------------


def _refused(found: ErrorDetails, name: str) -> WireError:
    """The sentence of what pydantic found first."""
    above, last = found["loc"][:-1], found["loc"][-1:]
    parent = "".join([name, *map(_place, above)])
    field = "".join([parent, *map(_place, last)])
    if found["type"] == "missing":
        return WireError(f"{field} is missing")
    if found["type"] == "unexpected_keyword_argument":
        return WireError(f"{parent} has no field {_shown(last[0])}")
    if found["type"] == "value_error":
        return WireError(f"{field}: {found['ctx']['error']}")
    allowed = re.sub(r"^\w+ should ", "", found["msg"])
    allowed = re.sub(r"\d{20,}", lambda digits: f"{float(digits[0]):g}", allowed)
    error = WireError(f"{field} is {_shown(found['input'])}; it must {allowed}")
    error.field, error.value, error.allowed = field, found["input"], allowed.removeprefix("be ")
    return error


def _place(part: int | str) -> str:
    if isinstance(part, int):
        return f"[{part}]"
    return f".{part if part.isprintable() else ascii(part)[1:-1]}"[: MOST_TEXT // 8]


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list, tuple)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    text = ascii(value) if not isinstance(value, int) or abs(value) <= _MOST_INTEGER else "an integer beyond 64 bits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
