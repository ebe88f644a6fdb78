"""Put on PYTHONPATH by `make sanitize`: every interpreter then loads `zenflow._native` from $SANITIZED_NATIVE_FILE.

An editable install maps that name to its own build, ahead of sys.path, so a finder ahead of that one is needed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from types import ModuleType


class SanitizedNative:
    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return spec_from_file_location(name, os.environ["SANITIZED_NATIVE_FILE"]) if name == "zenflow._native" else None


sys.meta_path.insert(0, SanitizedNative)
