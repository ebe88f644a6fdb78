"""A line of the log: its fields, its priority for the journal, and whom it is for."""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from zftune.daemon.process import JsonFormatter, log_to


def record(level: int, message: str, *arguments: object, **fields: object) -> logging.LogRecord:
    made = logging.getLogger("zftune.x").makeRecord("zftune.x", level, "f", 1, message, arguments, None, extra=fields)
    made.created, made.msecs = 86400.25, 250.0
    return made


def test_a_json_line_has_the_records_fields() -> None:
    line = JsonFormatter().format(
        record(logging.INFO, "adopted %s\nof %d", "k", 3, run_id="r1", knobs={"topk_ratio": 0.1})
    )
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "1970-01-02T00:00:00.250Z",
        "level": "info",
        "logger": "zftune.x",
        "message": "adopted k\nof 3",
        "run_id": "r1",
        "knobs": {"topk_ratio": 0.1},
    }


def test_an_exception_stays_on_its_line() -> None:
    failed = record(logging.ERROR, "failed")
    try:
        raise ValueError("why")
    except ValueError as error:
        failed.exc_info = (type(error), error, error.__traceback__)
    line = JsonFormatter().format(failed)
    assert "\n" not in line
    assert json.loads(line)["exception"].endswith("ValueError: why")


@pytest.mark.parametrize(
    ("level", "priority"), [(logging.CRITICAL, 3), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (10, 7)]
)
def test_the_journal_gets_priorities(level: int, priority: int) -> None:
    assert JsonFormatter(journal=True).format(record(level, "m")).startswith(f'<{priority}>{{"time"')


@pytest.fixture
def _as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    uvicorn = logging.getLogger("uvicorn").level
    yield
    root.handlers[:], root.level = handlers, level
    logging.getLogger("uvicorn").setLevel(uvicorn)


@pytest.mark.usefixtures("_as_it_was")
def test_the_journal_is_known_by_its_stream(tmp_path: Path) -> None:
    for same in (True, False):
        with (tmp_path / "stream").open("w+") as stream:
            found = os.fstat(stream.fileno())
            log_to(stream, {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino if same else 1}"})
            logging.getLogger("zftune.x").warning("hear")
            stream.seek(0)
            assert stream.read().startswith("<4>{" if same else '{"time"')
    log_to(io.StringIO(), {"JOURNAL_STREAM": "1:1"})  # what has no descriptor is no journal
