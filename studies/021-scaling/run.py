"""Where do late updates pay, from one GPU to a thousand? By the planner; see the README.md beside."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from studykit import Results, code_digest, parser, write_json  # noqa: E402

from zftune.planner.facts import Job, Machine, ModelFacts  # noqa: E402
from zftune.planner.plan import make_plan  # noqa: E402

METHOD = 1  # raise it when a change here changes what is planned
MODELS = ("Llama-2-7B", "Llama-2-13B", "Qwen2.5-32B", "Llama-2-70B")
NETWORKS = {"a100-80-sxm": 160.0, "h100-sxm": 320.0, "a100-80-pcie": 10.0, "l40s": 10.0}
"""Machines, and what one sends to others, GB/s: 80% of 8 x 200, 8 x 400 and 100 Gbit/s."""
GPUS = (1, 2, 4, 8, 16, 64, 256, 1024)
QUICK_MODELS, QUICK_GPUS = MODELS[:1], (1, 4, 8)
WORTH = 1.02
"""What is faster by less is taken for equal."""
SEQUENCE = 2048


def job_of(machine: Machine, gpus: int) -> Job | None:
    """One sequence on each of so many GPUs, in whole machines; None: there is no such number."""
    if gpus <= machine.gpus:
        return Job(seq=SEQUENCE, gpus=gpus, checkpointing=True)
    if gpus % machine.gpus:
        return None
    nodes = gpus // machine.gpus
    network_gbps = NETWORKS[machine.name]
    return Job(seq=SEQUENCE, gpus=machine.gpus, nodes=nodes, network_gbps=network_gbps, checkpointing=True)


def planned(model: ModelFacts, machine: Machine, gpus: int) -> dict[str, Any] | None:
    """Step times of what fits, in ms, by how the optimizer is placed; None: there is no such number of GPUs."""
    job = job_of(machine, gpus)
    if job is None:
        return None
    plan = make_plan(model, machine, job, quality="published")
    baselines = plan["baselines"]
    best = plan["proposal"]
    fitting = {name: one["step_ms"] for name, one in baselines.items() if one["fits"]}
    return {
        "steps_ms": fitting | ({"published": best["step_ms"]} if best is not None else {}),
        "knobs": None if best is None else best["knobs"],
        "bound_by": None if best is None else best["bound_by"],
        "compute_ms": baselines["no_offload"]["compute_ms"],
    }


def answer(found: Mapping[str, Any]) -> str:
    """What to do there, in a few words."""
    steps = found["steps_ms"]
    if "published" not in steps:
        return "nothing fits"
    best = steps["published"]
    without = steps.get("no_offload")
    if without is not None and without <= WORTH * best:
        return f"do not offload, {without:,.0f} ms"
    zero = steps.get("zero_offload")
    gain = "" if zero is None else f", {zero / best:.1f}x"
    return f"{best:,.0f} ms{gain} ({found['bound_by']})"


def tables_of(found: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """One for each model: machines over GPUs."""
    tables = []
    for model in dict.fromkeys(name.split(" on ")[0] for name in found):
        own = {name: one for name, one in found.items() if name.startswith(f"{model} on ")}
        sizes = sorted({int(name.rsplit(" x ", 1)[1]) for name in own})
        table = Table(title=model)
        for column in ("GPUs", *(machine for machine in NETWORKS)):
            table.add_column(column, justify="right" if column == "GPUs" else "left")
        for gpus in sizes:
            cells = (own.get(f"{model} on {machine} x {gpus}") for machine in NETWORKS)
            table.add_row(f"{gpus:,}", *("" if one is None else answer(one) for one in cells))
        tables.append(table)
    return tables


def main(argv: Sequence[str] | None = None) -> int:
    """Plan what is not there yet, and print."""
    arguments = parser(__doc__ or "").parse_args(argv)
    results = Results.of(HERE, arguments)
    models, sizes = (QUICK_MODELS, QUICK_GPUS) if arguments.quick else (MODELS, GPUS)
    inputs: dict[str, Any] = {"models": models, "gpus": sizes, "networks": NETWORKS, "seq": SEQUENCE, "method": METHOD}
    inputs["code"] = code_digest("zftune/planner", "zftune/machines", "runtime/zenflow")
    record = None if arguments.again else results.load("scaling", inputs)
    if record is None:
        found = {}
        for name in models:
            model = ModelFacts.from_name(name)
            for machine_name in NETWORKS:
                machine = Machine.load(machine_name)
                for gpus in sizes:
                    one = planned(model, machine, gpus)
                    if one is not None:
                        found[f"{name} on {machine_name} x {gpus}"] = one
        record = results.save("scaling", inputs, found)
    console = Console(width=None if sys.stdout.isatty() else 150)
    for table in tables_of(record["figures"]):
        console.print(table)
    if arguments.json:
        write_json(arguments.json, {"study": HERE.name, "quick": arguments.quick, "figures": record["figures"]})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
