"""How near to the best setting does a search of 24 measurements end, beside random, TPE, GP and the planner alone?

See README.md beside this file.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402
from regret import grid, h200, live  # noqa: E402
from regret.grid import Times, mean_ms  # noqa: E402
from regret.replay import RIVALS, Bench  # noqa: E402
from regret.scene import RIGS, START, scene_of  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402
from rich.table import Table  # noqa: E402
from studykit import Job, Results, code_digest, done, parser, percentile, write_json  # noqa: E402

NOISES = (0.03, 0.08)
SEEDS = 12
_PARTS = ("belief", "evidence", "pace", "search", "setup", "space", "states", "study")
TUNER = (*(f"zftune/tuner/{part}.py" for part in _PARTS), "zftune/planner")
CODE = (
    *TUNER,
    "studies/004-tuner-regret/regret/replay.py",
    "studies/004-tuner-regret/regret/scene.py",
)
QUICK_RIG, QUICK_SEEDS = "slow-core", 1
NEAR = 0.02
NEAR_RIGS, MOST_OFF = 5, {"noisy-link": 0.11}
"""Under the H200's noise: rigs where the median is that near, and what is allowed on another."""
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


def search(case: Case, times: Times) -> Figures:
    """Run them on a grid; in a process of their own."""
    torch.set_num_threads(1)
    _quiet_optuna()
    found: list[Figures] = []
    for seed in range(case.seeds):
        # The noise is the rig's and the seed's, so that all rivals see the same days.
        bench = Bench(times, case.noise, 100 * list(RIGS).index(case.rig) + seed)
        result = RIVALS[case.rival](scene_of(case.rig), bench, seed)
        found.append({**dataclasses.asdict(result), "chosen": str(result.chosen)})
    return {"searches": found}


def _quiet_optuna() -> None:
    import warnings

    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)


Searches = Mapping[Case, Sequence[Figures]]


def job(case: Case, times: Times) -> Job:
    """Searches on a grid."""
    inputs = {
        **dataclasses.asdict(case),
        "grid_ms": [list(window) for window in times.values()],
        "code": code_digest(*CODE),
    }
    name = f"{case.rig}--{case.noise:g}--{case.rival.replace(' ', '-')}"
    return Job(name, inputs, search, (case, times))


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


def of_rival(searched: Searches, noise: float, rival: str) -> list[Figures]:
    """All searches of one rival at one noise."""
    return [one for case, found in searched.items() if (case.noise, case.rival) == (noise, rival) for one in found]


def rival_rows(searched: Searches) -> Iterator[tuple[str, ...]]:
    """Regrets over all rigs and seeds."""
    for noise in dict.fromkeys(case.noise for case in searched):
        for rival in RIVALS:
            mine = of_rival(searched, noise, rival)
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


def by_rig_rows(searched: Searches) -> Iterator[tuple[str, ...]]:
    """Median and worst regret of each rival on each rig."""
    for rig in dict.fromkeys(case.rig for case in searched):
        for noise in dict.fromkeys(case.noise for case in searched):
            cells = []
            for rival in RIVALS:
                of_case = (one for one in searched if (one.rig, one.noise, one.rival) == (rig, noise, rival))
                regret = sorted(one["regret"] for one in searched[next(of_case)])
                cells.append(f"{percentile(regret, 0.5):.1%} / {regret[-1]:.1%}")
            yield (rig, f"{noise:.0%}", *cells)


def verdicts(found: Grids, searched: Searches, lives: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Each promise and whether it was kept."""
    facts = {rig: facts_of(rig, times) for rig, times in found.items()}
    most = max(one["near"] for one in facts.values())
    yield f"at most {most:.0%} of a grid is within {NEAR:.0%} of its best, allowed {MOST_NEAR:.0%}", most <= MOST_NEAR
    off = [rig for rig, one in facts.items() if one["planner"] - 1 >= PLANNER_OFF]
    yield f"the planner alone is {PLANNER_OFF:.0%} off or more on {len(off)} rigs, wanted 2", len(off) >= 2
    for noise in dict.fromkeys(case.noise for case in searched):
        mine = of_rival(searched, noise, "tuner")
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
H200_HEADS = (
    *("H200's noise, off after", *(f"{mark} steps" for mark in h200.MARKS), "worst"),
    *("slower than start", "restarts", "steps lost"),
)
LIVE_HEADS = ("live on", "gain", "regret", "measurements", "steps", "exploring", "of")


def live_rows(lives: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Real searches."""
    for rig, one in lives.items():
        gain = "none" if one["gain"] is None else f"{one['gain']:.1%} +/- {one['error']:.1%}"
        times = f"{one['spent_s']:.1f} s", f"{one['elapsed_s']:.0f} s"
        yield rig, gain, f"{one['regret']:.1%}", str(one["measurements"]), str(one["steps"]), *times


def median_regret(searches: Sequence[Figures], mark: int) -> float:
    """Under the H200's noise, after so many steps."""
    return percentile(sorted(one["regret"][h200.MARKS.index(mark)] for one in searches), 0.5)


def h200_rows(found: Mapping[str, Sequence[Figures]]) -> Iterator[tuple[str, ...]]:
    """By rig: the median regret on the way, and what it cost."""
    for rig, searches in found.items():
        yield (
            rig,
            *(f"{median_regret(searches, mark):.1%}" for mark in h200.MARKS),
            f"{max(one['regret'][-1] for one in searches):.1%}",
            f"{sum(one['over_start'] > 0 for one in searches)} of {len(searches)}",
            str(sum(one["restarts"] for one in searches)),
            f"{percentile(sorted(one['lost_steps'] for one in searches), 0.5):.0f}",
        )


def h200_verdicts(found: Mapping[str, Sequence[Figures]]) -> Iterator[tuple[str, bool]]:
    """What is promised under that noise."""
    regrets = {rig: median_regret(searches, h200.STEPS) for rig, searches in found.items()}
    after = f"H200's noise, after {h200.STEPS} steps"
    near = sum(regret <= NEAR for regret in regrets.values())
    yield f"{after}: median within {NEAR:.0%} on {near} of {len(regrets)} rigs, wanted {NEAR_RIGS}", near >= NEAR_RIGS
    for rig, most in MOST_OFF.items():
        yield f"{after}: {regrets[rig]:.1%} off on {rig}, allowed {most:.0%}", regrets[rig] <= most


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


def _bar(progress: Progress, name: str, total: int) -> Callable[[int], None]:
    bar = progress.add_task(name, total=total)
    return lambda count: progress.update(bar, completed=count)


def main() -> int:
    """Command line; 1 where a promise was not kept."""
    arguments = parser(__doc__ or "").parse_args()
    results = Results.of(HERE, arguments)
    torch.set_num_threads(1)
    rigs, seeds = ((QUICK_RIG,), QUICK_SEEDS) if arguments.quick else (tuple(RIGS), SEEDS)
    cases = [Case(rig, noise, rival, seeds) for rig in rigs for noise in NOISES for rival in RIVALS]
    searching = () if arguments.quick else live.RIGS
    with Progress(console=Console(stderr=True)) as progress:
        tell = _bar(progress, "grids and live searches", len(rigs) + len(searching))
        jobs = [*map(live.job, searching), *map(grid.job, rigs)]
        figures = done(results, jobs, again=arguments.again, tell=tell)
        found = dict(zip(rigs, map(grid.times_of, figures[len(searching) :]), strict=True))
        lives = {rig: live.judged(one, found[rig]) for rig, one in zip(searching, figures, strict=False)}
        tell = _bar(progress, "searches on the grids", len(cases))
        replays = [job(case, found[case.rig]) for case in cases]
        replayed = done(results, replays, again=arguments.again, tell=tell)
        noisy = [h200.job(rig, times, seeds, TUNER) for rig, times in found.items()]
        tell = _bar(progress, "searches under the H200's noise", len(noisy))
        under_noise = done(results, noisy, again=arguments.again, tell=tell)
    searched = {case: one["searches"] for case, one in zip(cases, replayed, strict=True)}
    gpu = {rig: one["searches"] for rig, one in zip(rigs, under_noise, strict=True)}
    heads = RIG_HEADS, RIVAL_HEADS, ("rig", "noise", *RIVALS), LIVE_HEADS, H200_HEADS
    parts = rig_rows(found), rival_rows(searched), by_rig_rows(searched), live_rows(lives), h200_rows(gpu)
    rows = [list(part) for part in parts]
    verdict = [] if arguments.quick else [*verdicts(found, searched, lives), *h200_verdicts(gpu)]
    console = Console(width=None if sys.stdout.isatty() else 140)
    for names, part in zip(heads, rows, strict=True):
        console.print(table_of(names, part))
    lines = [f"{'kept' if kept else 'BROKEN'}: {text}" for text, kept in verdict]
    console.print("\n".join(lines))
    text = "".join(markdown_of(names, part) for names, part in zip(heads, rows, strict=True))
    (results.folder / "table.md").write_text(text + "".join(f"- {line}\n" for line in lines), encoding="utf-8")
    if arguments.json:
        searches = [{**dataclasses.asdict(case), "searches": list(one)} for case, one in searched.items()]
        facts = {rig: facts_of(rig, times) for rig, times in found.items()}
        checked = [{"text": text, "kept": kept} for text, kept in verdict]
        document = {"rigs": facts, "searches": searches, "live": lives, "h200": gpu, "verdicts": checked}
        write_json(arguments.json, document)
    return 0 if all(kept for _, kept in verdict) else 1


if __name__ == "__main__":
    sys.exit(main())
