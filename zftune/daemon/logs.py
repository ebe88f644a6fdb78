"""The daemon's log, on standard error: for people on a terminal, else one JSON object a line.

What a record carries by `extra` (run_id, trial, step, knobs, reason) becomes fields.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from typing import Any, TextIO

_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
_PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))


def log_to(stream: TextIO, environment: Mapping[str, str]) -> None:
    """Send the log of this process to a stream, in the form that suits it.

    Args:
        stream: standard error.
        environment: $JOURNAL_STREAM tells whether it ends in systemd's journal.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        HumanFormatter() if stream.isatty() else JsonFormatter(journal=_is_journal(stream, environment))
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    for name in ("uvicorn", "alembic", "optuna"):
        logging.getLogger(name).setLevel(logging.WARNING)  # their greetings


class HumanFormatter(logging.Formatter):
    """Time, level where it matters, and the message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - its name is logging's
        line = super().formatMessage(record)
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items())
        level = "" if record.levelno <= logging.INFO else f" [{record.levelname.lower()}]"
        return f"{line}{level}{fields}"


class JsonFormatter(logging.Formatter):
    """One object a line.

    Args:
        journal: whether each line begins with its priority, as systemd's journal reads it.
    """

    def __init__(self, *, journal: bool = False) -> None:
        super().__init__()
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        prefix = f"<{self._priority(record.levelno)}>" if self._journal else ""
        return prefix + json.dumps(line, default=str)

    @staticmethod
    def _priority(level: int) -> int:
        return next((priority for least, priority in _PRIORITIES if level >= least), 7)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _USUAL}


def _is_journal(stream: TextIO, environment: Mapping[str, str]) -> bool:
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return environment.get("JOURNAL_STREAM", "") == f"{found.st_dev}:{found.st_ino}"
