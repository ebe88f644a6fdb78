"""Does late AdamW train as AdamW does: replay and mean over learning rates, k, S and L, and DeepSpeed's ZenFlow?

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402
from convergence import setting as parts  # noqa: E402
from convergence.analysis import hurting_rate, rule_rate  # noqa: E402
from convergence.data import texts  # noqa: E402
from convergence.plot import draw  # noqa: E402
from convergence.probe import instrument, probe  # noqa: E402
from convergence.report import look_ahead_tables, markdown  # noqa: E402
from convergence.setting import BETWEEN, RATES, REGIMES, SEEDS, Setting, four_of  # noqa: E402
from convergence.store import Store  # noqa: E402
from convergence.train import Scale, World, train, train_ahead  # noqa: E402
from convergence.upstream import run_apart  # noqa: E402
from rich.console import Console  # noqa: E402
from studykit import ROOT, missing, parser, provenance, write_json  # noqa: E402

QUICK = Scale(steps=24, pretrain_steps=60, sequences=64, on_the_way=32)
CACHE = ROOT / "build" / "003-convergence"


def crossover(store: Store) -> Iterator[Setting]:
    """Five seeds where replay begins to hurt fine-tuning, and where the mean overtakes it, by the runs so far."""
    rates = (*RATES, *BETWEEN["fine-tuning"])
    for find in (hurting_rate, rule_rate):
        if (lr := find(store.runs, "fine-tuning", rates)) is not None:
            yield from four_of("fine-tuning", lr, SEEDS)
            yield Setting(regime="fine-tuning", method="probe", lr=lr)


def quick(_: Store) -> Iterator[Setting]:
    """A few of each kind."""
    for regime in REGIMES:
        yield from four_of(regime, 1e-3, SEEDS[:2])
        yield Setting(regime=regime, method="probe", lr=1e-3)
        yield Setting(regime=regime, method="instrument", lr=1e-3, ratio=0.05)
    yield replace(parts.published("fine-tuning", "replay", 1e-3), schedule="decay", warm_up=8)


Part = Callable[[Store], Iterable[Setting]]
PARTS: dict[str, Part] = {
    "grid": lambda _: parts.grid("fine-tuning"),
    "seeds": lambda _: parts.seeds("fine-tuning", RATES),
    "between": lambda _: parts.between("fine-tuning"),
    "upstream": lambda _: parts.upstream(),
    "scratch-grid": lambda _: parts.grid("from scratch"),
    "scratch-between": lambda _: parts.between("from scratch"),
    "look-ahead": lambda _: parts.look_ahead(parts.AHEAD_METHODS),
    "longer": lambda _: parts.look_ahead(parts.LONGER),
    "later": lambda _: parts.look_ahead(parts.LATER),
    "remedies": lambda _: parts.remedies(),
    "crossover": crossover,
    "instruments": lambda _: parts.instruments(),
    "scratch-seeds": lambda _: parts.seeds("from scratch", RATES[1:]),
}


def run_one(world: World, setting: Setting) -> dict[str, Any]:
    """A setting's figures."""
    if setting.method == "probe":
        return probe(world, setting)
    if setting.method == "instrument":
        return instrument(world, setting)
    if setting.method in ("deepspeed", "deepspeed repaired"):
        return run_apart(world, setting)
    return train_ahead(world, setting) if setting.method == "ahead" else train(world, setting)


def measure(world: World, store: Store, names: Sequence[str], again: bool, say: Callable[[str], None]) -> int:
    """Run what is missing of some parts, each kept as soon as it is done; how many there were.

    Args:
        world: what all runs share.
        store: where finished runs are.
        names: parts, in order.
        again: run what is there already too, once.
        say: told what is going on.
    """
    origin, done = {**provenance(), "zenflow": runtime_digest()}, set[str]()
    for name in names:
        wanted = list({setting.key: setting for setting in _part(name)(store)}.values())
        for number, setting in enumerate(wanted, 1):
            if setting.key in done or (store.get(setting) is not None and not again):
                continue
            say(f"{name} {number} of {len(wanted)}: {setting.key}")
            store.put(setting, run_one(world, setting), origin)
            done.add(setting.key)
    return len(done)


def _part(name: str) -> Part:
    return quick if name == "quick" else PARTS[name]


def runtime_digest() -> str:
    """Hash of the sources of the runtime that is imported."""
    import zenflow

    root, digest = Path(zenflow.__file__).parent, hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def options() -> argparse.ArgumentParser:
    """The study's options: those of every study, and which parts."""
    found = parser(__doc__ or "")
    found.add_argument("--only", nargs="+", choices=tuple(PARTS), metavar="PART", help="these parts alone")
    found.add_argument("--report", action="store_true", help="run nothing, report what is there")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing and write the tables and pictures."""
    arguments = options().parse_args(argv)
    torch.set_num_threads(1)
    folder: Path = arguments.results or HERE / "results" / ("quick" if arguments.quick else "")
    folder.mkdir(parents=True, exist_ok=True)
    world = World(QUICK if arguments.quick else Scale(), texts(), CACHE)
    store = Store(folder / "runs.jsonl", world.describe())
    if arguments.report and not store.runs:
        print(missing(HERE.name), file=sys.stderr)
        return 2
    names = ["quick"] if arguments.quick else arguments.only or list(PARTS)
    with Console(stderr=True).status("") as status:
        measure(world, store, [] if arguments.report else names, arguments.again, status.update)
    console = Console(width=None if sys.stdout.isatty() else 240)
    (folder / "look-ahead.md").write_text(look_ahead_tables(store.runs), encoding="utf-8")
    if {*names} <= {"look-ahead", "longer", "later"}:  # whose runs are not enough for the other tables
        console.print(look_ahead_tables(store.runs), markup=False, highlight=False)
        return 0
    tables = markdown(store.runs)
    (folder / "table.md").write_text(tables, encoding="utf-8")
    console.print(tables, markup=False, highlight=False)
    if undrawn := draw(folder, store.runs):
        console.print(undrawn)
    if arguments.json:
        document = {"study": HERE.name, "quick": arguments.quick, "world": store.description, "runs": store.runs}
        write_json(arguments.json, document)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
