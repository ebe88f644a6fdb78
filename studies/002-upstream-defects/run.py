"""Which defects of DeepSpeed's ZenFlow can be shown on this machine, and what does this runtime do in the same case?

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import deepspeedkit  # noqa: E402
from defects.case import Defect  # noqa: E402
from defects.report import Row, markdown_of, row_of, summary_of, table_of  # noqa: E402
from rich.console import Console  # noqa: E402
from studykit import ROOT, Results, code_digest, parser, write_json  # noqa: E402

NAMES = (
    "auto_interval",
    "reselection_reverts",
    "reselection_truncates",
    "no_master",
    "moments_restart",
    "step_count_stuck",
    "clipping",
    "overflow",
    "user_accumulation",
    "accelerate_boundary",
    "never_reselects",
    "late_pipeline",
    "two_momenta",
    "same_buffer",
    "micro_step_correction",
    "window_mean",
    "weight_decay_default",
    "group_settings",
    "unused_parameter",
    "convolution",
    "zero1_accumulation",
    "resume",
    "resume_reverts",
    "export_transposed",
    "scrambled_weights",
    "worker_death",
    "destroy_leaks",
    "twinflow_scheduler",
    "twinflow_granularity",
)
SHARED = ("case", "checkpoints", "peers", "upstream", "worker")
HERE_PARTS, ELSEWHERE_PARTS = ("expected", "ours", "control", "upstream"), ("expected", "control", "upstream")
QUICK_DEFECTS = 2
"""Of those that are quick: each takes a minute of a core, as processes start with DeepSpeed."""


def defect_of(name: str) -> Defect:
    """A defect's definition; DeepSpeed is not imported for it."""
    found: Defect = importlib.import_module(f"defects.{name}").DEFECT
    return found


def attempt(python: str, name: str, parts: Sequence[str], limit_s: float) -> dict[str, Any]:
    """Run a defect in a process of its own, and end all that it started.

    Returns:
        A figure for each part that came to its end; "ended" says how the process ended if one did not.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        file = folder / "figures.json"
        command: list[str | Path] = [python, HERE / "defects" / "worker.py", name, file, *parts]
        ended = deepspeedkit.ended(command, folder, limit_s, {"PYTHONPATH": _runtime_for(python)})
        figures: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if ended:
            figures |= {"ended": ended, "log": deepspeedkit.last_lines(folder, 5)}
    return figures


def _runtime_for(python: str) -> str:
    """Another environment has DeepSpeed alone; this runtime is imported there, not used."""
    return os.environ.get("PYTHONPATH", "") if python == sys.executable else str(ROOT / "runtime")


def measured(results: Results, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """A defect's record: measured now, unless one of the same inputs is there."""
    python = str(arguments.python.absolute()) if arguments.python else sys.executable
    elsewhere = arguments.python is not None
    versions = _versions(python)
    own = [f"{(HERE / 'defects' / part).relative_to(ROOT)}.py" for part in (name, *SHARED)]
    inputs = {
        "defect": name,
        "settings": defect_of(name).settings,
        "versions": versions,
        "code": code_digest(*own, *([] if elsewhere else ["runtime/zenflow"])),
    }
    file = f"{name}--deepspeed-{versions['deepspeed']}" if elsewhere else name
    record = None if arguments.again else results.load(file, inputs)
    if record is None:
        parts = ELSEWHERE_PARTS if elsewhere else HERE_PARTS
        limit_s = defect_of(name).limit_s if deepspeedkit.compiled(_named(versions)) else deepspeedkit.COMPILING_S
        record = results.save(file, inputs, attempt(python, name, parts, limit_s))
    return record


def _versions(python: str) -> dict[str, str]:
    packages = ("deepspeed", "torch")
    if python == sys.executable:
        return {package: metadata.version(package) for package in packages}
    ask = f"from importlib.metadata import version; print(*map(version, {packages!r}))"
    told = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.split()
    return dict(zip(packages, told, strict=True))


def _named(versions: Mapping[str, str]) -> str:
    return "-".join(f"{name}-{version}" for name, version in versions.items())


def recorded_elsewhere(results: Results, name: str) -> list[dict[str, Any]]:
    """What was measured with other versions of DeepSpeed; kept with the full results."""
    folders = {results.folder, HERE / "results"}
    files = {file.name: file for folder in folders for file in folder.glob(f"{name}--deepspeed-*.json")}
    return [json.loads(files[key].read_text(encoding="utf-8")) for key in sorted(files)]


def options() -> argparse.ArgumentParser:
    """The study's options: those of every study, and which defects, and where DeepSpeed is."""
    found = parser(__doc__ or "")
    found.add_argument("--only", nargs="+", choices=NAMES, metavar="NAME", help="these defects alone")
    found.add_argument(
        "--python", type=Path, metavar="PATH", help="show upstream's side with another environment's DeepSpeed"
    )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing and print the table; 1 if a control disagrees or this runtime fails a case."""
    arguments = options().parse_args(argv)
    results = Results.of(HERE, arguments)
    short = [name for name in NAMES if defect_of(name).quick][:QUICK_DEFECTS]
    names = arguments.only or (short if arguments.quick else NAMES)
    rows: list[Row] = []
    records = []
    with Console(stderr=True).status("") as status:
        for name in names:
            status.update(f"{name} ({len(rows) + 1} of {len(names)})")
            record = measured(results, name, arguments)
            others = [] if arguments.python else recorded_elsewhere(results, name)
            rows.append(row_of(name, defect_of(name), record, others))
            records.append({"defect": name, **record, "verdict": rows[-1].verdict, "ours": rows[-1].ours_verdict})
    version = records[0]["inputs"]["versions"]["deepspeed"]
    console = Console(width=None if sys.stdout.isatty() else 180)
    console.print(table_of(rows, version), summary_of(rows), sep="\n")
    if not arguments.only and not arguments.python:
        (results.folder / "table.md").write_text(markdown_of(rows, version), encoding="utf-8")
    if arguments.json:
        write_json(arguments.json, {"study": HERE.name, "quick": arguments.quick, "rows": records})
    return 1 if any(row.wrong for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
