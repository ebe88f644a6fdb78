"""What `--json PATH` and its like write: a whole file or none, and a path that is refused before minutes are spent."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zftune.errors import BadInputError, ZftuneError, require

STANDARD_OUTPUT = "-"


def check_output_path(path: str | None, option: str = "--json", *, standard_output: bool = True) -> None:
    """Refuse a path that cannot be written.

    Args:
        standard_output: whether "-" is allowed and means standard output.

    Raises:
        BadInputError: it is a folder, or lies in a folder that is missing or cannot be written.
        MissingPackageError: a page needs plotly.
    """
    if path is None:
        return
    if option == "--html":
        require("plotly", option)
    if path == STANDARD_OUTPUT and standard_output:
        return
    target = Path(path)
    try:
        ok = os.access(target if _is_special(target) else target.parent, os.W_OK) and not target.is_dir()
        ok = ok and target.parent.is_dir()
    except OSError:  # a name that is too long
        ok = False
    if not ok or path == STANDARD_OUTPUT:
        also = ", or -" if standard_output else ""
        raise BadInputError(f"{option} '{path}' cannot be written: give a file in a folder that exists{also}")


def write_json(document: Mapping[str, Any], path: str | None) -> None:
    """Write `document` to a file, replacing what was there at once, or to standard output; None: nowhere.

    Raises:
        ZftuneError: the file cannot be written; what was there is left as it was.
    """
    if path is None:
        return
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    if path == STANDARD_OUTPUT:
        sys.stdout.write(text)
    else:
        write_text(text, path, option="--json")


def write_text(text: str, path: str | Path, *, option: str) -> None:
    """Write a file, replacing what was there at once.

    Raises:
        ZftuneError: the file cannot be written; what was there is left as it was.
    """
    target = Path(path)
    try:
        if _is_special(target):
            target.write_text(text, encoding="utf-8")
        else:
            _replace(target.resolve(), text)
    except OSError as error:
        raise ZftuneError(f"{option} '{path}': cannot be written ({error.strerror})") from error


def _replace(target: Path, text: str) -> None:
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(target)  # a reader never sees half a file
    finally:
        partial.unlink(missing_ok=True)


def _is_special(path: Path) -> bool:
    """Whether it is a pipe or a device, which is written to and must not be replaced by a file."""
    return path.exists() and not path.is_file() and not path.is_dir()
