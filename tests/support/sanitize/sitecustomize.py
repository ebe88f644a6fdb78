"""For `make sanitize`: `zenflow._native` from $SANITIZED_NATIVE_FILE, by a finder ahead of an editable install's."""

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
