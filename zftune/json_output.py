"""What `--json PATH` writes: a whole file or none, and a path that is refused before minutes are spent."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zftune.errors import BadInputError, ZftuneError

STANDARD_OUTPUT = "-"


def check_json_path(path: str) -> None:
    """Refuse a path that `write_json` could not write.

    Raises:
        BadInputError: it is a folder, or lies in a folder that is missing or cannot be written.
    """
    if path == STANDARD_OUTPUT:
        return
    target = Path(path)
    try:
        ok = os.access(target if _is_special(target) else target.parent, os.W_OK) and not target.is_dir()
        ok = ok and target.parent.is_dir()
    except OSError:  # a name that is too long
        ok = False
    if not ok:
        raise BadInputError(f"--json '{path}': allowed is a file in a folder that exists and can be written, or -")


def write_json(document: Mapping[str, Any], path: str) -> None:
    """Write `document` to a file, replacing what was there at once, or to standard output.

    Raises:
        ZftuneError: the file cannot be written; what was there is left as it was.
    """
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    if path == STANDARD_OUTPUT:
        sys.stdout.write(text)
        return
    target = Path(path)
    try:
        if _is_special(target):
            target.write_text(text, encoding="utf-8")
        else:
            _replace(target.resolve(), text)
    except OSError as error:
        raise ZftuneError(f"--json '{path}': cannot be written ({error.strerror})") from error


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
