"""`zftune.preset/1`: a preset as a file. Who wrote it is not known: nothing in it is believed before it is checked."""

from __future__ import annotations

import json
import math
import os
import stat
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

from zftune.errors import BadInputError, StoreError
from zftune.store.types import Evidence, Hardware, Key, Model, Preset, Ratios

SCHEMA_NAME = "zftune.preset/1"
MAX_BYTES = 1 << 20
MAX_DEPTH = 8

_ALLOWED = f"it must be a file that `zftune presets export` wrote ({SCHEMA_NAME})"
_MAX_DIGITS = 20
_TEXT = 100
_PACKAGES = ("zftune", "python", "torch", "transformers", "deepspeed", "nvidia_driver")
"""Versions that an export tells; the operating system's may hold a name that somebody gave it."""


class _FaultyDocument(Exception):  # noqa: N818 - a finding, always turned into one of the public errors
    """What is wrong with a document."""


def document_of(preset: Preset) -> dict[str, Any]:
    """A preset as JSON: no host, no user, no path and no argument."""
    model, hardware = asdict(preset.model), asdict(preset.hardware)
    del model["model_id"], hardware["hw_id"]
    versions = {name: str(preset.versions[name]) for name in _PACKAGES if preset.versions.get(name)}
    return {
        "schema": SCHEMA_NAME,
        "name": preset.name,
        "key": asdict(preset.key),
        "model": {**model, "name": model_name(model["name"])},
        "hardware": {name: _text(value) if isinstance(value, str) else value for name, value in hardware.items()},
        "usable_cores": preset.usable_cores,
        "ratios": None if preset.ratios is None else asdict(preset.ratios),
        "versions": versions,
        "knobs": dict(preset.knobs),
        "evidence": asdict(preset.evidence),
    }


def check_preset(preset: Preset) -> None:
    """Refuse a preset that could not be exported and read again. Raises StoreError: says what is wrong with it."""
    try:
        _check(document_of(preset))
    except _FaultyDocument as fault:
        raise StoreError(f"preset '{_shown(preset.name)}': {fault}") from fault


def read_preset(path: str | Path) -> Preset:
    """The preset in a file; it is marked as imported. Raises BadInputError: it cannot be read, is too large, or is not
    a valid preset; nothing was changed.
    """
    try:
        document = _parse(_read(path))
        _check(document)
        return _preset_of(document)
    except _FaultyDocument as fault:
        raise BadInputError(f"'{_shown(str(path))}': {fault}; {_ALLOWED}") from fault


def escaped(text: str) -> str:
    """Text with everything that is not to be seen, or steers a terminal, written out."""
    return "".join(one if _is_harmless(one) else ascii(one)[1:-1] for one in text)


def _read(path: str | Path) -> bytes:
    """A regular file's bytes: no link is followed, no pipe waited for, and no more read than is allowed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise _FaultyDocument("is not a regular file")
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # a path with a null byte
        link = isinstance(error, OSError) and Path(path).is_symlink()
        raise _FaultyDocument("is a link" if link else f"cannot be read ({_why(error)})") from error
    if len(data) > MAX_BYTES:
        raise _FaultyDocument("is larger than 1 MiB")
    return data


def _why(error: Exception) -> str:
    return escaped(str(getattr(error, "strerror", None) or error))


def _parse(data: bytes) -> Any:
    try:
        text = data.decode("utf-8")
        if _depth(text) > MAX_DEPTH:
            raise _FaultyDocument(f"is nested deeper than {MAX_DEPTH}")
        return json.loads(text, object_pairs_hook=_object, parse_constant=_no_number, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise _FaultyDocument("is not JSON") from error


def _depth(text: str) -> int:
    """How deep brackets are nested outside strings."""
    deepest = depth = 0
    in_string = escape = False
    for one in text:
        if in_string:
            in_string = escape or one != '"'
            escape = one == "\\" and not escape
        elif one == '"':
            in_string = True
        elif one in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif one in "]}":
            depth -= 1
    return deepest


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise _FaultyDocument("says something twice")
    return made


def _no_number(name: str) -> NoReturn:
    raise _FaultyDocument(f"holds {name}, which is not a number")


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise _FaultyDocument("holds an integer that is too long")
    return int(digits)


def _check(document: Any) -> None:
    for text in _texts(document):
        if not all(_is_harmless(one) for one in text):
            raise _FaultyDocument(f"holds text with control characters ('{escaped(text)[:60]}')")
    if not isinstance(document, Mapping) or document.get("schema") != SCHEMA_NAME:
        raise _FaultyDocument("is not a preset")
    from jsonschema.exceptions import best_match

    from zenflow.names import nearest

    errors = list(_validator().iter_errors(document))
    for error in errors:
        known = error.schema.get("properties", {}) if error.validator == "additionalProperties" else {}
        for name in error.instance if known else ():
            if name not in known and (near := nearest(name, known)):
                where = ".".join([*map(str, error.absolute_path), name])
                raise _FaultyDocument(f"has the field {_shown(where)}, which there is not (did you mean {near})")
    error = best_match(errors)
    if error is not None:
        path = ".".join(str(part) for part in error.absolute_path) or "the document"
        raise _FaultyDocument(f"{escaped(path)[:60]}: {_short(escaped(error.message))}")
    _check_knobs(document["knobs"])


def _check_knobs(knobs: Mapping[str, Any]) -> None:
    """What the runtime's own check says about them together."""
    from zenflow import ConfigError, ZenFlowConfig

    try:
        ZenFlowConfig(**knobs)
    except ConfigError as error:
        raise _FaultyDocument(f"knobs: {_short(escaped(str(error)))}") from error


@cache
def _validator() -> Any:
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend

    def is_integer(_: Any, value: Any) -> bool:  # 4.0 is one for JSON Schema, and none for the runtime
        return isinstance(value, int) and not isinstance(value, bool)

    def is_number(_: Any, value: Any) -> bool:
        return is_integer(_, value) or (isinstance(value, float) and math.isfinite(value))

    types = Draft202012Validator.TYPE_CHECKER.redefine_many({"integer": is_integer, "number": is_number})
    text = resources.files("zftune.store").joinpath("preset.schema.json").read_text(encoding="utf-8")
    strict: Any = extend
    return strict(Draft202012Validator, type_checker=types)(json.loads(text))


def _preset_of(document: Mapping[str, Any]) -> Preset:
    key = Key(**document["key"])
    ratios = document["ratios"]
    return Preset(
        key=key,
        knobs=document["knobs"],
        evidence=Evidence(**document["evidence"]),
        model=Model(model_id=key.model_id, **document["model"]),
        hardware=Hardware(hw_id=key.hw_id, **document["hardware"]),
        name=document["name"],
        ratios=None if ratios is None else Ratios(**ratios),
        versions=document["versions"],
        usable_cores=document["usable_cores"],
        imported=True,
    )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield key
            yield from _texts(child)
    elif isinstance(value, list):
        for child in value:
            yield from _texts(child)


def _is_harmless(one: str) -> bool:
    # Controls, marks that turn the direction of text, surrogates, private use, and separators of lines.
    return (one.isascii() and one.isprintable()) or unicodedata.category(one)[0] not in "CZ"


def model_name(name: str | None) -> str | None:
    """A model's name without the folders that it was loaded from."""
    return None if name is None else _text(name.replace("\\", "/").rstrip("/").rpartition("/")[2])


def _text(value: str) -> str | None:
    return escaped(" ".join(value.split()))[:_TEXT] or None


def _short(message: str) -> str:
    return message if len(message) <= 160 else message[:159] + "…"


def _shown(path: str) -> str:
    return _short(escaped(path))
