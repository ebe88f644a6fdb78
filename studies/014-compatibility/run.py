"""What trains under DeepSpeed with zftune's backends and without zftune, what is refused, what goes wrong?

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import deepspeedkit  # noqa: E402
from compatibility import cells, report, scripts  # noqa: E402
from compatibility.cells import Cell  # noqa: E402
from rich.console import Console  # noqa: E402
from studykit import Results, code_digest, parser, write_json  # noqa: E402

PACKAGES = ("deepspeed", "torch", "transformers", "accelerate")
MEASURES = [f"studies/014-compatibility/compatibility/{part}.py" for part in ("cells", "oracle", "training", "worker")]
MEASURES.append("studies/014-compatibility/compatibility/idioms")
CODE = ("runtime/zenflow", "zftune/integrations", *MEASURES)


class WorkerError(Exception):
    """The worker ended before its cells did; the message has its last lines."""


def environment(folder: Path) -> dict[str, str]:
    """Of every process: where DeepSpeed's operations are compiled, the ninja for it, and a store of its own.

    Args:
        folder: for the store.
    """
    own = {"OMP_NUM_THREADS": "1", "ZFTUNE_DB": str(folder / "zftune.db")}
    return {**os.environ, **deepspeedkit.environment(), **own}


def tried(table: Sequence[Cell], say: Callable[[str], None], folder: Path) -> dict[str, Any]:
    """Try cells in a worker.

    Args:
        table: the cells.
        say: told how far it is.
        folder: for what the worker reads and prints.

    Raises:
        WorkerError: it ended early.
    """
    given, log = folder / "cells.json", folder / "log"
    given.write_text(json.dumps([asdict(cell) for cell in table]), encoding="utf-8")
    figures: dict[str, Any] = {}
    with log.open("w", encoding="utf-8") as output:
        command = [sys.executable, str(HERE / "compatibility" / "worker.py"), str(given)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=output, cwd=folder, env=environment(folder), text=True
        ) as worker:
            assert worker.stdout is not None
            for line in worker.stdout:
                answer = json.loads(line)
                figures[answer["name"]] = answer["figures"]
                say(f"{answer['name']} ({len(figures)} of {len(table)})")
    if worker.returncode or len(figures) < len(table):
        raise WorkerError("\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]))
    return figures


def scripts_tried(say: Callable[[str], None], folder: Path) -> dict[str, Any]:
    """Run each script on each side.

    Args:
        say: told which one runs.
        folder: for what they print.
    """
    figures = {}
    for name in scripts.EXAMPLES:
        for side in cells.SIDES:
            say(f"{name}, {side}")
            figures[f"{name}, {side}"] = scripts.run_script(name, side, environment(folder), folder / "log")
    return figures


def inputs_of(what: Any) -> dict[str, Any]:
    """What a table's record depends on."""
    versions = {package: metadata.version(package) for package in PACKAGES}
    return {"what": what, "versions": versions, "code": code_digest(*CODE)}


def measured(
    results: Results, tables: Mapping[str, Sequence[Cell]], arguments: argparse.Namespace, say: Callable[[str], None]
) -> dict[str, Any]:
    """A record for each table: of now, unless one of the same inputs is there."""
    records: dict[str, Any] = {}

    def take(name: str, what: Any, attempt: Callable[[Path], dict[str, Any]]) -> None:
        inputs = inputs_of(what)
        file = name.lower()
        record = None if arguments.again else results.load(file, inputs)
        if record is None:
            with tempfile.TemporaryDirectory() as folder:
                record = results.save(file, inputs, attempt(Path(folder)))
        records[name] = record

    for name, table in tables.items():
        take(name, [cell.name for cell in table], partial(tried, table, say))
    if not arguments.quick:
        commands = {
            f"{name}, {side}": scripts.command_of(name, side) for name in scripts.EXAMPLES for side in cells.SIDES
        }
        take("scripts", commands, partial(scripts_tried, say))
    return records


def main(argv: Sequence[str] | None = None) -> int:
    """Try what is missing and print the tables; 1 if the backend zenflow goes wrong or fails in a cell."""
    arguments = parser(__doc__ or "").parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 200)
    if arguments.quick and not deepspeedkit.compiled():
        console.print("DeepSpeed's operations are not compiled yet, and a short run does not; a full run does")
        return 0
    results = Results.of(HERE, arguments)
    tables = cells.quick() if arguments.quick else cells.tables()
    try:
        with Console(stderr=True).status("") as status:
            records = measured(results, tables, arguments, status.update)
    except WorkerError as error:
        console.print(f"the worker ended:\n{error}", markup=False)
        return 1
    found = report.found_of(tables, records)
    text = report.markdown(tables, records)
    console.print(text, markup=False)
    for side in cells.SIDES:
        console.print(f"{report.HEADS[side]}: {report.counts(found, side)}")
    if results.folder == HERE / "results":
        report.into(HERE / "README.md", text)
    if arguments.json:
        rows = [[table, *key, asdict(one)] for table, each in found.items() for key, one in each.items()]
        write_json(arguments.json, {"study": HERE.name, "quick": arguments.quick, "cells": rows, "records": records})
    return 1 if any(report.counts(found, "zenflow")[word] for word in ("wrong", "fails")) else 0


if __name__ == "__main__":
    raise SystemExit(main())
