"""Reading a profile from a file that anybody may have given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from zftune.errors import BadInputError, ProfileError
from zftune.profile.schema import SCHEMA_NAME, validate

_ALLOWED = "allowed is a file that `zftune profile --json` wrote"


def read_profile(path: str) -> dict[str, Any]:
    """The profile document in a file.

    Raises:
        BadInputError: it cannot be read, is not JSON, or is not a valid profile.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInputError(f"'{path}': cannot be read ({error.strerror or error}), {_ALLOWED}") from error
    except (ValueError, RecursionError) as error:  # of bytes that are no text, a path that is none, and of JSON
        raise BadInputError(f"'{path}': is not JSON, {_ALLOWED}") from error
    name = document.get("schema") if isinstance(document, dict) else None
    if name != SCHEMA_NAME:
        _refuse(path, "has no schema" if name is None else f"has the schema {name!r:.60}")
    try:
        validate(document)
    except ProfileError as error:
        _refuse(path, f"is not a valid profile ({str(error).removeprefix('profile: ')})", error)
    return dict(document)


def _refuse(path: str, fault: str, cause: Exception | None = None) -> NoReturn:
    raise BadInputError(f"'{path}': {fault}, {_ALLOWED} ({SCHEMA_NAME})") from cause
