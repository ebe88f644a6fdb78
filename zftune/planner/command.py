"""`zftune plan`: what a model would do on a machine, before anything is run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from zftune.errors import BadInputError
from zftune.json_output import STANDARD_OUTPUT, check_output_path, write_json

if TYPE_CHECKING:
    from zftune.planner.facts import Job, Machine, ModelFacts

_DTYPES = ("bf16", "fp16", "fp32")
_QUALITIES = ("exact", "published", "loose")
_LONGEST, _LARGEST, _MOST_GPUS = 1 << 24, 1 << 20, 1 << 12


def plan(
    model: Annotated[
        str, typer.Option(help="A model's name, a directory with a config.json, or P,layers,hidden (7B,32,4096).")
    ],
    hardware: Annotated[str, typer.Option(help="A machine's name, a TOML file, or 'here' (measured).")] = "here",
    gpus: Annotated[int, typer.Option(help="How many of its GPUs.")] = 1,
    nodes: Annotated[int, typer.Option(help="How many such machines, each with so many GPUs.")] = 1,
    network_gbps: Annotated[
        float | None, typer.Option(help="What a machine sends to the others, in GB/s each way; with --nodes.")
    ] = None,
    replicate: Annotated[bool, typer.Option("--replicate", help="Machines are replicas of each other (HSDP).")] = False,
    seq: Annotated[int, typer.Option(help="Tokens a sequence.")] = 2048,
    micro_batch: Annotated[int, typer.Option(help="Sequences a step on each GPU.")] = 1,
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="Backward recomputes activations.")] = False,
    reshard: Annotated[
        bool, typer.Option(help="Several GPUs gather layers again for backward (FSDP2's reshard_after_forward).")
    ] = True,
    dtype: Annotated[str, typer.Option(help="Of the parameters: bf16, fp16 or fp32.")] = "bf16",
    compute_ms: Annotated[
        float | None, typer.Option(help="Forward and backward of a step, measured. Default: from the GPU's rate.")
    ] = None,
    quality: Annotated[
        str, typer.Option(help="exact (no staleness), published (as k = 0.1, S = 4), or loose (twice that).")
    ] = "published",
    json_path: Annotated[
        str | None, typer.Option("--json", metavar="PATH", help="Write the plan as JSON; '-': standard output.")
    ] = None,
    html_path: Annotated[
        str | None, typer.Option("--html", metavar="PATH", help="Write a page with a plot of step time over S.")
    ] = None,
) -> None:
    """Predict step time, stall and memory of a model on a machine, and the knobs that suit them."""
    for option, path in (("--json", json_path), ("--html", html_path)):
        if path is not None:
            check_output_path(path, option, standard_output=option == "--json")
    _check(dtype, quality, compute_ms)
    _check_ranks(gpus, nodes, reshard=reshard, replicate=replicate)
    _check_network(nodes, network_gbps)
    job = _job(
        gpus=gpus,
        nodes=nodes,
        network_gbps=network_gbps,
        replicate=replicate,
        seq=seq,
        micro_batch=micro_batch,
        checkpointing=checkpointing,
        reshard=reshard,
        compute_ms=compute_ms,
    )
    facts, machine = _inputs(model, hardware, dtype)
    document = _document(facts, machine, job, quality, with_curves=json_path is not None or html_path is not None)
    if json_path != STANDARD_OUTPUT:
        _show(document)
    if json_path is not None:
        write_json(document, json_path)
    if html_path is not None:
        from zftune.report.plan import write_plan_html

        write_plan_html(document, html_path)
    if document["proposal"] is None:
        raise SystemExit(1)


def _check(dtype: str, quality: str, compute_ms: float | None) -> None:
    if dtype not in _DTYPES:
        raise BadInputError(f"--dtype '{dtype}': allowed are {', '.join(_DTYPES)}")
    if quality not in _QUALITIES:
        raise BadInputError(f"--quality '{quality}': allowed are {', '.join(_QUALITIES)}")
    if compute_ms is not None and not 0 < compute_ms < 1e9:
        raise BadInputError(f"--compute-ms {compute_ms}: allowed is a number above 0, below 1e9")


def _check_ranks(gpus: int, nodes: int, *, reshard: bool, replicate: bool) -> None:
    if gpus * nodes == 1 and not reshard:
        raise BadInputError("--no-reshard: allowed only with --gpus 2 or more, one GPU gathers nothing")
    if replicate and (nodes == 1 or gpus == 1):
        raise BadInputError("--replicate: allowed only with --gpus 2 or more of each of --nodes 2 or more")


def _check_network(nodes: int, network_gbps: float | None) -> None:
    if nodes > 1 and network_gbps is None:
        raise BadInputError(f"--nodes {nodes}: allowed only with --network-gbps, what a machine sends to the others")
    if nodes == 1 and network_gbps is not None:
        raise BadInputError(f"--network-gbps {network_gbps:g}: allowed only with --nodes 2 or more")
    if network_gbps is not None and not 0 < network_gbps < 1e9:
        raise BadInputError(f"--network-gbps {network_gbps}: allowed is a number above 0, below 1e9")


def _job(*, gpus: int, nodes: int, seq: int, micro_batch: int, **more: Any) -> Job:
    from zftune.planner.facts import Job

    for option, value, most in (
        ("--gpus", gpus, _MOST_GPUS),
        ("--nodes", nodes, _MOST_GPUS),
        ("--seq", seq, _LONGEST),
        ("--micro-batch", micro_batch, _LARGEST),
    ):
        if not 1 <= value <= most:
            raise BadInputError(f"{option} {value}: allowed is an integer from 1 to {most}")
    return Job(seq=seq, micro_batch=micro_batch, gpus=gpus, nodes=nodes, **more)


def _inputs(model: str, hardware: str, dtype: str) -> tuple[ModelFacts, Machine]:
    from zftune.planner.facts import Machine, model_facts

    facts = model_facts(model, dtype)
    return facts, Machine.here() if hardware == "here" else Machine.load(hardware)


def _document(facts: ModelFacts, machine: Machine, job: Job, quality: str, *, with_curves: bool) -> dict[str, Any]:
    from rich.console import Console

    from zftune.planner.plan import curves, make_plan

    with Console(stderr=True).status("planning"):
        document = make_plan(facts, machine, job, quality=quality)
        if with_curves:
            document["curves"] = curves(facts, machine, job)
    return document


def _show(document: dict[str, Any]) -> None:
    import sys

    from rich.console import Console

    from zftune.planner.screen import render

    Console(width=None if sys.stdout.isatty() else 100).print(render(document))
