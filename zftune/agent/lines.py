"""What `zftune run` lets be seen in the process that trains: the first rank's lines, and refusals in one sentence."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from zftune.errors import BadInputError

_MARK = "_zftune_shows_refusals"


def is_first_rank() -> bool:
    """Whether this process speaks for the run."""
    return os.environ.get("RANK", "0") == "0"


def show_lines() -> None:
    """Let what is logged be seen, of the first rank."""
    logger = logging.getLogger("zftune")
    if not is_first_rank():
        logger.setLevel(logging.ERROR)
        return
    logger.setLevel(logging.INFO)
    if not logging.getLogger().handlers and not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.propagate = False


def show_refusals() -> None:
    """What is refused while the script runs, and caught by nobody, ends the process: a sentence and 2."""
    others = sys.excepthook
    if hasattr(others, _MARK):
        return

    def show(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        from zenflow import CheckpointError  # not before: the import of zenflow comes by here

        if not isinstance(error, (BadInputError, CheckpointError)) or _has_another_behind(error):
            others(kind, error, traceback)
            return
        stream = sys.__stderr__ or sys.stderr  # torch.distributed's hook collects sys.stderr, and drops it at an exit
        stream.write(f"zftune: {error}\n")
        raise SystemExit(2)

    setattr(show, _MARK, True)
    sys.excepthook = show


def _has_another_behind(error: BaseException) -> bool:
    """Whether it came up while another error was handled, the script's perhaps; what it was made from is ours."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error.__context__ is not None and not error.__suppress_context__
