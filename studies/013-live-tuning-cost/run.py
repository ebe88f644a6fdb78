"""What does a search cost the training outside its measurements? See README.md beside this file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from livecost import realtime, simulated  # noqa: E402
from livecost.searching import CONFIG, RIG, RIG_CONFIG, THINKING_S  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402
from studykit import Job, Results, code_digest, done, parser, write_json  # noqa: E402

CODE = ("studies/013-live-tuning-cost", "zftune/tuner", "runtime/zenflow", "zftune/workload")
SEEDS, QUICK_SEEDS = 3, 1
MEASUREMENTS, QUICK_MEASUREMENTS = 16, 6

Tell = Callable[[int], None]
Found = tuple[list[dict[str, Any]], list[str], list[tuple[str, bool]]]


def on_a_rig(results: Results, *, quick: bool, again: bool, tell: Tell) -> Found:
    """Searches in simulated time: what they showed, in sentences, and the promises."""
    seeds, most = (QUICK_SEEDS, QUICK_MEASUREMENTS) if quick else (SEEDS, MEASUREMENTS)
    inputs = {"rig": RIG, "thinking_s": THINKING_S, "measurements": most, "config": asdict(RIG_CONFIG)}
    code = {"code": code_digest(*CODE)}
    jobs = [
        Job(f"simulated-{seed}", {"seed": seed, **inputs, **code}, simulated.searched, (seed, most))
        for seed in range(seeds)
    ]
    runs = done(results, jobs, again=again, tell=tell)
    return runs, simulated.lines(runs), simulated.verdicts(runs)


def for_real(results: Results, *, quick: bool, again: bool, tell: Tell) -> Found:
    """The same on this machine, one after the other."""
    seeds, most = (QUICK_SEEDS, QUICK_MEASUREMENTS) if quick else (SEEDS, MEASUREMENTS)
    common = {"config": asdict(CONFIG), "code": code_digest(*CODE)}
    jobs = [
        Job(f"search-{seed}", {"seed": seed, "measurements": most, **common}, realtime.searched, (seed, most))
        for seed in range(seeds)
    ]
    runs = done(results, jobs, again=again, tell=tell, workers=1)
    return runs, realtime.lines(runs), realtime.verdicts(runs)


def main() -> int:
    """Command line; 1 where a promise was not kept."""
    options = parser(__doc__ or "")
    options.add_argument("--real-time", action="store_true", help="train for real on this machine, not on a rig")
    arguments = options.parse_args()
    results = Results.of(HERE, arguments)
    measure = for_real if arguments.real_time else on_a_rig
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("searches", total=None)
        runs, found, verdict = measure(
            results,
            quick=arguments.quick,
            again=arguments.again,
            tell=lambda count: progress.update(bar, completed=count),
        )
    lines = [*found, *(f"{'kept' if kept else 'BROKEN'}: {text}" for text, kept in verdict)]
    Console(width=None if sys.stdout.isatty() else 140).print("\n".join(lines))
    name = "real-time.md" if arguments.real_time else "table.md"
    (results.folder / name).write_text("".join(f"- {line}\n" for line in lines), encoding="utf-8")
    if arguments.json:
        checked = [{"text": text, "kept": kept} for text, kept in verdict]
        write_json(arguments.json, {"runs": runs, "figures": found, "verdicts": checked})
    return 0 if all(kept for _, kept in verdict) else 1


if __name__ == "__main__":
    sys.exit(main())
