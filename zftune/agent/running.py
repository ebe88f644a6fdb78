"""What `zftune run` does in the process that trains: `deepspeed.initialize` is wrapped, and a line says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zftune.agent import show_lines, show_refusals
from zftune.integrations.deepspeed.initializing import when_called, wrap
from zftune.integrations.deepspeed.section import Section

_FIELDS = ("preset", "online", "quality", "backend")


def begin(module: Any, wanted: Mapping[str, Any], called: Callable[[], None]) -> None:
    """Wrap, and let the first rank's lines be seen, and refusals without a traceback."""
    show_lines(quiet=bool(wanted.get("quiet")))
    show_refusals()
    when_called(called)
    section = Section(**{name: wanted[name] for name in _FIELDS if wanted.get(name) is not None})
    wrap(module, section, ends_process=True)
