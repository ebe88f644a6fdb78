"""What does a window of logged gradients cost on the host: zenflow's engine, DeepSpeedCPUAdam, torch's fused AdamW?

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402
from hostupdate.contenders import OptimizerKind, UnavailableError, fused_adamw  # noqa: E402
from hostupdate.deepspeed_adam import NAME as DEEPSPEED  # noqa: E402
from hostupdate.deepspeed_adam import cpu_adam  # noqa: E402
from hostupdate.machine import Machine, Others, huge_pages  # noqa: E402
from hostupdate.plot import draw  # noqa: E402
from hostupdate.report import Rows, agreement_text, lines, lines_table, size_table, work_kept_text  # noqa: E402
from hostupdate.sections import (  # noqa: E402
    INTERVALS,
    MAIN_THREAD,
    SIZES,
    DisagreementError,
    Effort,
    measure_main_thread,
    measure_size,
)
from rich.console import Console  # noqa: E402
from studykit import ROOT, Results, code_digest, parser, write_json  # noqa: E402

FULL, QUICK = (
    Effort(rounds=21, in_blocks=True, loop_rounds=5, loop_s=1.0),
    Effort(rounds=3, in_blocks=False, loop_rounds=1, loop_s=0.5),
)
BUILD = ROOT / "build" / "torch-extensions"
_NOISY = ": too much for these figures to be quoted"
MEASURES = (
    "__init__",
    "contenders",
    "deepspeed_adam",
    "engine",
    "machine",
    "main_thread",
    "oracle",
    "sections",
    "timing",
)


def code() -> str:
    """Digest of what the figures come from: what measures, and the host code."""
    native = [str(file.relative_to(ROOT)) for file in sorted((ROOT / "csrc").glob("*.?pp"))]
    own = [str((HERE / "hostupdate" / f"{name}.py").relative_to(ROOT)) for name in MEASURES]
    return code_digest(*own, *native, "zftune/telemetry/bandwidth.py")


def rivals(arguments: argparse.Namespace, say: Callable[[str], None]) -> tuple[list[OptimizerKind], dict[str, str]]:
    """Whom the engine competes with here, and why not with others."""
    try:
        return [cpu_adam(BUILD, compile_it=not arguments.quick, say=say), fused_adamw()], {}
    except UnavailableError as error:
        return [fused_adamw()], {DEEPSPEED: str(error)}


def sections(
    results: Results, inputs: Mapping[str, Any], kinds: Sequence[OptimizerKind], again: bool, say: Callable[[str], None]
) -> dict[str, Any]:
    """Every section's record, measured now unless it is there."""
    machine, effort = Machine.here(), Effort(**inputs["effort"])
    measures: dict[str, Callable[[], Any]] = {
        size.name: functools.partial(measure_size, machine, size, kinds, effort, say) for size in SIZES
    }
    measures[MAIN_THREAD] = functools.partial(measure_main_thread, machine, effort, say)
    records = {}
    for name, measure in measures.items():
        own = {**inputs, "section": name}
        record = None if again else results.load(name, own)
        if record is None:
            others = Others()
            figures = measure()
            record = results.save(name, own, {**figures, "others_share": round(others.share(), 4)})
        records[name] = record
    return records


def inputs_of(machine: Machine, kinds: Sequence[OptimizerKind], effort: Effort) -> dict[str, Any]:
    """What figures depend on: a record of other inputs is measured again."""
    return {
        "effort": asdict(effort),
        "update_intervals": list(INTERVALS),
        "rivals": [kind.name for kind in kinds],
        "machine": {**asdict(machine), "cores": list(machine.cores), "threads": machine.threads},
        "huge_pages": huge_pages(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "code": code(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing and print it; 1 if a contender is wrong or does not fit."""
    arguments = parser(__doc__ or "").parse_args(argv)
    results = Results.of(HERE, arguments)
    console = Console(width=None if sys.stdout.isatty() else 120)
    with Console(stderr=True).status("") as status:
        kinds, missing = rivals(arguments, status.update)
        machine = Machine.here()
        inputs = inputs_of(machine, kinds, QUICK if arguments.quick else FULL)
        try:
            records = sections(results, inputs, kinds, arguments.again, status.update)
        except (DisagreementError, MemoryError) as error:
            console.print(str(error))
            return 1
    figures = {name: record["figures"] for name, record in records.items()}
    for part in figures.values():
        missing |= part["missing"]
    show(console, figures, missing, machine)
    largest = Rows(figures[SIZES[-1].name]["rows"])
    held = lines(largest, figures[MAIN_THREAD], INTERVALS)
    console.print(lines_table(held))
    undrawn = draw(
        results.folder / "host-update.svg",
        [size.title for size in SIZES],
        [figures[size.name] for size in SIZES],
        INTERVALS,
    )
    if undrawn:
        console.print(undrawn)
    if arguments.json:
        document = {"study": HERE.name, "quick": arguments.quick, "missing": missing, "records": records}
        write_json(arguments.json, {**document, "lines": [{**asdict(line), "verdict": line.verdict} for line in held]})
    return 0


def show(console: Console, figures: Mapping[str, Any], missing: Mapping[str, str], machine: Machine) -> None:
    """The tables of the sizes and the loop."""
    for size in SIZES:
        console.print(size_table(size.title, figures[size.name]))
    console.print(agreement_text(figures[SIZES[-1].name]))
    for name, row in figures[MAIN_THREAD].get("rows", {}).items():
        kept = row["kept"]
        found = f"{kept['median']:.3f} ({kept['p5']:.3f} - {kept['p95']:.3f})"
        console.print(f"a Python loop beside {name}: keeps {found} of its rate; {work_kept_text(row)}")
    console.print(
        f"{machine.threads} threads each; last-level cache {machine.llc_bytes / 2**20:g} MiB, second level "
        f"{machine.l2_bytes / 2**20:g} MiB ({machine.source})"
    )
    busiest = max(part["others_share"] for part in figures.values())
    console.print(f"other processes took up to {busiest:.1%} of the processors" + (_NOISY if busiest > 0.02 else ""))
    for sentence in missing.values():
        console.print(sentence)


if __name__ == "__main__":
    raise SystemExit(main())
