"""What a message looks like, as JSON schema: for the daemon's OpenAPI document."""

from __future__ import annotations

import enum
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, Literal

from zftune.daemon.wire.codec import MOST_ITEMS, MOST_TEXT, Limit

_NUMBERS = {int: "integer", float: "number"}


def schema(kind: Any, limit: Limit | None = None) -> dict[str, Any]:
    """The schema of a dataclass, or of a field's annotation.

    Args:
        kind: as `decode` takes it.
        limit: of it.
    """
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return schema(inner[0], next((one for one in inner[1:] if isinstance(one, Limit)), limit))
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [schema(one, limit) for one in inner]}
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (tuple, frozenset):
        return _array(inner, limit)
    if kind is Any:
        return {}
    if origin is not None and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": schema(inner[1]), **_length("Properties", limit, MOST_ITEMS)}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return {"enum": [one.value for one in kind]}
    if is_dataclass(kind):
        return _object(kind)
    if kind in _NUMBERS:
        return {"type": _NUMBERS[kind], **_range(limit)}
    if kind is str:
        form = {"pattern": f"^{limit.pattern}$"} if limit is not None and limit.pattern else {}
        return {"type": "string", **_length("Length", limit, MOST_TEXT), **form}
    return {"type": "boolean" if kind is bool else "null"}


def _object(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    own = fields(kind)
    return {
        "type": "object",
        "title": kind.__name__,
        "description": (kind.__doc__ or "").strip().partition("\n")[0],
        "properties": {one.name: schema(hints[one.name]) for one in own},
        "required": [one.name for one in own if one.default is MISSING and one.default_factory is MISSING],
        "additionalProperties": False,
    }


def _array(inner: tuple[Any, ...], limit: Limit | None) -> dict[str, Any]:
    if inner[-1] is Ellipsis or len(inner) == 1:
        return {"type": "array", "items": schema(inner[0]), **_length("Items", limit, MOST_ITEMS)}
    fixed = {"minItems": len(inner), "maxItems": len(inner)}
    return {"type": "array", "prefixItems": [schema(one) for one in inner], **fixed}


def _length(noun: str, limit: Limit | None, most: int) -> dict[str, Any]:
    limit = limit or Limit(0, most)
    return {f"min{noun}": int(limit.least), f"max{noun}": int(limit.most)}


def _range(limit: Limit | None) -> dict[str, Any]:
    if limit is None:
        return {}
    found: dict[str, Any] = {"minimum": limit.least}
    return {**found, "maximum": limit.most} if math.isfinite(limit.most) else found
