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
from collections.abc import Callable, Mapping, Sequence
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
    kind = type(value)
    if kind is str:
        return unicode(value)
    if kind is float:
        if not math.isfinite(value):
            raise _refused(name, value, "a finite number")
        return value
    if value is None or kind is int or kind is bool:
        return value
    if is_dataclass(kind):
        return {one: encode(getattr(value, one), f"{name}.{one}") for one in _fields(kind)}
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
    if isinstance(value, int):
        return value
    if isinstance(value, float):  # a class of its own, such as numpy's
        return encode(float(value), name)
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
    found: T = _dataclass(kind)(value, name)
    return found


def unicode(text: str) -> str:
    """A text that can be sent and kept: arguments and paths of other encodings have lone surrogates.

    Args:
        text: any.
    """
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


# --- by kind: an annotation is looked at once, and becomes a function of a value and its name ------------------------

_Decoder = Callable[[Any, str], Any]


def _decoder(kind: Any, limit: Limit | None = None) -> _Decoder:
    origin = typing.get_origin(kind)
    if origin is Annotated:
        inner, *marks = typing.get_args(kind)
        return _decoder(inner, next((one for one in marks if isinstance(one, Limit)), limit))
    if origin in (typing.Union, types.UnionType):
        return _union(typing.get_args(kind), limit)
    if origin is Literal:
        return functools.partial(_literal, typing.get_args(kind))
    if origin in (tuple, frozenset):
        return _sequence(kind, limit)
    if origin is not None and issubclass(origin, Mapping):
        return functools.partial(_mapping, _decoder(typing.get_args(kind)[1]), limit)
    if kind is Any:
        return functools.partial(_any, MOST_DEPTH)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _enum(kind)
    return _dataclass(kind) if is_dataclass(kind) else _plain(kind, limit)


def _plain(kind: Any, limit: Limit | None) -> _Decoder:
    if kind is str:
        return functools.partial(_text, limit or Limit(0, MOST_TEXT))
    if kind is int:
        return functools.partial(_integer, limit or Limit(-_MOST_INTEGER, _MOST_INTEGER))
    if kind is float:
        return functools.partial(_number, limit or Limit(-1e300, 1e300))
    if kind is bool:
        return _truth
    if kind is type(None):
        return _null
    raise TypeError(f"a field is annotated {kind!r}, which no message may have")


def _null(value: Any, name: str) -> None:
    if value is not None:
        raise _refused(name, value, "null")


def _truth(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise _refused(name, value, "true or false")
    return value


def _integer(limit: Limit, value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not limit.least <= value <= limit.most:
        raise _refused(name, value, limit.allowed("an integer of"))
    return value


def _number(limit: Limit, value: Any, name: str) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not limit.least <= value <= limit.most or not math.isfinite(value):
        raise _refused(name, value, limit.allowed("a number of"))
    return float(value)


def _text(limit: Limit, value: Any, name: str) -> str:
    fits = isinstance(value, str) and limit.least <= len(value) <= limit.most
    if not fits or (limit.pattern and re.fullmatch(limit.pattern, value) is None):
        raise _refused(name, value, limit.allowed("a text with a length of"))
    if not _is_unicode(value):
        raise _refused(name, value, "a text without surrogates")
    return str(value)


def _union(kinds: tuple[Any, ...], limit: Limit | None) -> _Decoder:
    nullable = type(None) in kinds
    decoders = [_decoder(kind, limit) for kind in kinds if kind is not type(None)]

    def decoded(value: Any, name: str) -> Any:
        if value is None and nullable:
            return None
        refusals = []
        for one in decoders:
            try:
                return one(value, name)
            except WireError as error:
                refusals.append(error)
        if len(refusals) == 1:
            raise refusals[0]
        raise _refused(name, value, " or ".join(str(one).rpartition("allowed is ")[2] for one in refusals))

    return decoded


def _literal(allowed: tuple[Any, ...], value: Any, name: str) -> Any:
    if not any(type(one) is type(value) and one == value for one in allowed):
        raise _refused(name, value, "one of " + ", ".join(map(str, allowed)))
    return value


def _enum(kind: type[enum.Enum]) -> _Decoder:
    allowed = tuple(one.value for one in kind)
    return lambda value, name: kind(_literal(allowed, value, name))


def _sequence(kind: Any, limit: Limit | None) -> _Decoder:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple and inner[-1] is not Ellipsis:
        return functools.partial(_of_each, [_decoder(one) for one in inner])
    decoder = _decoder(inner[0])

    def decoded(value: Any, name: str) -> Any:
        if not isinstance(value, list):
            raise _refused(name, value, "a list")
        _check_length(value, name, limit)
        return origin([decoder(each, f"{name}[{index}]") for index, each in enumerate(value)])

    return decoded


def _of_each(decoders: Sequence[_Decoder], value: Any, name: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _refused(name, value, "a list")
    if len(value) != len(decoders):
        raise _refused(name, value, f"a list of {len(decoders)}")
    pairs = enumerate(zip(decoders, value, strict=True))
    return tuple(one(each, f"{name}[{index}]") for index, (one, each) in pairs)


def _mapping(decoder: _Decoder, limit: Limit | None, value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _refused(name, value, "an object")
    _check_length(value, name, limit)
    return {_key(key, name): decoder(one, _under(name, key)) for key, one in value.items()}


def _any(depth: int, value: Any, name: str) -> Any:
    if depth == 0:
        raise WireError(f"{name[:MOST_TEXT]} is nested too deep, allowed is a depth of {MOST_DEPTH}")
    if isinstance(value, dict):
        _check_length(value, name, None)
        return {_key(key, name): _any(depth - 1, one, _under(name, key)) for key, one in value.items()}
    if isinstance(value, list):
        _check_length(value, name, None)
        return [_any(depth - 1, one, f"{name}[{index}]") for index, one in enumerate(value)]
    if value is None or isinstance(value, bool):
        return value
    return _OF_JSON[type(value)](value, name)


_OF_JSON = {kind: _plain(kind, None) for kind in (str, int, float)}


def _dataclass(kind: Any) -> _Decoder:
    def decoded(value: Any, name: str) -> Any:
        if not isinstance(value, dict):
            raise _refused(name, value, "an object")
        decoders = _decoders(kind)
        for key in value:
            if key not in decoders:
                raise WireError(f"{name} has the field {_shown(key)}, allowed are {', '.join(decoders)}")
        found = {}
        for field, (decoder, needed) in decoders.items():
            if field in value:
                found[field] = decoder(value[field], f"{name}.{field}")
            elif needed:
                raise WireError(f"{name}.{field} is missing, allowed is an object with that field")
        try:
            return kind(**found)
        except WireError:
            raise
        except (ZftuneError, ValueError) as error:  # what the class itself does not allow
            raise WireError(f"{name}: {error}") from error

    return decoded


@functools.lru_cache(maxsize=128)
def _decoders(kind: Any) -> Mapping[str, tuple[_Decoder, bool]]:
    """Of a dataclass's fields, each with whether a message must have it."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {
        name: (_decoder(hints[name]), one.default is MISSING and one.default_factory is MISSING)
        for name, one in _fields(kind).items()
    }


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
    if text.isascii():
        return True
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
