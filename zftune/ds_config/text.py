"""A ds_config in any form that DeepSpeed takes, read as DeepSpeed (0.19.6) reads it.

The text of a file or of URL-safe base64 is Hjson, of which JSON is a part. A number
without a fraction is an integer, however it is written: 4.0 and 5e8 are 4 and 500000000. NaN and Infinity are words. In
a file no section may hold a name twice, in base64 the last one counts. DeepSpeed reads files in the locale's encoding;
here they are UTF-8.
"""

from __future__ import annotations

import base64
import copy
import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from zenflow import ConfigError

_WHOLE_BELOW = 1e10  # from here on Hjson leaves a number as it is


class Parsed(NamedTuple):
    """A text that was read."""

    value: Any
    duplicates: tuple[str, ...] = ()
    """Names that stand twice in one section; the last one counts."""
    flaw: str | None = None
    """Why it is not plain JSON, with line and column; None: it is."""
    text: str = ""


def load(source: object) -> dict[str, Any]:
    """A ds_config (a dictionary, the path of a file, or URL-safe base64) as a copy.

    Raises ConfigError if it cannot be read, holds no object, or is a file in which a section holds a name twice.
    """
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    if not isinstance(source, (str, Path)):
        raise ConfigError.of("ds_config", source, "a JSON object, the path of a file, or base64")
    parsed = None if _is_there(source) else _from_base64(str(source))
    if parsed is None:
        parsed = read_file(source)
        refuse_duplicates(parsed.duplicates, source)
    return dict(parsed.value)


def read_file(path: str | Path) -> Parsed:
    """Read a file that holds a ds_config.

    Raises ConfigError if it cannot be read, is neither JSON nor Hjson, or holds no object.
    """
    try:
        parsed = parse(Path(path).read_bytes().decode("utf-8"))  # its line ends as they are
    except OSError as error:
        raise ConfigError(f"ds_config '{path}' cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"ds_config '{path}' cannot be read: it is not UTF-8 text") from error
    except ValueError as error:  # a NUL in the path, or a ConfigError of the text
        raise ConfigError(f"ds_config '{path}' cannot be read: {error}") from error
    if not isinstance(parsed.value, Mapping) or not parsed.text.strip():  # to Hjson an empty file is an object
        raise ConfigError(f"ds_config '{path}' cannot be read: it holds no JSON object")
    return parsed


def refuse_duplicates(names: Sequence[str], path: str | Path) -> None:
    """Raise ConfigError for a file in which names stand twice in one section, as DeepSpeed does."""
    if names:
        raise ConfigError(f"ds_config '{path}' cannot be read: {names[0]} stands twice in one section")


def parse(text: str) -> Parsed:
    """Read JSON or, where it is none, Hjson; raises ConfigError with line and column if it is neither."""
    duplicates: list[str] = []

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        duplicates.extend(name for name in found if sum(name == other for other, _ in pairs) > 1)
        return found

    try:
        value = json.loads(text, object_pairs_hook=collect, parse_constant=_refuse_constant, parse_float=_number)
        return Parsed(value, tuple(duplicates), None, text)
    except RecursionError as error:
        raise ConfigError("it is nested too deeply") from error
    except ValueError as error:
        duplicates.clear()
        flaw = _where(error)
        return Parsed(_as_hjson(text, collect, flaw), tuple(duplicates), flaw, text)


def _is_there(source: str | Path) -> bool:
    try:
        return Path(source).exists()
    except (OSError, ValueError):  # too long for a name, or no name at all: base64
        return False


def _from_base64(text: str) -> Parsed | None:
    """None: it is no ds_config in base64, so it was meant for a path."""
    try:
        parsed = parse(base64.urlsafe_b64decode(text).decode("utf-8"))
    except ValueError:  # a ConfigError is one, too
        return None
    return parsed if isinstance(parsed.value, Mapping) and parsed.text else None


def _number(digits: str) -> float:
    number = float(digits)
    return int(number) if abs(number) < _WHOLE_BELOW and number.is_integer() else number


def _refuse_constant(name: str) -> NoReturn:
    """NaN and Infinity are no JSON; Hjson takes them for words."""
    raise ValueError(f"{name} is no JSON")


def _where(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"line {error.lineno}, column {error.colno}: {error.msg[:1].lower()}{error.msg[1:]}"
    return str(error).partition("\n")[0][:120]


def _as_hjson(text: str, collect: Any, flaw: str) -> Any:
    try:
        hjson = importlib.import_module("hjson")
    except ImportError:
        try:
            return json.loads(text, object_pairs_hook=collect, parse_constant=str, parse_float=_number)
        except ValueError:
            raise ConfigError(f"it is not JSON ({flaw})") from None
    try:
        return hjson.loads(text, object_pairs_hook=collect)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"it is neither JSON ({flaw}) nor Hjson ({_where(error)})") from error
