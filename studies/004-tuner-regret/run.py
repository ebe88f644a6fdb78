"""How near to the best setting does a search of 24 measurements end, beside random, TPE, GP and the planner alone?

See README.md beside this file.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402
from regret import live  # noqa: E402
from regret.grid import Times, grid, mean_ms  # noqa: E402
from regret.replay import RIVALS, Bench  # noqa: E402
from regret.scene import RIGS, SETTINGS, START, scene_of  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import Progress, TaskID  # noqa: E402
from rich.table import Table  # noqa: E402
from studykit import Results, code_digest, parser, percentile, write_json  # noqa: E402

NOISES = (0.03, 0.08)
SEEDS = 12
_PARTS = ("agenda", "book", "forecast", "propose", "scores", "search", "settings", "space", "states")
CODE = (
    *(f"zftune/tuner/{part}.py" for part in _PARTS),
    "zftune/planner",
    "studies/004-tuner-regret/regret/replay.py",
    "studies/004-tuner-regret/regret/scene.py",
)
QUICK_RIG, QUICK_SEEDS = "slow-core", 2
NEAR = 0.02
MOST_NEAR, PLANNER_OFF = 0.20, 0.05
MOST = {0.03: (0.5, 0.03, 1.0, 0.08), 0.08: (0.5, 0.04, 0.9, 0.10)}
"""By noise: two percentiles of the tuner's regret, and what is allowed."""

Grids = Mapping[str, Times]
Figures = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """Searches that differ in nothing but the seed, from 0 on."""

    rig: str
    noise: float
    rival: str
    seeds: int


def search(case: Case, times: Times) -> list[Figures]:
    """Run them on a grid; in a process of their own."""
    torch.set_num_threads(1)
    _quiet_optuna()
    found: list[Figures] = []
    for seed in range(case.seeds):
        # The noise is the rig's and the seed's, so that all rivals see the same days.
        bench = Bench(times, case.noise, 100 * list(RIGS).index(case.rig) + seed)
        result = RIVALS[case.rival](scene_of(case.rig), bench, seed)
        found.append({**dataclasses.asdict(result), "chosen": str(result.chosen)})
    return found


def _quiet_optuna() -> None:
    import warnings

    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)


Searches = Mapping[Case, Sequence[Figures]]


@dataclass(frozen=True, slots=True)
class _Bar:
    progress: Progress
    task: TaskID

    def __call__(self, done: int) -> None:
        self.progress.update(self.task, completed=done)


def grids(results: Results, rigs: Sequence[str], *, again: bool, progress: Progress) -> Grids:
    """Measure what is not there yet."""
    found = {}
    for rig in rigs:
        bar = progress.add_task(f"{rig}: grid", total=len(SETTINGS))
        found[rig] = grid(scene_of(rig), results, again=again, tell=_Bar(progress, bar))
        progress.update(bar, completed=len(SETTINGS))
    return found


def searches(results: Results, cases: Sequence[Case], found: Grids, *, progress: Progress) -> Searches:
    """Run what is not there yet, one search on each core."""
    digest, running = code_digest(*CODE), dict[Case, Future[list[Figures]]]()
    done: dict[Case, list[Figures]] = {}
    bar = progress.add_task("searches", total=len(cases))
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        for case in cases:
            inputs = _inputs(case, found[case.rig], digest)
            record = results.load(_name(case), inputs)
            if record is None:
                running[case] = pool.submit(search, case, found[case.rig])
            else:
                done[case] = record["figures"]["searches"]
        for case, future in running.items():
            progress.update(bar, completed=len(done))
            inputs = _inputs(case, found[case.rig], digest)
            done[case] = results.save(_name(case), inputs, {"searches": future.result()})["figures"]["searches"]
    progress.update(bar, completed=len(done))
    return done


def _name(case: Case) -> str:
    return f"{case.rig}--{case.noise:g}--{case.rival.replace(' ', '-')}"


def _inputs(case: Case, times: Times, digest: str) -> dict[str, Any]:
    return {**dataclasses.asdict(case), "grid_ms": [list(window) for window in times.values()], "code": digest}


# --- what came of it -------------------------------------------------------------------------------------------------


def rig_rows(found: Grids) -> Iterator[tuple[str, ...]]:
    """What each rig is like."""
    for rig, times in found.items():
        facts = facts_of(rig, times)
        yield (
            rig,
            RIGS[rig],
            f"{facts['best_ms']:.0f} ms",
            f"{facts['start'] - 1:+.0%}",
            f"{facts['worst'] - 1:+.0%}",
            f"{facts['near']:.0%}",
            f"{facts['planner'] - 1:+.1%}",
        )


def facts_of(rig: str, times: Times) -> dict[str, float]:
    """Times over the best one's, and the share of settings near it."""
    of = {setting: mean_ms(window) for setting, window in times.items()}
    best = min(of.values())
    return {
        "best_ms": best,
        "start": of[START] / best,
        "worst": max(of.values()) / best,
        "near": sum(ms <= (1 + NEAR) * best for ms in of.values()) / len(of),
        "planner": of[scene_of(rig).planned[0]] / best,
    }


def of_rival(done: Searches, noise: float, rival: str) -> list[Figures]:
    """All searches of one rival at one noise."""
    return [one for case, found in done.items() if (case.noise, case.rival) == (noise, rival) for one in found]


def rival_rows(done: Searches) -> Iterator[tuple[str, ...]]:
    """Regrets over all rigs and seeds."""
    for noise in dict.fromkeys(case.noise for case in done):
        for rival in RIVALS:
            mine = of_rival(done, noise, rival)
            regret = sorted(figures["regret"] for figures in mine)
            worse = sum(figures["over_start"] > figures["stated_error"] for figures in mine)
            yield (
                f"{noise:.0%}",
                rival,
                *(f"{percentile(regret, share):.1%}" for share in (0.5, 0.9, 1.0)),
                f"{worse} of {len(mine)}",
                f"{percentile(sorted(figures['measurements'] for figures in mine), 0.5):.0f}",
                f"{percentile(sorted(figures['lost_steps'] for figures in mine), 0.5):.0f}",
            )


def by_rig_rows(done: Searches) -> Iterator[tuple[str, ...]]:
    """Median and worst regret of each rival on each rig."""
    for rig in dict.fromkeys(case.rig for case in done):
        for noise in dict.fromkeys(case.noise for case in done):
            cells = []
            for rival in RIVALS:
                of_case = next(
                    found for case, found in done.items() if (case.rig, case.noise, case.rival) == (rig, noise, rival)
                )
                regret = sorted(one["regret"] for one in of_case)
                cells.append(f"{percentile(regret, 0.5):.1%} / {regret[-1]:.1%}")
            yield (rig, f"{noise:.0%}", *cells)


def verdicts(found: Grids, done: Searches, lives: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Each promise and whether it was kept."""
    facts = {rig: facts_of(rig, times) for rig, times in found.items()}
    most = max(one["near"] for one in facts.values())
    yield f"at most {most:.0%} of a grid is within {NEAR:.0%} of its best, allowed {MOST_NEAR:.0%}", most <= MOST_NEAR
    off = [rig for rig, one in facts.items() if one["planner"] - 1 >= PLANNER_OFF]
    yield f"the planner alone is {PLANNER_OFF:.0%} off or more on {len(off)} rigs, wanted 2", len(off) >= 2
    for noise in dict.fromkeys(case.noise for case in done):
        mine = of_rival(done, noise, "tuner")
        regret = sorted(figures["regret"] for figures in mine)
        first, limit, second, other = MOST[noise]
        for share, allowed in ((first, limit), (second, other)):
            value = percentile(regret, share)
            yield (
                f"noise {noise:.0%}: regret {value:.1%} at the {share:.0%} point, allowed {allowed:.0%}",
                value <= allowed,
            )
        worse = sum(figures["over_start"] > figures["stated_error"] for figures in mine)
        yield f"noise {noise:.0%}: worse than its start beyond the stated error {worse} times of {len(mine)}", not worse
        used = max(figures["measurements"] for figures in mine)
        yield f"noise {noise:.0%}: at most {used} measurements, allowed 24", used <= 24
    for rig, one in lives.items():
        kept = one["regret"] <= MOST[0.03][3] and one["over_start"] <= one["error"]
        yield f"live on {rig}: regret {one['regret']:.1%} after {one['measurements']} measurements", kept


RIG_HEADS = ("rig", "kind", "best step", "start", "worst", "within 2%", "planner alone")
RIVAL_HEADS = ("noise", "", "median", "p90", "worst", "worse than start", "measurements", "steps lost")
LIVE_HEADS = ("live on", "gain", "regret", "measurements", "steps", "exploring", "of")


def live_rows(lives: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Real searches."""
    for rig, one in lives.items():
        gain = "none" if one["gain"] is None else f"{one['gain']:.1%} +/- {one['error']:.1%}"
        times = f"{one['spent_s']:.1f} s", f"{one['elapsed_s']:.0f} s"
        yield rig, gain, f"{one['regret']:.1%}", str(one["measurements"]), str(one["steps"]), *times


def table_of(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """For a terminal."""
    table = Table()
    for number, head in enumerate(heads):
        table.add_column(head, justify="left" if number < 2 else "right")
    for row in rows:
        table.add_row(*row)
    return table


def markdown_of(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """For `table.md`."""
    return "\n".join("| " + " | ".join(line) + " |" for line in (heads, ["---"] * len(heads), *rows)) + "\n\n"


def main() -> int:
    """Command line; 1 where a promise was not kept."""
    arguments = parser(__doc__ or "").parse_args()
    results = Results.of(HERE, arguments)
    torch.set_num_threads(1)
    rigs, seeds = ((QUICK_RIG,), QUICK_SEEDS) if arguments.quick else (tuple(RIGS), SEEDS)
    cases = [Case(rig, noise, rival, seeds) for rig in rigs for noise in NOISES for rival in RIVALS]
    with Progress(console=Console(stderr=True)) as progress:
        found = grids(results, rigs, again=arguments.again, progress=progress)
        lives = {}
        for rig in () if arguments.quick else live.RIGS:
            bar = progress.add_task(f"{rig}: live", total=live.MOST_STEPS)
            lives[rig] = live.live(rig, found[rig], results, again=arguments.again, tell=_Bar(progress, bar))
        done = searches(results, cases, found, progress=progress)
    heads = RIG_HEADS, RIVAL_HEADS, ("rig", "noise", *RIVALS), LIVE_HEADS
    rows = [list(part) for part in (rig_rows(found), rival_rows(done), by_rig_rows(done), live_rows(lives))]
    verdict = list(verdicts(found, done, lives)) if not arguments.quick else []
    console = Console(width=None if sys.stdout.isatty() else 140)
    for names, part in zip(heads, rows, strict=True):
        console.print(table_of(names, part))
    lines = [f"{'kept' if kept else 'BROKEN'}: {text}" for text, kept in verdict]
    console.print("\n".join(lines))
    text = "".join(markdown_of(names, part) for names, part in zip(heads, rows, strict=True))
    (results.folder / "table.md").write_text(text + "".join(f"- {line}\n" for line in lines), encoding="utf-8")
    if arguments.json:
        searched = [{**dataclasses.asdict(case), "searches": list(one)} for case, one in done.items()]
        facts = {rig: facts_of(rig, times) for rig, times in found.items()}
        checked = [{"text": text, "kept": kept} for text, kept in verdict]
        write_json(arguments.json, {"rigs": facts, "searches": searched, "live": lives, "verdicts": checked})
    return 0 if all(kept for _, kept in verdict) else 1


if __name__ == "__main__":
    sys.exit(main())
