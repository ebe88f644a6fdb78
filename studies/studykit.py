"""What every study's run.py shares: its arguments, results that a later run resumes from, where figures come from."""

from __future__ import annotations

import argparse
import ast
import datetime
import functools
import hashlib
import importlib
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from zftune.telemetry import hardware, software

ROOT = Path(__file__).parents[1]
SCHEMA = "zftune.study/1"
RECORDED_AT = "6a9c4c73"
"""The last commit with the records of full runs: in `results/`, only tables and pictures are under version control."""


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every study takes."""
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--quick", action="store_true", help="a short form, under a minute; kept apart")
    arguments.add_argument("--json", type=Path, metavar="PATH", help="also write everything to this file")
    arguments.add_argument("--again", action="store_true", help="measure again what is there already")
    arguments.add_argument("--results", type=Path, metavar="FOLDER", help="where results are kept")
    return arguments


@dataclass(frozen=True, slots=True)
class Results:
    """One file for each finished measurement, so that a run resumes where the last one stopped."""

    folder: Path

    @classmethod
    def of(cls, study: Path, arguments: argparse.Namespace) -> Results:
        """The folder that the arguments ask for: by default the study's own, for short runs one below it."""
        default = study / "results" / "quick" if arguments.quick else study / "results"
        folder: Path = arguments.results or default
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder)

    def load(self, name: str, inputs: Mapping[str, Any]) -> dict[str, Any] | None:
        """A finished measurement's record; None if there is none of exactly these inputs."""
        try:
            record: dict[str, Any] = json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return record if record.get("inputs") == json.loads(json.dumps(inputs)) else None

    def save(self, name: str, inputs: Mapping[str, Any], figures: Mapping[str, Any]) -> dict[str, Any]:
        """Keep a finished measurement; all of it or nothing."""
        record = {"schema": SCHEMA, "inputs": inputs, "figures": figures, "provenance": provenance()}
        write_json(self.folder / f"{name}.json", record)
        return record


@dataclass(frozen=True, slots=True)
class Job:
    """A measurement in a process of its own, beside others where this machine's speed does not matter."""

    name: str
    """Of its file."""
    inputs: Mapping[str, Any]
    function: Callable[..., Mapping[str, Any]]
    """Gives the figures; of a module, as it is called in another process."""
    arguments: tuple[Any, ...]


def done(
    results: Results,
    jobs: Sequence[Job],
    *,
    again: bool = False,
    tell: Callable[[int], None],
    workers: int | None = None,
) -> list[dict[str, Any]]:
    """The figures of every job, in order: from the files of results, or else worked out now.

    Args:
        results: of the study; a job's are there as soon as it is finished.
        jobs: to do.
        again: whether to do in any case what is there already.
        tell: told how many are finished.
        workers: jobs at a time, each in a process; None: one on each core.
    """
    records = [None if again else results.load(job.name, job.inputs) for job in jobs]
    missing = [number for number, record in enumerate(records) if record is None]
    tell(len(jobs) - len(missing))
    if missing:
        with ProcessPoolExecutor(workers or os.cpu_count(), mp_context=get_context("spawn")) as pool:
            running = {pool.submit(jobs[number].function, *jobs[number].arguments): number for number in missing}
            for count, future in enumerate(as_completed(running), 1):
                job = jobs[running[future]]
                records[running[future]] = results.save(job.name, job.inputs, future.result())
                tell(len(jobs) - len(missing) + count)
    return [json.loads(json.dumps(record["figures"])) for record in records if record is not None]


def missing(*studies: str) -> str:
    """Says which studies have no records here, and how to get those of the last full run."""
    folders = [f"studies/{name}/results" for name in studies]
    return f"no records in {', '.join(folders)}: git archive {RECORDED_AT} {' '.join(folders)} | tar x restores them"


def of_study(study: str, module: str) -> Any:
    """A module of another study, by its dotted name."""
    folder = str(ROOT / "studies" / study)
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(module)


def write_json(path: Path, document: Any) -> None:
    """Write a file in one go."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(path)


def provenance() -> dict[str, Any]:
    """When and on what: date, machine, versions, load (runnable processes over the last minute)."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"when": now, "hardware": hardware(), "software": software(), "load_1min": round(os.getloadavg()[0], 2)}


def code_digest(*folders_or_files: str) -> str:
    """Hash of what source files do, so that a change of it is a change of inputs.

    In Python comments, docstrings, layout and imports do not count, nor which of the files has what. Other files, such
    as C++, count as they are; of a folder, Python and TOML count.
    """
    said: set[str] = set()
    for part in folders_or_files:
        path = ROOT / part
        for file in path.rglob("*") if path.is_dir() else [path]:
            if file.suffix in (".py", ".toml") or file == path:
                said.update(_statements(file))
    return hashlib.sha256("\n".join(sorted(said)).encode()).hexdigest()[:16]


@functools.cache
def _statements(file: Path) -> frozenset[str]:
    text = file.read_text(encoding="utf-8")
    return frozenset(map(_said, ast.parse(text).body) if file.suffix == ".py" else [text])


def _said(node: object) -> str:
    """What a part of a program does, the same from every Python that can read it; "" where it does nothing."""
    if isinstance(node, ast.Import | ast.ImportFrom) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ):
        return ""
    if isinstance(node, list):
        return f"[{','.join(filter(None, map(_said, node)))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, value) for name, value in ast.iter_fields(node) if value is not None and value != [])
    return f"{type(node).__name__}({','.join(f'{name}={_said(value)}' for name, value in fields)})"


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median and the 5th and 95th percentile, interpolated; and how many values there were."""
    ordered = sorted(values)
    return {
        "median": statistics.median(ordered),
        "p5": percentile(ordered, 0.05),
        "p95": percentile(ordered, 0.95),
        "n": len(ordered),
    }


def percentile(ordered: Sequence[float], share: float) -> float:
    """A percentile of ascending values, linear between neighbours."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
