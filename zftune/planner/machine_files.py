"""Machines as TOML files: those that come with zftune, and a user's own.

A file has `name`, `gpu` and `host` (texts), a table `[figures]` with every figure of a machine, and a table `[source]`
that says of each where it comes from: a published specification, a measurement, or "estimate: ...".
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from zftune.errors import BadInputError
from zftune.planner.facts import Machine

FIGURES = tuple(field.name for field in fields(Machine) if field.name not in ("name", "gpu", "source"))
_WHOLE = {"gpus", "device_memory_bytes", "cores", "host_memory_bytes"}
_MOST_BYTES = 1 << 20  # of a file: a machine takes three thousand


def machine_names() -> list[str]:
    """Names of the machines that come with the package."""
    return sorted(file.name.removesuffix(".toml") for file in _folder().iterdir() if file.name.endswith(".toml"))


def load_machine(name_or_path: str) -> Machine:
    """A machine by its name, or from a TOML file.

    Raises:
        BadInputError: there is no such machine, or the file is not a valid one.
    """
    names = machine_names()
    if name_or_path.lower() in names:
        text = (_folder() / f"{name_or_path.lower()}.toml").read_text(encoding="utf-8")
        return parse_machine(text, name_or_path)
    try:
        found = Path(name_or_path).is_file()
    except OSError:  # a name that is too long
        found = False
    if not found:
        raise BadInputError(f"--hardware '{name_or_path}': allowed are here, {', '.join(names)}, or a TOML file")
    try:
        if Path(name_or_path).stat().st_size > _MOST_BYTES:
            raise BadInputError(f"--hardware '{name_or_path}': allowed is a file of at most {_MOST_BYTES} bytes")
        text = Path(name_or_path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"--hardware '{name_or_path}': allowed is a readable TOML file ({error})") from error
    return parse_machine(text, name_or_path)


def parse_machine(text: str, origin: str) -> Machine:
    """A machine from its file's text.

    Args:
        text: TOML.
        origin: what to call it in errors.

    Raises:
        BadInputError: a figure or its source is missing, unknown, or not allowed.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInputError(f"--hardware '{origin}': allowed is a file of valid TOML ({error})") from error
    unknown = set(document) - {"name", "gpu", "host", "figures", "source"}
    if unknown:
        raise BadInputError(
            f"--hardware '{origin}': has {min(unknown)!r}, allowed are name, gpu, host, [figures] and [source]"
        )
    for key in ("name", "gpu"):
        if not isinstance(document.get(key), str):
            raise BadInputError(f"--hardware '{origin}': {key} is {document.get(key)!r}, allowed is a text")
    figures, source = _table(document, "figures", origin), _table(document, "source", origin)
    for key in FIGURES:
        _check(key, figures.get(key), origin)
        if not isinstance(source.get(key), str) or not source[key]:
            raise BadInputError(
                f"--hardware '{origin}': source.{key} is {source.get(key)!r}, allowed is a text that says "
                "where the figure comes from"
            )
    return Machine(name=document["name"], gpu=document["gpu"], source=dict(source), **figures)


def _table(document: Mapping[str, Any], name: str, origin: str) -> Mapping[str, Any]:
    table = document.get(name)
    if not isinstance(table, dict):
        raise BadInputError(f"--hardware '{origin}': has no [{name}], needed are {', '.join(FIGURES)}")
    unknown = set(table) - set(FIGURES)
    if unknown:
        raise BadInputError(f"--hardware '{origin}': has {name}.{min(unknown)}, allowed are {', '.join(FIGURES)}")
    return table


def _check(key: str, value: Any, origin: str) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    whole = key not in _WHOLE or isinstance(value, int)
    most = 1.0 if key == "compute_share" else sys.float_info.max
    if not number or not whole or not 0 < value <= most:
        kind = "an integer > 0" if key in _WHOLE else "a number above 0, at most 1" if most == 1.0 else "a number > 0"
        raise BadInputError(f"--hardware '{origin}': figures.{key} is {value!r}, allowed is {kind}")


def _folder() -> Traversable:
    return resources.files("zftune") / "machines"
