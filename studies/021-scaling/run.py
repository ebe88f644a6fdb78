"""Where do late updates pay, from one GPU to a thousand? By the planner; see the README.md beside."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import wire  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from studykit import Job as Measurement  # noqa: E402
from studykit import Results, code_digest, done, parser, write_json  # noqa: E402

from zftune.planner.choosing import fits  # noqa: E402
from zftune.planner.closed_form import predict  # noqa: E402
from zftune.planner.model import Job, Machine, ModelFacts  # noqa: E402
from zftune.planner.plan import BASELINES, make_plan  # noqa: E402

METHOD = 2  # raise it when a change here changes what is planned
MODELS = ("Llama-2-7B", "Llama-2-13B", "Qwen2.5-32B", "Llama-2-70B")
NETWORKS = {"a100-80-sxm": 160.0, "h100-sxm": 320.0, "a100-80-pcie": 10.0, "l40s": 10.0}
"""Machines, and what one sends to others, GB/s: 80% of 8 x 200, 8 x 400 and 100 Gbit/s."""
GPUS = (1, 2, 4, 8, 16, 64, 256, 1024)
QUICK_MODELS, QUICK_MACHINES, QUICK_GPUS = MODELS[:1], ("a100-80-sxm", "l40s"), (1, 8)
CODE = (
    "zftune/planner",
    "zftune/machines",
    "studies/021-scaling/wire.py",
    *(f"runtime/zenflow/{part}.py" for part in ("config", "layout", "schedule", "host/places")),
)
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
        "replicas_ms": replicas_ms(model, machine, job),
        "compute_ms": baselines["no_offload"]["compute_ms"],
    }


def replicas_ms(model: ModelFacts, machine: Machine, job: Job) -> float | None:
    """The faster step, with AdamW on the GPUs or late updates, where each machine has all of the weights (HSDP).

    None: there is one machine, or neither fits.
    """
    if job.nodes == 1:
        return None
    apart = replace(job, replicate=True)
    found = [predict(model, machine, apart, config) for config in (BASELINES["no_offload"], wire.CONFIG)]
    return min((one.step_ms for one in found if fits(one, machine)), default=None)


def answer(found: Mapping[str, Any]) -> str:
    """What to do there, in a few words."""
    steps = found["steps_ms"]
    if "published" not in steps:
        return "nothing fits"
    best = steps["published"]
    without = steps.get("no_offload")
    apart = found["replicas_ms"]
    replicas = "" if apart is None or WORTH * apart >= best else f"; replicas: {apart:,.0f}"
    if without is not None and without <= WORTH * best:
        return f"do not offload, {without:,.0f} ms{replicas}"
    zero = steps.get("zero_offload")
    gain = "" if zero is None else f", {zero / best:.1f}x"
    return f"{best:,.0f} ms{gain} ({found['bound_by']}){replicas}"


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


def wire_table(found: Mapping[str, Mapping[str, Any]]) -> Table:
    """Ways for the weights to get to every GPU: a step, what a GPU sends, and what the last one wins."""
    table = Table(title="changed columns alone over the wire: planned, not built")
    for column in ("model, machine x GPUs, sequences on each", *wire.WAYS, "of gathered again", "of kept"):
        table.add_column(column, justify="left" if column.startswith("model") else "right")
    for name, ways in found.items():
        again, kept, changed = (ways[way] for way in wire.WAYS)
        cells = [
            f"{one['step_ms']:,.0f} ms, {one['sent_gb']:.1f} GB" + ("" if one["fits"] else ", does not fit")
            for one in (again, kept, changed)
        ]
        ratios = [f"{changed['step_ms'] / one['step_ms']:.2f}" for one in (again, kept)]
        table.add_row(name, *cells, *ratios)
    return table


def of_machine(name: str, machine_name: str, sizes: Sequence[int]) -> dict[str, Any]:
    """Of a model on one kind of machine, by how many GPUs."""
    model, machine = ModelFacts.from_name(name), Machine.load(machine_name)
    found = {f"{name} on {machine_name} x {gpus}": planned(model, machine, gpus) for gpus in sizes}
    return {cell: one for cell, one in found.items() if one is not None}


def main(argv: Sequence[str] | None = None) -> int:
    """Plan what is not there yet, and print."""
    arguments = parser(__doc__ or "").parse_args(argv)
    results = Results.of(HERE, arguments)
    models, sizes = (QUICK_MODELS, QUICK_GPUS) if arguments.quick else (MODELS, GPUS)
    inputs: dict[str, Any] = {"gpus": sizes, "networks": NETWORKS, "seq": SEQUENCE, "method": METHOD}
    inputs["code"] = code_digest(*CODE)
    jobs = [
        Measurement(f"{name}--{machine}", inputs, of_machine, (name, machine, sizes))
        for name in models
        for machine in (QUICK_MACHINES if arguments.quick else NETWORKS)
    ]
    jobs.append(Measurement("wire", inputs, wire.planned, (arguments.quick,)))
    *by_machine, ways = done(results, jobs, again=arguments.again, tell=lambda _count: None)
    figures = {cell: one for found in by_machine for cell, one in found.items()}
    console = Console(width=None if sys.stdout.isatty() else 170)
    for table in (*tables_of(figures), wire_table(ways)):
        console.print(table)
    if arguments.json:
        document = {"study": HERE.name, "quick": arguments.quick, "figures": figures, "wire": ways}
        write_json(arguments.json, document)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
