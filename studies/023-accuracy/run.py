"""Does fine-tuning with late updates cost accuracy: an encoder on three tasks of real text, and a language model?

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402
from accuracy import lateness  # noqa: E402
from accuracy.language import Continuation, LanguageScale  # noqa: E402
from accuracy.report import Runs, markdown  # noqa: E402
from accuracy.tasks import TASKS, bag_of_words  # noqa: E402
from accuracy.training import LANGUAGE, SHORTER, VARIANTS, Scale, Variant, World, describe, train  # noqa: E402
from accuracy.upstream import run_apart  # noqa: E402
from rich.console import Console  # noqa: E402
from studykit import ROOT, Results, code_digest, missing, parser, write_json  # noqa: E402

CACHE = ROOT / "build" / HERE.name
SEEDS, LANGUAGE_SEEDS, QUICK_SEEDS = (0, 1, 2, 3, 4), (0, 1), (0, 1)
SMALL = "small"
QUICK = Scale(
    steps=24,
    batch=8,
    trained=2,
    lr=1e-3,
    language_steps=12,
    language_batch=4,
    language=LanguageScale(
        64, 128, 2, 2, 512, 32, pretrain_steps=20, text_bytes=1 << 18, sequences=16, second="C headers"
    ),
)

EVERY = (*VARIANTS, *SHORTER)
Say = Callable[[str], None]


def variants_of(quick: bool) -> tuple[Variant, ...]:
    """In the tables' order; a short run starts no DeepSpeed, which takes half a minute to begin."""
    return VARIANTS[:-1] if quick else VARIANTS


def seeds_of(name: str, quick: bool) -> tuple[int, ...]:
    """Of a problem."""
    if quick:
        return QUICK_SEEDS
    return LANGUAGE_SEEDS if name == LANGUAGE else SEEDS


@dataclass(frozen=True, slots=True)
class Plan:
    """Which runs there are to be."""

    seeds: Mapping[str, Sequence[int]]
    """By problem."""
    variants: Sequence[Variant]
    again: bool
    """Whether to run what is there too."""


def measure(world: World, results: Results, plan: Plan, say: Say) -> None:
    """Run what is missing, each kept as soon as it is done; a seed of every problem before the next seed of any.

    A run that ended without a result is kept for the record, and tried again the next time.

    Args:
        world: what all runs share.
        results: where they are kept.
        plan: the runs.
        say: told what is going on.
    """
    runtime, inputs = code_digest("runtime/zenflow"), {name: describe(world, name) for name in plan.seeds}
    kept = {
        (name, variant): {} if plan.again else runs_of(results, inputs[name], variant)
        for name in plan.seeds
        for variant in plan.variants
    }
    for seed in sorted({seed for seeds in plan.seeds.values() for seed in seeds}):
        for (name, variant), runs in kept.items():
            if seed not in plan.seeds[name] or "loss" in runs.get(str(seed), {}):
                continue
            say(f"seed {seed}, {name}, {variant}")
            if variant == "DeepSpeed":
                figures = run_apart(world, name, seed)
            else:
                figures = train(world, name, variant, seed, world.problem(name, say))
            runs[str(seed)] = {**figures, "runtime": runtime}
            results.save(f"{name}-{variant}", inputs[name], {"runs": runs})


def runs_of(results: Results, inputs: dict[str, Any], variant: str) -> dict[str, Any]:
    """A variant's finished runs by seed."""
    record = results.load(f"{inputs['problem']}-{variant}", inputs)
    return {} if record is None else dict(record["figures"]["runs"])


def facts_of(world: World, results: Results, name: str, make: bool, say: Say) -> dict[str, Any] | None:
    """What the tables say of a problem beside its runs; None if that has not been found out and is not to be.

    Args:
        world: what all runs share.
        results: where it is kept: a task is the same however long it is trained for.
        name: of the problem.
        make: find it out.
        say: told what is going on.
    """
    inputs = describe(world, name) if name == LANGUAGE else {"task": world.task(name).digest}
    record = results.load(f"{name}-facts", inputs)
    if record is None and not make:
        return None
    if record is None:
        say(f"facts of {name}")
        if name == LANGUAGE:
            problem = world.problem(name, say)
            assert isinstance(problem, Continuation)
            facts: dict[str, Any] = {"pretraining": problem.pretraining}
        else:
            task = world.task(name)
            facts = {
                "classes": len(task.labels),
                "train": len(task.train),
                "test": len(task.test),
                "majority": task.majority,
                "bag_of_words": bag_of_words(task),
                "examples": [example._asdict() for example in task.test[:6]],
            }
        record = results.save(f"{name}-facts", inputs, facts)
    return dict(record["figures"])


def options() -> argparse.ArgumentParser:
    """The study's options: those of every study, and its own."""
    found = parser(__doc__ or "")
    found.add_argument("--only", nargs="+", choices=(*TASKS, LANGUAGE), metavar="PART", help="measure these alone")
    found.add_argument("--variants", nargs="+", choices=EVERY, metavar="VARIANT", help="measure these alone")
    found.add_argument("--steps", type=int, metavar="N", help="fine-tune for so many steps; give --results as well")
    found.add_argument("--lr", type=float, metavar="RATE", help="fine-tune at this rate; give --results as well")
    found.add_argument("--seeds", type=int, metavar="N", help="the first N seeds alone")
    found.add_argument("--encoder", type=Path, metavar="FOLDER", help="the pretrained encoder, see README.md")
    found.add_argument("--cache", type=Path, metavar="FOLDER", default=CACHE, help="for what is made once")
    found.add_argument("--report", action="store_true", help="run nothing, report what is there")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing and write the tables."""
    arguments = options().parse_args(argv)
    torch.set_num_threads(1)
    quick: bool = arguments.quick
    console, results = Console(width=None if sys.stdout.isatty() else 240), Results.of(HERE, arguments)
    encoder = None if quick else arguments.encoder or arguments.cache / "encoder"
    if encoder is not None and not (encoder / "model.safetensors").is_file():
        console.print(f"--encoder is {encoder}; it must be a folder with model.safetensors (README.md says where from)")
        return 2
    scale = QUICK if quick else Scale()
    if arguments.steps is not None:
        scale = replace(scale, steps=arguments.steps)
    if arguments.lr is not None:
        scale = replace(scale, lr=arguments.lr)
    if arguments.report and not any(results.folder.glob("*.json")):
        console.print(missing(HERE.name), soft_wrap=True)
        return 2
    world = World(scale, arguments.cache / "quick" if quick else arguments.cache, encoder)
    problems = (SMALL, LANGUAGE) if quick else (*TASKS, LANGUAGE)
    wanted = [] if arguments.report else [name for name in problems if quick or name in (arguments.only or problems)]
    of_study = results if quick else Results(HERE / "results")
    with Console(stderr=True).status("") as status:
        say: Say = status.update if sys.stderr.isatty() else lambda text: print(text, file=sys.stderr, flush=True)
        for name in wanted:
            facts_of(world, of_study, name, True, say)
        variants = [name for name in (*variants_of(quick), *SHORTER) if name in (arguments.variants or VARIANTS)]
        seeds = {name: seeds_of(name, quick)[: arguments.seeds] for name in wanted}
        plan = Plan(seeds, variants, arguments.again)
        measure(world, results, plan, say)
        found = {name: facts_of(world, of_study, name, False, say) for name in problems}
    every: Runs = {
        name: {
            str(variant): {int(seed): run for seed, run in runs_of(results, describe(world, name), variant).items()}
            for variant in variants_of(quick)
        }
        for name, fact in found.items()
        if fact is not None
    }
    runs = {name: of for name, of in every.items() if any(of.values())}
    facts = {name: fact for name, fact in found.items() if fact is not None and name in runs}
    measured = [variant for variant in variants_of(quick) if any(of[variant] for of in runs.values())]
    tables = markdown(runs, facts, measured, LANGUAGE)
    (results.folder / "table.md").write_text(tables, encoding="utf-8")
    if not quick:
        (of_study.folder / "lateness.md").write_text(
            lateness.markdown(lateness.read(of_study.folder)), encoding="utf-8"
        )
    console.print(tables, markup=False, highlight=False)
    if arguments.json:
        write_json(arguments.json, {"study": HERE.name, "quick": quick, "facts": facts, "runs": runs})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
