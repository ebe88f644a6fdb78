"""What `zftune run` does in the process that trains: `deepspeed.initialize` is wrapped, and a line says so."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from zftune.integrations.deepspeed.initializing import wrap
from zftune.integrations.deepspeed.section import Section

_FIELDS = ("preset", "online", "quality", "backend")


def begin(module: Any, wanted: Mapping[str, Any]) -> None:
    """Wrap, and let the first rank's lines be seen.

    Args:
        module: `deepspeed`, just imported.
        wanted: what `zftune run` was asked for.
    """
    _show_lines()
    section = Section(**{name: wanted[name] for name in _FIELDS if wanted.get(name) is not None})
    wrap(module, section, ends_process=True)


def _show_lines() -> None:
    logger = logging.getLogger("zftune")
    if os.environ.get("RANK", "0") != "0":
        logger.setLevel(logging.ERROR)
        return
    logger.setLevel(logging.INFO)
    if not logging.getLogger().handlers and not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
