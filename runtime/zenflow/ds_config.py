"""The text of a ds_config, read as DeepSpeed reads it, and its old forms as DeepSpeed understands them."""

from __future__ import annotations

import base64
import copy
import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from zenflow.errors import ConfigError

_TRUE = ("true", "1", "1.0", "yes", "on", "t", "y")  # what pydantic takes for true


class Parsed(NamedTuple):
    """What a text says."""

    value: Any
    duplicates: tuple[str, ...] = ()
    """Names that stand twice in one object."""
    flaw: str | None = None
    """Why it is not plain JSON, with line and column; None: it is."""


def parse(text: str) -> Parsed:
    """Read JSON or, where it is none, Hjson: with comments, trailing commas and unquoted names, as DeepSpeed does.

    Args:
        text: of a file.

    Raises:
        ConfigError: it is neither; with line and column.
    """
    duplicates: list[str] = []

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        duplicates.extend(name for name in found if sum(name == other for other, _ in pairs) > 1)
        return found

    try:
        value = json.loads(text, object_pairs_hook=collect, parse_constant=_refuse_constant)
        return Parsed(value, tuple(duplicates))
    except RecursionError as error:
        raise ConfigError("is nested too deeply") from error
    except ValueError as error:
        duplicates.clear()
        flaw = _where(error)
        return Parsed(_as_hjson(text, collect, flaw), tuple(duplicates), flaw)


def read_ds_config_file(path: str | Path) -> Parsed:
    """Read a file that holds a ds_config.

    Raises:
        ConfigError: it cannot be read, is neither JSON nor Hjson, or holds no object.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8")  # its line ends as they are
    except OSError as error:
        raise ConfigError(f"ds_config is '{path}', allowed is a readable JSON file ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"ds_config is '{path}', allowed is a file of valid JSON ({error})") from error
    try:
        parsed = parse(text)
    except ConfigError as error:
        raise ConfigError(f"ds_config is '{path}', allowed is a file of valid JSON (it {error})") from error
    if not isinstance(parsed.value, Mapping) or not text.strip():  # to Hjson an empty file is an object
        raise ConfigError(f"ds_config is '{path}', allowed is a file that holds a JSON object")
    return parsed


def decode(text: str) -> str:
    """The text in URL-safe base64, in which DeepSpeed takes a ds_config on a command line.

    Raises:
        ValueError: it is not that.
    """
    return base64.urlsafe_b64decode(text).decode("utf-8")


def modernized(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which old names are replaced as DeepSpeed replaces them.

    `zero_optimization: true` is stage 1; `cpu_offload: true` and `cpu_offload_param: true` are the sections
    `offload_optimizer` and `offload_param` with device "cpu". Beside those sections DeepSpeed refuses them: they stay.
    """
    changed = copy.deepcopy(dict(config))
    zero = changed.get("zero_optimization")
    if isinstance(zero, bool):
        changed["zero_optimization"] = {"stage": int(zero)}
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if isinstance(zero, Mapping) and str(zero.get(old)).lower() in _TRUE and new not in zero:
            section = changed["zero_optimization"]
            del section[old]
            section[new] = {"device": "cpu"}
    return changed


def _refuse_constant(name: str) -> NoReturn:
    """NaN and Infinity are no JSON; Hjson takes them for words."""
    raise ValueError(f"{name} is no JSON")


def _where(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"line {error.lineno}, column {error.colno}: {error.msg[:1].lower()}{error.msg[1:]}"
    return str(error).partition("\n")[0][:120]


def _as_hjson(text: str, collect: Any, flaw: str) -> Any:
    try:
        hjson = importlib.import_module("hjson")
    except ImportError:
        try:
            return json.loads(text, object_pairs_hook=collect)  # with NaN and Infinity, as Python's own reader
        except ValueError:
            raise ConfigError(f"is not JSON ({flaw})") from None
    try:
        return hjson.loads(text, object_pairs_hook=collect)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"is neither JSON ({flaw}) nor Hjson ({str(error).partition(chr(10))[0][:120]})") from error
