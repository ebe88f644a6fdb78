"""Should deferred gradients cross the link in one byte an element? Bytes, memory, steps, and what AdamW makes of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "003-convergence"), str(HERE.parent)]

import torch  # noqa: E402
from convergence.data import texts  # noqa: E402
from convergence.train import Scale, World  # noqa: E402
from linkint8 import planning  # noqa: E402
from linkint8.coding import FACTORIAL, FEW, FINE, FLOAT8, Code  # noqa: E402
from linkint8.numerics import same_gradients  # noqa: E402
from linkint8.report import tables_of  # noqa: E402
from linkint8.trainings import SEEDS, WHERE, excesses, trained  # noqa: E402
from rich.console import Console  # noqa: E402
from studykit import ROOT, Job, Results, code_digest, done, parser, provenance, write_json  # noqa: E402

from zenflow import ZenFlowConfig  # noqa: E402
from zftune.planner.model import Job as PlannedJob  # noqa: E402
from zftune.planner.model import ModelFacts  # noqa: E402

QUICK = Scale(steps=12, batch=2, pretrain_steps=4, sequences=16, on_the_way=8)
QUICK_CELLS = (("Qwen2.5-1.5B",), ("rtx4090",))
CACHE = ROOT / "build" / "003-convergence"
BLOCKS = (Code(block=32), FINE, Code(block=32, power=False), Code(block=64), Code(block=256))
ENTRY_BYTES = 1 + 1 / 64
"""Of an element, in blocks of 64 with scales of one byte."""
PROPOSALS = (
    ("Llama-2-7B", "h100-pcie, Gen3", 1),
    ("Llama-2-13B", "h100-pcie, Gen3", 1),
    ("Qwen2.5-3B", "rtx4090", 1),
    ("Qwen2.5-1.5B", "rtx4090", 1),
    ("Qwen2.5-1.5B", "rtx5090", 1),
    ("Llama-2-7B", "a100-80-pcie, quarter of a host", 1),
    ("Llama-2-7B", "a100-80-pcie, Gen3", 1),
    ("Llama-2-7B", "a100-80-pcie", 1),
)
"""Where the planner itself chooses: what wins most, and what people have."""
FOUR = ("Qwen2.5-1.5B",)
"""Models that are planned with four sequences on each GPU, too."""
PLANNER = ("zftune/planner", "zftune/machines", "studies/025-link-int8/linkint8/planning.py")
MOMENT_STEPS = 40
PARTS = ("bytes", "planned", "moments", "proposals", "trainings")


def link_of(name: str) -> dict[str, float]:
    """Bytes by block: scales of one byte, and of two where the name says so."""
    model = ModelFacts.from_name(name)
    found = {}
    for k in (0.0, 0.05, 0.1, 0.2):
        for interval in (1, 2, 4, 8):
            config = ZenFlowConfig(topk_ratio=k, update_interval=interval)
            for code in (None, *BLOCKS):
                label = "bf16" if code is None else f"{code.block}, {1 if code.power else 2}"
                found[f"{k:g}, {interval}: {label}"] = planning.link_bytes(model, config, code)
    return found


def four_sequences(name: str, machines: Sequence[str]) -> dict[str, Any]:
    """As `planning.planned`, with four times the compute beside the same traffic."""
    found = {}
    for _, machine, gpus in planning.cells((name,), machines):
        job = PlannedJob(seq=2048, gpus=gpus, micro_batch=4, checkpointing=True)
        model = ModelFacts.from_name(name)
        one = planning.planned_cell(model, planning.machine_of(machine), job, ENTRY_BYTES)
        if one is not None:
            found[f"{name} on {machine} x {gpus}, 4 sequences"] = one
    return found


def moments_of(quick: bool) -> dict[str, Any]:
    """AdamW's moments on the same gradients, by code."""
    torch.set_num_threads(1)
    codes = FEW if quick else (*FACTORIAL, FINE, FLOAT8)
    world = World(QUICK if quick else Scale(), texts(), CACHE)
    return same_gradients(world, *WHERE[0], codes, 4 if quick else MOMENT_STEPS)


def jobs_of(part: str, quick: bool) -> list[Job]:
    """What is worked out in processes of their own, by part."""
    models, machines = QUICK_CELLS if quick else (planning.MODELS, tuple(planning.MACHINES))
    digest: Mapping[str, Any] = {"code": code_digest(*PLANNER), "entry_bytes": ENTRY_BYTES}
    if part == "bytes":
        blocks = [code.name for code in BLOCKS]
        return [Job(f"bytes--{name}", {"blocks": blocks, "method": 1}, link_of, (name,)) for name in models]
    if part == "planned":
        inputs = {**digest, "machines": list(machines)}
        ones = [Job(f"planned--{name}", inputs, planning.planned, (name, machines, ENTRY_BYTES)) for name in models]
        fours = () if quick else FOUR
        return [*ones, *(Job(f"four--{name}", inputs, four_sequences, (name, machines)) for name in fours)]
    if part == "proposals":
        return [
            Job(
                f"proposal--{'--'.join(map(str, one)).replace(', ', '-').replace(' ', '-')}",
                digest,
                planning.proposals,
                (*one, ENTRY_BYTES),
            )
            for one in (() if quick else PROPOSALS)
        ]
    if part == "moments":
        files = [f"studies/025-link-int8/linkint8/{name}.py" for name in ("coding", "numerics")]
        return [Job("moments", {"code": code_digest(*files), "steps": MOMENT_STEPS}, moments_of, (quick,))]
    return []


def options() -> argparse.ArgumentParser:
    """Those of every study, which parts, and how many trainings."""
    found = parser(__doc__ or "")
    found.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}")
    found.add_argument("--most", type=int, metavar="N", help="at most so many trainings; the rest another time")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Work out what is not there yet, and print."""
    arguments = options().parse_args(argv)
    torch.set_num_threads(1)
    results = Results.of(HERE, arguments)
    figures: dict[str, Any] = {}
    for part in arguments.only or PARTS:
        if jobs := jobs_of(part, arguments.quick):
            own = done(results, jobs, again=arguments.again, tell=lambda _count: None, workers=1)
            figures[part] = {job.name: one for job, one in zip(jobs, own, strict=True)}
    if arguments.only is None or "trainings" in arguments.only:
        figures["trainings"] = _trainings(results.folder, arguments)
    console = Console(width=None if sys.stdout.isatty() else 170)
    for table in tables_of(figures):
        console.print(table)
    if arguments.json:
        write_json(arguments.json, {"study": HERE.name, "quick": arguments.quick, "figures": figures})
    return 0


def _trainings(folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    file = folder / "trainings.jsonl"
    if arguments.again:
        file.unlink(missing_ok=True)
    seeds, most = (SEEDS[:1], 2) if arguments.quick else (SEEDS, arguments.most)
    say: Callable[[str], None] = Console(stderr=True).print
    world = World(QUICK if arguments.quick else Scale(), texts(), CACHE)
    return excesses(trained(world, file, seeds, provenance(), most, say), seeds)


if __name__ == "__main__":
    raise SystemExit(main())
