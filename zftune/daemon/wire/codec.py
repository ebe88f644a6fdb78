"""Dataclasses as JSON and back: what does not fit their annotations is refused with one sentence.

Understood are bool, int, float (finite), str, None, `Any` (JSON of a limited size), Literal, enums of texts, unions,
tuples, frozensets, mappings from texts, dataclasses, and `Annotated[.., Limit(..)]` of these.
"""

from __future__ import annotations

import enum
import functools
import json
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal, TypeVar

from zftune.errors import BadInputError, ZftuneError

T = TypeVar("T")
MOST_TEXT = 4096
"""Characters of a text that has no limit of its own."""
MOST_ITEMS = 20_000
"""Of a tuple, a set or a mapping that has no limit of its own."""
MOST_DEPTH = 12
"""Of JSON in JSON."""
_MOST_INTEGER = 2**63 - 1
_SHOWN = 60  # characters of a value in a sentence


class WireError(BadInputError):
    """A message that is not allowed; the sentence names the field, the value and what is allowed."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Least and most of a number, or of the length of a text, a tuple or a mapping; and what a text looks like."""

    least: float = 0
    most: float = math.inf
    pattern: str = ""
    """A regular expression for the whole of a text; "": any."""

    def allowed(self, noun: str) -> str:
        """In words."""
        most = f" to {self.most:.15g}" if math.isfinite(self.most) else " or more"
        return f"{noun} {self.least:.15g}{most}" + (f" of the form {self.pattern}" if self.pattern else "")


def parse(body: bytes | str, *, most_bytes: int) -> Any:
    """JSON as it came.

    Args:
        body: of a request or an answer.
        most_bytes: it may have.

    Raises:
        WireError: it is too long, or no JSON: no NaN, no infinity, no name twice.
    """
    if len(body) > most_bytes:
        raise WireError(f"the message has {len(body)} bytes, allowed are at most {most_bytes}")
    try:
        return json.loads(body, parse_constant=_no_constant, object_pairs_hook=_object)
    except RecursionError:
        raise WireError(f"the message is nested too deep, allowed is a depth of {MOST_DEPTH}") from None
    except WireError:
        raise
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are such
        raise WireError(f"the message is no JSON ({str(error)[:_SHOWN]}), allowed is one JSON object") from None


def encode(value: Any, name: str = "message") -> Any:
    """A message as what `json.dumps` takes; a text that is no Unicode gets a "?" for each such character.

    Raises:
        WireError: a part of it cannot be sent.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: encode(getattr(value, one.name), f"{name}.{one.name}") for one in fields(value)}
    if isinstance(value, Mapping):
        return {unicode(str(key)): encode(one, f"{name}.{key}") for key, one in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(encode(one, name) for one in value)
    if isinstance(value, (tuple, list)):
        return [encode(one, f"{name}[{index}]") for index, one in enumerate(value)]
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, str):
        return unicode(value)
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _refused(name, value, "a finite number")
        return value
    raise _refused(name, value, "data that JSON has")


def decode(kind: type[T], value: Any, name: str = "message") -> T:
    """A message from what `parse` gave.

    Args:
        kind: a dataclass.
        value: JSON.
        name: what to call it in a sentence.

    Raises:
        WireError: it is not such a message.
    """
    found: T = _dataclass(kind, value, name)
    return found


def unicode(text: str) -> str:
    """A text that can be sent and kept: arguments and paths of other encodings have lone surrogates.

    Args:
        text: any.
    """
    return text.encode("utf-8", "replace").decode()


# --- by kind ----------------------------------------------------------------------------------------------------------


def _decode(kind: Any, value: Any, name: str, limit: Limit | None = None) -> Any:
    origin = typing.get_origin(kind)
    if origin is Annotated:
        inner, *marks = typing.get_args(kind)
        return _decode(inner, value, name, next((one for one in marks if isinstance(one, Limit)), limit))
    if origin in (typing.Union, types.UnionType):
        return _union(typing.get_args(kind), value, name, limit)
    if origin is Literal:
        return _literal(typing.get_args(kind), value, name)
    if origin in (tuple, frozenset):
        return _sequence(kind, value, name, limit)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(typing.get_args(kind)[1], value, name, limit)
    if kind is Any:
        return _any(value, name, MOST_DEPTH)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(_literal(tuple(one.value for one in kind), value, name))
    if is_dataclass(kind):
        return _dataclass(kind, value, name)
    return _plain(kind, value, name, limit)


def _plain(kind: Any, value: Any, name: str, limit: Limit | None) -> Any:
    if kind is type(None):
        if value is not None:
            raise _refused(name, value, "null")
        return None
    if kind is bool:
        if not isinstance(value, bool):
            raise _refused(name, value, "true or false")
        return value
    if kind is str:
        return _text(value, name, limit or Limit(0, MOST_TEXT))
    if kind is int:
        limit = limit or Limit(-_MOST_INTEGER, _MOST_INTEGER)
        if isinstance(value, bool) or not isinstance(value, int) or not limit.least <= value <= limit.most:
            raise _refused(name, value, limit.allowed("an integer of"))
        return value
    if kind is float:
        limit = limit or Limit(-1e300, 1e300)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not limit.least <= value <= limit.most or not math.isfinite(value):
            raise _refused(name, value, limit.allowed("a number of"))
        return float(value)
    raise TypeError(f"{name} is annotated {kind!r}, which no message may have")


def _text(value: Any, name: str, limit: Limit) -> str:
    fits = isinstance(value, str) and limit.least <= len(value) <= limit.most
    if not fits or (limit.pattern and re.fullmatch(limit.pattern, value) is None):
        raise _refused(name, value, limit.allowed("a text with a length of"))
    if not _is_unicode(value):
        raise _refused(name, value, "a text without surrogates")
    return str(value)


def _union(kinds: tuple[Any, ...], value: Any, name: str, limit: Limit | None) -> Any:
    if value is None and type(None) in kinds:
        return None
    refusals = []
    for kind in kinds:
        if kind is not type(None):
            try:
                return _decode(kind, value, name, limit)
            except WireError as error:
                refusals.append(error)
    if len(refusals) == 1:
        raise refusals[0]
    raise _refused(name, value, " or ".join(str(one).rpartition("allowed is ")[2] for one in refusals))


def _literal(allowed: tuple[Any, ...], value: Any, name: str) -> Any:
    if not any(type(one) is type(value) and one == value for one in allowed):
        raise _refused(name, value, "one of " + ", ".join(map(str, allowed)))
    return value


def _sequence(kind: Any, value: Any, name: str, limit: Limit | None) -> Any:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if not isinstance(value, list):
        raise _refused(name, value, "a list")
    if origin is tuple and inner[-1] is not Ellipsis:
        if len(value) != len(inner):
            raise _refused(name, value, f"a list of {len(inner)}")
        pairs: Iterable[tuple[Any, Any]] = zip(inner, value, strict=True)
    else:
        _check_length(value, name, limit)
        pairs = ((inner[0], one) for one in value)
    return origin(_decode(one, each, f"{name}[{index}]") for index, (one, each) in enumerate(pairs))


def _mapping(kind: Any, value: Any, name: str, limit: Limit | None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _refused(name, value, "an object")
    _check_length(value, name, limit)
    return {_key(key, name): _decode(kind, one, _under(name, key)) for key, one in value.items()}


def _any(value: Any, name: str, depth: int) -> Any:
    if depth == 0:
        raise WireError(f"{name[:MOST_TEXT]} is nested too deep, allowed is a depth of {MOST_DEPTH}")
    if isinstance(value, dict):
        _check_length(value, name, None)
        return {_key(key, name): _any(one, _under(name, key), depth - 1) for key, one in value.items()}
    if isinstance(value, list):
        _check_length(value, name, None)
        return [_any(one, f"{name}[{index}]", depth - 1) for index, one in enumerate(value)]
    if value is None or isinstance(value, bool):
        return value
    return _plain(type(value), value, name, None)


def _dataclass(kind: Any, value: Any, name: str) -> Any:
    if not isinstance(value, dict):
        raise _refused(name, value, "an object")
    hints, known = _hints(kind), _fields(kind)
    unknown = next((key for key in value if key not in known), None)
    if unknown is not None:
        raise WireError(f"{name} has the field {_shown(unknown)}, allowed are {', '.join(known)}")
    found = {}
    for field in known.values():
        if field.name in value:
            found[field.name] = _decode(hints[field.name], value[field.name], f"{name}.{field.name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise WireError(f"{name}.{field.name} is missing, allowed is an object with that field")
    try:
        return kind(**found)
    except WireError:
        raise
    except (ZftuneError, ValueError) as error:  # what the class itself does not allow
        raise WireError(f"{name}: {error}") from error


@functools.lru_cache(maxsize=128)
def _hints(kind: Any) -> Mapping[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


@functools.lru_cache(maxsize=128)
def _fields(kind: Any) -> Mapping[str, Field[Any]]:
    return {one.name: one for one in fields(kind)}


# --- sentences --------------------------------------------------------------------------------------------------------


def _refused(name: str, value: Any, allowed: str) -> WireError:
    return WireError(f"{name} is {_shown(value)}, allowed is {allowed}")


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        noun = "an object" if isinstance(value, dict) else "a list"
        return f"{noun} of {len(value)}"
    text = ascii(value) if not isinstance(value, int) or abs(value) <= _MOST_INTEGER else "an integer beyond 64 bits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _check_length(value: Any, name: str, limit: Limit | None) -> None:
    limit = limit or Limit(0, MOST_ITEMS)
    if not limit.least <= len(value) <= limit.most:
        raise _refused(name, value, limit.allowed("a length of"))


def _key(key: str, name: str) -> str:
    if len(key) > MOST_TEXT:
        raise WireError(f"{name} has a name of {len(key)} characters, allowed are at most {MOST_TEXT}")
    if not _is_unicode(key):
        raise WireError(f"{name} has the name {_shown(key)}, allowed are names without surrogates")
    return key


def _under(name: str, key: str) -> str:
    """What to call a field in a sentence, whatever its name is."""
    return f"{name}.{key if key.isprintable() else ascii(key)[1:-1]}"


def _is_unicode(text: str) -> bool:
    """JSON may have halves of characters; no store takes them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _no_constant(text: str) -> Any:
    raise WireError(f"the message has the number {text}, allowed are finite numbers")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise WireError(f"the message has the field {_shown(twice)} twice, allowed is once")
    return found
