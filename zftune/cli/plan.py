"""`zftune plan`: what a model would do on a machine, before anything is run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zftune.errors import BadInputError
from zftune.store.types import QUALITIES, Quality
from zftune.text import STANDARD_OUTPUT, byte_count, check_output_path, one_of, write_json

if TYPE_CHECKING:
    from zftune.planner.model import Job, Machine, ModelFacts

_DTYPES = ("bf16", "fp16", "fp32")
_LONGEST, _LARGEST, _MOST_GPUS = 1 << 24, 1 << 20, 1 << 12


_Model = Annotated[
    str, typer.Option(help="A model's name, a directory with a config.json, or parameters,layers,hidden (7B,32,4096).")
]
_Hardware = Annotated[
    str,
    typer.Option(
        "--hardware", "--gpu", help="A machine's or its GPU's name (h100, 4090), a TOML file, or 'here' (measured)."
    ),
]
_Network = Annotated[
    float | None, typer.Option(help="What a machine sends to the others, in GB/s each way; with --nodes.")
]
_Replicate = Annotated[
    bool, typer.Option("--replicate", help="Each machine has the whole model, split over its GPUs (HSDP).")
]
_Stage = Annotated[
    int, typer.Option(help="ZeRO stage, with several GPUs. 3: each has a part of the weights; 1, 2: all of them.")
]
_Checkpointing = Annotated[
    bool, typer.Option("--checkpointing", help="Activation checkpointing: backward recomputes them.")
]
_Reshard = Annotated[
    bool, typer.Option(help="Several GPUs gather layers again for backward (FSDP2's reshard_after_forward).")
]
_Compute = Annotated[
    float | None, typer.Option(help="Forward and backward of a step, measured. Default: from the GPU's rate.")
]
_Quality = Annotated[
    str,
    typer.Option(
        help="How late updates may be: exact (not at all), published (as of topk_ratio 0.1, update_interval 4), or "
        "loose (twice that)."
    ),
]


def _memory(text: str) -> Any:
    return typer.Option(metavar="SIZE", help=text)


def plan(
    model: _Model,
    hardware: _Hardware = "here",
    gpus: Annotated[int, typer.Option(help="How many of its GPUs.")] = 1,
    nodes: Annotated[int, typer.Option(help="How many such machines, each with so many GPUs.")] = 1,
    network_gbps: _Network = None,
    replicate: _Replicate = False,
    stage: _Stage = 3,
    seq: Annotated[int, typer.Option(help="Tokens a sequence.")] = 2048,
    micro_batch: Annotated[int, typer.Option(help="Sequences of a pass on each GPU.")] = 1,
    accumulation: Annotated[int, typer.Option(help="Passes a step (gradient_accumulation_steps), on one GPU.")] = 1,
    checkpointing: _Checkpointing = False,
    reshard: _Reshard = True,
    dtype: Annotated[str, typer.Option(help="Of the parameters: bf16, fp16 or fp32.")] = "bf16",
    gpu_memory: Annotated[
        str | None, _memory("Of each GPU: in GB, or as 80GiB. Default: what the machine has.")
    ] = None,
    host_memory: Annotated[str | None, _memory("Of a machine: in GB, or as 512GiB. Default: what it has.")] = None,
    compute_ms: _Compute = None,
    quality: _Quality = "published",
    json_path: Annotated[
        str | None, typer.Option("--json", metavar="PATH", help="Write the plan as JSON; '-': standard output.")
    ] = None,
) -> None:
    """Predict step time, stall and memory of a model on a machine, and the settings that suit them."""
    check_output_path(json_path)
    one_of("--dtype", dtype, _DTYPES)
    promised = one_of("--quality", quality, QUALITIES)
    _check_ranks(gpus, nodes, stage, reshard=reshard, replicate=replicate)
    job = _job(
        gpus=gpus,
        nodes=nodes,
        network_gbps=network_gbps,
        replicate=replicate,
        stage=stage,
        seq=seq,
        micro_batch=micro_batch,
        accumulation=accumulation,
        checkpointing=checkpointing,
        reshard=reshard,
        compute_ms=compute_ms,
    )
    facts, machine = _inputs(model, hardware, dtype, gpu_memory, host_memory)
    document = _document(facts, machine, job, promised, with_curves=json_path is not None)
    if json_path != STANDARD_OUTPUT:
        _show(document)
    write_json(document, json_path)
    if document["proposal"] is None:
        raise SystemExit(1)


def _check_ranks(gpus: int, nodes: int, stage: int, *, reshard: bool, replicate: bool) -> None:
    if stage not in (1, 2, 3):
        raise BadInputError.of("--stage", stage, "1, 2 or 3")
    for option, given in (("--no-reshard", not reshard), ("--replicate", replicate)):
        if given and stage != 3:
            raise BadInputError(f"{option} needs --stage 3: at stage {stage} each GPU has all weights")
    if gpus * nodes == 1 and not reshard:
        raise BadInputError("--no-reshard needs --gpus 2 or more: one GPU gathers nothing")
    if replicate and (nodes == 1 or gpus == 1):
        raise BadInputError("--replicate needs --gpus 2 or more of each of --nodes 2 or more")


def _check_network(nodes: int, network_gbps: float | None) -> None:
    if nodes > 1 and network_gbps is None:
        raise BadInputError(f"--nodes {nodes} needs --network-gbps, what a machine sends to the others")
    if nodes == 1 and network_gbps is not None:
        raise BadInputError(f"--network-gbps {network_gbps:g} needs --nodes 2 or more")
    _check_positive("--network-gbps", network_gbps, "a number")


def _check_positive(option: str, value: float | None, what: str) -> None:
    if value is not None and not 0 < value < 1e9:
        raise BadInputError.of(option, value, f"{what} above 0, below 1e9")


def _job(
    *,
    gpus: int,
    nodes: int,
    network_gbps: float | None,
    seq: int,
    micro_batch: int,
    accumulation: int,
    compute_ms: float | None,
    **more: Any,
) -> Job:
    from zftune.planner.model import Job

    _check_network(nodes, network_gbps)
    _check_positive("--compute-ms", compute_ms, "a number")
    for option, value, most in (
        ("--gpus", gpus, _MOST_GPUS),
        ("--nodes", nodes, _MOST_GPUS),
        ("--seq", seq, _LONGEST),
        ("--micro-batch", micro_batch, _LARGEST),
        ("--accumulation", accumulation, _LARGEST),
    ):
        if not 1 <= value <= most:
            raise BadInputError.of(option, value, f"an integer from 1 to {most}")
    if accumulation > 1 and gpus * nodes > 1:
        raise BadInputError(f"--accumulation {accumulation} needs one GPU: of several it is not planned")
    given = {"network_gbps": network_gbps, "compute_ms": compute_ms, "accumulation": accumulation, **more}
    return Job(seq=seq, micro_batch=micro_batch, gpus=gpus, nodes=nodes, **given)


def _inputs(
    model: str, hardware: str, dtype: str, gpu_memory: str | None, host_memory: str | None
) -> tuple[ModelFacts, Machine]:
    from zftune.planner.model import Machine, model_facts

    given: dict[str, Any] = {}
    for option, figure, value in (
        ("--gpu-memory", "device_memory_bytes", gpu_memory),
        ("--host-memory", "host_memory_bytes", host_memory),
    ):
        if value is not None:
            given[figure] = byte_count(option, value, unit="GB")
    facts = model_facts(model, dtype)
    machine = Machine.here() if hardware == "here" else Machine.load(hardware)
    return facts, replace(machine, **given, source={**machine.source, **dict.fromkeys(given, "given")})


def _document(facts: ModelFacts, machine: Machine, job: Job, quality: Quality, *, with_curves: bool) -> dict[str, Any]:
    from rich.console import Console

    from zftune.planner.plan import curves, make_plan

    with Console(stderr=True).status("planning"):
        document = make_plan(facts, machine, job, quality=quality)
        if with_curves:
            document["curves"] = curves(facts, machine, job, document["proposal"])
    return document


def _show(document: dict[str, Any]) -> None:
    import os
    import sys

    from rich.console import Console

    from zftune.planner.screen import render

    console = Console(width=None if sys.stdout.isatty() or os.environ.get("COLUMNS") else 100)
    console.print(render(document, console.width))
