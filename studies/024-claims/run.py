"""What makers of offloading claim, one by one: does it hold? See the README.md beside."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from claims import both, page, rigs, selection, shapes, tables, traffic, tuned, twinflow, upstream  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402
from studykit import Job, Results, done, parser, write_json  # noqa: E402

RANKS = (2, 4, 8)
QUICK_RIG = "llama2-7b-4xa100"
QUICK_TRAFFIC, QUICK_RATIOS = ((0.0, 0.1), (1, 4)), twinflow.RATIOS[::10]


def jobs_of(part: str, *, quick: bool) -> Iterator[Job]:
    """A part's measurements; the short form has some of the same ones, which must come out the same."""
    if part == "rigs":
        yield from (rigs.job(rig) for rig in ([QUICK_RIG] if quick else rigs.names()))
    elif part == "shapes":
        models, machines = (shapes.MODELS[:1], ["gh200"]) if quick else (shapes.MODELS, list(shapes.MACHINES))
        yield from (shapes.job(model, machine) for model in models for machine in machines)
    elif part == "traffic":
        yield from () if quick else (upstream.job(),)
        yield traffic.job(*QUICK_TRAFFIC) if quick else traffic.job()
    elif part == "selection":
        yield from (selection.job(ranks) for ranks in (RANKS[:1] if quick else RANKS))
    elif part == "tuned":
        yield from (tuned.job(rig) for rig in ([QUICK_RIG] if quick else rigs.names()))
        yield from () if quick else map(tuned.cpu_job, range(tuned.REPEATS))
    elif part == "twin-flow":
        if quick:
            yield twinflow.rig_job(twinflow.RIGS[0], QUICK_RATIOS)
        else:
            yield from map(twinflow.rig_job, twinflow.RIGS)
            yield from map(twinflow.shape_job, twinflow.PUBLISHED)
    else:
        yield from (both.job(rig) for rig in ([QUICK_RIG] if quick else both.rigs()))


PARTS = ("rigs", "shapes", "traffic", "selection", "tuned", "twin-flow", "both")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is not there yet, and print."""
    options = parser(__doc__ or "")
    options.add_argument("--part", choices=PARTS, action="append", help="only this one; may be given again")
    options.add_argument("--workers", type=int, default=1, help="processes at a time")
    options.add_argument("--figures", action="store_true", help="write figures.json from the records, measure nothing")
    arguments = options.parse_args(argv)
    if arguments.figures:
        try:
            page.write_rows(HERE / "figures.json")
        except LookupError as error:
            print(error.args[0], file=sys.stderr)
            return 2
        return 0
    results = Results.of(HERE, arguments)
    jobs = [one for part in arguments.part or PARTS for one in jobs_of(part, quick=arguments.quick)]
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("claims", total=len(jobs))
        found = done(
            results,
            jobs,
            again=arguments.again,
            tell=lambda count: progress.update(bar, completed=count),
            workers=arguments.workers,
        )
    figures: Mapping[str, Any] = {job.name: one for job, one in zip(jobs, found, strict=True)}
    text = tables.markdown(figures)
    print(text)
    if not arguments.part:
        (results.folder / "table.md").write_text(text, encoding="utf-8")
    if arguments.json:
        write_json(arguments.json, {"study": HERE.name, "quick": arguments.quick, "figures": figures})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
