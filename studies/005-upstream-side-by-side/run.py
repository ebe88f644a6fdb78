"""DeepSpeed's ZeRO-Offload and ZenFlow beside this runtime: step time, memory, loss. Same model, data, seed and cores.

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from rich.console import Console  # noqa: E402
from sidebyside import analysis, report, setting  # noqa: E402
from sidebyside.setting import Size  # noqa: E402
from studykit import ROOT, Results, code_digest, parser, write_json  # noqa: E402

CACHE = ROOT / "build" / HERE.name
MEASURES = ("children", "contenders", "setting", "turns", "worker", "world")
_NOISY = 0.02


class UnavailableError(Exception):
    """There is nothing to compare with; the message is a sentence for the reader."""


def check_upstream(*, quick: bool) -> str:
    """The installed DeepSpeed's version.

    Raises:
        UnavailableError: it is missing, or a short run would have to compile it.
    """
    try:
        version = metadata.version("deepspeed")
    except metadata.PackageNotFoundError as error:
        raise UnavailableError("DeepSpeed is not installed: there is nothing to compare with") from error
    if not Path("/proc/self/smaps").exists():
        raise UnavailableError("DeepSpeed's overlapped ZenFlow needs Linux")
    from deepspeedkit import compiled

    if quick and not compiled():
        raise UnavailableError("DeepSpeed's operations are not compiled yet, and a short run does not; a full run does")
    return version


def inputs_of(size: Size, seed: int, arguments: argparse.Namespace, text: str) -> dict[str, Any]:
    """What a record depends on."""
    from sidebyside.world import PRETRAIN_BATCH, PRETRAIN_LR, PRETRAIN_TOKENS

    own = [str((HERE / "sidebyside" / f"{name}.py").relative_to(ROOT)) for name in MEASURES]
    native = [str(file.relative_to(ROOT)) for file in sorted((ROOT / "csrc").glob("*.?pp"))]
    return {
        "size": asdict(size),
        "seed": seed,
        "scale": asdict(setting.QUICK if arguments.quick else setting.FULL),
        "systems": [asdict(system) for system in setting.SYSTEMS.values()],
        "adamw": {"lr": setting.LR, "betas": setting.BETAS, "eps": setting.EPS, "weight_decay": setting.WEIGHT_DECAY},
        "tokens": setting.TOKENS,
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "pretraining": {"batch": PRETRAIN_BATCH, "tokens": PRETRAIN_TOKENS, "lr": PRETRAIN_LR},
        "text": text,
        "versions": {package: metadata.version(package) for package in ("deepspeed", "torch", "transformers")},
        "code": code_digest(*own, *native, "runtime/zenflow"),
    }


def measured(arguments: argparse.Namespace, say: Callable[[str], None]) -> dict[str, list[dict[str, Any]]]:
    """Every record by size: measured now, unless it is there."""
    from sidebyside import turns, world

    results, text = Results.of(HERE, arguments), world.digest()
    sizes, seeds = (setting.QUICK_SIZES, setting.SEEDS[:1]) if arguments.quick else (setting.SIZES, setting.SEEDS)
    scale = setting.QUICK if arguments.quick else setting.FULL
    CACHE.mkdir(parents=True, exist_ok=True)
    records: dict[str, list[dict[str, Any]]] = {size.name: [] for size in sizes}
    for seed in seeds:
        for size in sizes:
            name, inputs = f"{size.name}-seed{seed}", inputs_of(size, seed, arguments, text)
            record = None if arguments.again else results.load(name, inputs)
            if record is None:
                folder = world.pretrained(size, CACHE, say)
                record = results.save(name, inputs, turns.measure(size, seed, folder, scale, say))
            records[size.name].append(record)
    return records


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing, print tables and claims; 1 if weights were scrambled or a process ended."""
    arguments = parser(__doc__ or "").parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 170)
    from sidebyside.children import ChildError

    try:
        version = check_upstream(quick=arguments.quick)
        with Console(stderr=True).status("") as status:
            records = measured(arguments, status.update)
    except UnavailableError as error:
        console.print(str(error))
        return 0
    except ChildError as error:
        console.print(str(error))
        return 1
    return show(console, arguments, records, version)


def show(
    console: Console, arguments: argparse.Namespace, records: dict[str, list[dict[str, Any]]], version: str
) -> int:
    """Print and write what the records say."""
    figures = {name: [record["figures"] for record in each] for name, each in records.items()}
    found = {name: (each, analysis.rows(each)) for name, each in figures.items()}
    for name, (each, rows) in found.items():
        console.print(report.table_of(name, each, rows))
    largest = list(figures)[-1]
    judged = analysis.claims(figures[largest])
    console.print(report.claims_table(judged))
    shares = [each["others_share"] for size in figures.values() for each in size]
    where = report.where_of(records[largest][-1]["provenance"], shares, version)
    console.print(where + (" That is too much for these figures to be quoted." if max(shares) > _NOISY else ""))
    folder = Results.of(HERE, arguments).folder
    (folder / "table.md").write_text(report.markdown(found, judged, where), encoding="utf-8")
    if arguments.json:
        claims = [asdict(claim) for claim in judged]
        document = {"study": HERE.name, "quick": arguments.quick, "claims": claims, "records": records}
        write_json(arguments.json, document)
    return 0 if all(analysis.first_losses(each).holds for each in figures.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
