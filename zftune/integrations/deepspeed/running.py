"""What `zftune run` does in the process that trains: `deepspeed.initialize` is wrapped, and a line says so."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from zenflow import CheckpointError
from zftune.errors import BadInputError
from zftune.integrations.deepspeed.initializing import when_called, wrap
from zftune.integrations.deepspeed.section import Section

_FIELDS = ("preset", "online", "quality", "backend")


def begin(module: Any, wanted: Mapping[str, Any], called: Callable[[], None]) -> None:
    """Wrap, and let the first rank's lines be seen, and refusals without a traceback.

    Args:
        module: `deepspeed`, just imported.
        wanted: what `zftune run` was asked for.
        called: told of each call of `deepspeed.initialize`.
    """
    _show_lines()
    _show_refusals()
    when_called(called)
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


def _show_refusals() -> None:
    """What is refused later than in `initialize`, and caught by nobody, ends the process as there: a sentence and 2."""
    others = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        if not isinstance(error, (BadInputError, CheckpointError)) or _has_another_behind(error):
            others(kind, error, traceback)
            return
        stream = sys.__stderr__ or sys.stderr  # torch.distributed's hook collects sys.stderr, and drops it at an exit
        stream.write(f"zftune: {error}\n")
        raise SystemExit(2)

    sys.excepthook = show


def _has_another_behind(error: BaseException) -> bool:
    """Whether it came up while another error was handled, the script's perhaps; what it was made from is ours."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error.__context__ is not None and not error.__suppress_context__
