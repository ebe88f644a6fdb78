"""How much sooner do several tuners of one study find what one finds? See README.md beside this file."""

from __future__ import annotations

import math
import multiprocessing
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE.parent / "004-tuner-regret"), str(HERE.parent), str(ROOT)]

from regret import grid  # noqa: E402
from regret.grid import Times, mean_ms  # noqa: E402
from regret.replay import MOST_MEASUREMENTS, Bench  # noqa: E402
from regret.scene import RIGS, START, scene_of, space  # noqa: E402
from rich.console import Console  # noqa: E402
from studykit import Results, code_digest, parser, percentile, write_json  # noqa: E402

from tests.zftune.store.servers import Server, binaries, emptied  # noqa: E402
from zftune.store import open_store  # noqa: E402
from zftune.store.store import Store  # noqa: E402
from zftune.store.types import Hardware, Model  # noqa: E402
from zftune.tuner.recording import MachineInfo, Recording, RunFacts  # noqa: E402
from zftune.tuner.scores import LEAST_GAIN  # noqa: E402
from zftune.tuner.search import Search, SearchOptions  # noqa: E402
from zftune.tuner.states import UnmeasuredSteps  # noqa: E402

FLEETS = (1, 2, 4)
NOISE, SEEDS = 0.03, 3
THINKING_S = 0.5
"""Simulated time that a thought takes, with what it reads and writes."""
MOST = 0.4
"""Of the time of one, what four may take for its regret."""
_PATIENCE_S = 600.0
_PARTS = ("forecast", "recorder", "recording", "scores", "search", "space", "states", "trials")
CODE = (
    *(f"zftune/tuner/{part}.py" for part in _PARTS),
    "zftune/store/past_runs.py",
    "zftune/store/runs.py",
    "zftune/planner",
    "studies/004-tuner-regret/regret/replay.py",
)


@dataclass(frozen=True, slots=True)
class Case:
    """Tuners that share a study, each on a rig of its own of the same kind."""

    rig: str
    tuners: int
    seed: int


class Turns:
    """Simulated time of several processes: whoever is the least far along goes on, so that none reads the future.

    Args:
        context: of the processes.
        most: of them.
    """

    def __init__(self, context: SpawnContext, most: int) -> None:
        self._now_s, self._changed = context.Array("d", most, lock=False), context.Condition()

    def begin(self, tuners: int) -> None:
        """All stand at 0; the others take no part."""
        for number in range(len(self._now_s)):
            self._now_s[number] = 0.0 if number < tuners else float("inf")

    def wait(self, number: int, now_s: float) -> None:
        """Say how far one is, and wait until the others are as far."""
        with self._changed:
            self._now_s[number] = now_s
            self._changed.notify_all()
            there = self._changed.wait_for(lambda: self._first() == number or now_s == float("inf"), _PATIENCE_S)
        if not there:
            raise TimeoutError("another tuner does not go on")

    def _first(self) -> int:
        return min(range(len(self._now_s)), key=lambda one: (self._now_s[one], one))


def tuned(case: Case, number: int, times: Times, url: str, turns: Turns) -> dict[str, Any]:
    """One tuner of a study: what ran when, in simulated time, as regret of the incumbent."""
    scene = scene_of(case.rig)
    bench = Bench(times, NOISE, 1000 * list(RIGS).index(case.rig) + 10 * case.seed + number)
    options = SearchOptions(seed=case.seed, most_measurements=MOST_MEASUREMENTS)
    search = Search(space(), START, scene.remembered, scene.planned[:1], options)
    facts = RunFacts(model=Model(model_id="f" * 16, dtype="bfloat16"), micro_batch=1, sequence=32, rig=case.rig)
    here = MachineInfo(hardware=Hardware(hw_id="0" * 16, rig=case.rig), usable_cores=8.0, versions={})
    best_ms, now_s = min(map(mean_ms, times.values())), 0.0
    path: list[tuple[float, float]] = []

    def note() -> None:
        regret = mean_ms(times[search.book.incumbent.setting]) / best_ms - 1
        if not path or path[-1][1] != regret:
            path.append((round(now_s, 3), round(regret, 6)))

    with _opened(url) as store:
        recording = Recording(store, facts, "published", here, "fleet" if case.tuners > 1 else "")
        turns.wait(number, now_s)
        recorder = recording.begin(search)
        assert recorder is not None
        note()
        while (request := recorder.choose(search)) is not None:
            refused = recorder.before(search, request)
            assert refused is None, refused
            outcome = replace(bench.measure(request), between=UnmeasuredSteps(seconds=THINKING_S))
            now_s += THINKING_S + outcome.seconds
            turns.wait(number, now_s)
            search.tell(outcome)
            recorder.after(search, request, outcome)
            note()
        recording.finish(search)
        notices = recording.notices
        turns.wait(number, float("inf"))
    sources = [trial.source for trial in search.book.trials if trial.samples]
    return {
        "path": path, "ended_s": round(now_s, 3), "measurements": search.measurements, "notices": notices,
        "looked_at": {source: sources.count(source) for source in dict.fromkeys(sources)},
        "spent_s": round(search.cost.spent_s, 3), "chosen": str(search.book.incumbent.setting),
    }  # fmt: skip


def _opened(url: str) -> Store:
    store = open_store(url)
    assert store.notices == [], store.notices
    return store


def serve(number: int, grids: Mapping[str, Times], url: str, turns: Turns, asked: Any, told: Any) -> None:
    """A process: a tuner of one case after the other."""
    import warnings

    import optuna
    import torch

    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    while (case := asked.get()) is not None:
        told.put((number, tuned(case, number, grids[case.rig], url, turns)))


class Fleet:
    """Processes that tune, on one server.

    Args:
        server: with the store.
        grids: times of the rigs.
        most: tuners at once.
    """

    def __init__(self, server: Server, grids: Mapping[str, Times], most: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._server, self._turns, self._told = server, Turns(context, most), context.Queue()
        self._asked = [context.Queue() for _ in range(most)]
        _opened(server.url()).close()
        self._processes = [
            context.Process(
                target=serve, args=(number, grids, server.url(), self._turns, asked, self._told), daemon=True
            )
            for number, asked in enumerate(self._asked)
        ]
        for process in self._processes:
            process.start()

    def run(self, case: Case) -> dict[str, Any]:
        """What became of a case."""
        emptied(self._server)
        self._turns.begin(case.tuners)
        for asked in self._asked[: case.tuners]:
            asked.put(case)
        found = dict(self._told.get(timeout=_PATIENCE_S) for _ in range(case.tuners))
        return {"tuners": [found[number] for number in range(case.tuners)]}

    def close(self) -> None:
        """End the processes."""
        for asked in self._asked:
            asked.put(None)
        for process in self._processes:
            process.join(_PATIENCE_S)


# --- what came of it -------------------------------------------------------------------------------------------------

Path_ = Sequence[tuple[float, float]]


def regret_at(path: Path_, at_s: float) -> float:
    """Of a tuner's incumbent at a time."""
    return [regret for when_s, regret in path if when_s <= at_s][-1]


def reached_s(paths: Sequence[Path_], regret: float, *, mean: bool, room: float = 1e-9) -> float:
    """When the study's best incumbent, or the mean of all of them, stays at a regret or below it; inf: never.

    Args:
        paths: of the tuners.
        regret: to be reached.
        mean: whether of all of them.
        room: by so much more is as good.
    """
    moments = sorted({when_s for path in paths for when_s, _ in path})
    reached = float("inf")
    for when_s in moments:
        values = [regret_at(path, when_s) for path in paths]
        figure = statistics.fmean(values) if mean else min(values)
        if figure > regret + room:
            reached = float("inf")
        elif reached == float("inf"):
            reached = when_s
    return reached


@dataclass(frozen=True, slots=True)
class Row:
    """A fleet against one tuner on the same rig, with the same seed; shares of the time that the one searched."""

    rig: str
    seed: int
    tuners: int
    alone_s: float
    """That one searched."""
    improved: float
    """When one had reached its last regret."""
    best: float
    """When the first of the fleet had it."""
    every: float
    """When the fleet had it on average."""
    near: float
    """When the fleet had it on average, but for what a search takes for equal."""
    regret: float
    """That one ends with."""
    fleet_regret: float
    """That the fleet ends with, on average."""
    spent: float
    """What a tuner of the fleet spent on exploring, over what one alone did."""


def rows_of(found: Mapping[Case, Mapping[str, Any]]) -> Iterator[Row]:
    """Every fleet of several against the one."""
    for case, figures in found.items():
        (alone,) = found[replace(case, tuners=1)]["tuners"]
        target, alone_s = alone["path"][-1][1], alone["ended_s"]
        paths = [one["path"] for one in figures["tuners"]]
        ends = [path[-1][1] for path in paths]
        yield Row(
            case.rig, case.seed, case.tuners, alone_s,
            reached_s([alone["path"]], target, mean=False) / alone_s,
            reached_s(paths, target, mean=False) / alone_s,
            reached_s(paths, target, mean=True) / alone_s,
            reached_s(paths, target, mean=True, room=LEAST_GAIN) / alone_s,
            target, statistics.fmean(ends),
            statistics.fmean(one["spent_s"] for one in figures["tuners"]) / (alone["spent_s"] or 1.0),
        )  # fmt: skip


HEADS = (
    "rig",
    "seeds",
    "tuners",
    "time to the regret of one: best of them",
    "p90",
    "all on average",
    "p90",
    "within 2%",
    "p90",
    "one alone",
    "regret, mean",
    "spent each",
)


def table(rows: Sequence[Row]) -> str:
    """Markdown: medians over the seeds, by rig and over all."""
    lines = ["| " + " | ".join(HEADS) + " |", "| " + " | ".join(["---"] * len(HEADS)) + " |"]
    for rig in (*dict.fromkeys(row.rig for row in rows), "all"):
        for tuners in dict.fromkeys(row.tuners for row in rows):
            mine = [row for row in rows if row.tuners == tuners and rig in (row.rig, "all")]
            best, every, near = (sorted(getattr(row, name) for row in mine) for name in ("best", "every", "near"))
            cells = (
                rig, str(len(mine)), str(tuners),
                shown(percentile_or_inf(best, 0.5)), shown(percentile_or_inf(best, 0.9)),
                shown(percentile_or_inf(every, 0.5)), shown(percentile_or_inf(every, 0.9)),
                shown(percentile_or_inf(near, 0.5)), shown(percentile_or_inf(near, 0.9)),
                shown(statistics.median(row.improved for row in mine)),
                f"{statistics.fmean(row.fleet_regret for row in mine):.2%}",
                f"{statistics.median(row.spent for row in mine):.2f}",
            )  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def percentile_or_inf(ordered: Sequence[float], share: float) -> float:
    """Of values of which some may be infinite, which are the last: then the next higher one."""
    if ordered[-1] != float("inf"):
        return percentile(ordered, share)
    return ordered[math.ceil(share * (len(ordered) - 1))]


def shown(share: float) -> str:
    """A share of the time of one."""
    return "never" if share == float("inf") else f"{share:.2f}"


def verdicts(rows: Sequence[Row]) -> Iterator[tuple[str, bool]]:
    """What was promised."""
    four = [row for row in rows if row.tuners == max(FLEETS)]
    for name, values in (
        ("the best of four", [row.best for row in four]),
        ("four on average", [row.every for row in four]),
        ("four on average, within the 2% that a search takes for equal,", [row.near for row in four]),
    ):
        middle = percentile_or_inf(sorted(values), 0.5)
        yield f"{name} reach the regret of one in {shown(middle)} of its time (median), allowed {MOST}", middle <= MOST
    never = sum(row.best == float("inf") for row in four)
    yield (
        f"four end with a worse regret than one, the best of them, in {never} of {len(four)}",
        never <= len(four) // 10,
    )


def main() -> int:
    """Command line; 1 where a promise was not kept."""
    options = parser(__doc__ or "")
    options.add_argument("--there", action="store_true", help="measure nothing: show what is there")
    arguments = options.parse_args()
    results, console = Results.of(HERE, arguments), Console(width=None if sys.stdout.isatty() else 160)
    if binaries() is None and not arguments.there:
        console.print("There is no PostgreSQL: nothing was run.")
        return 0
    rigs, seeds = (("slow-core",), 1) if arguments.quick else (tuple(RIGS), SEEDS)
    grids = {rig: _grid(rig) for rig in rigs}
    cases = [Case(rig, tuners, seed) for seed in range(seeds) for rig in rigs for tuners in FLEETS]
    found: dict[Case, Mapping[str, Any]] = {}
    fleet, server = None, None
    try:
        for case in cases:
            name = f"{case.rig}--{case.seed}--{case.tuners}"
            inputs = {
                **asdict(case),
                "noise": NOISE,
                "grid_ms": [list(one) for one in grids[case.rig].values()],
                "code": code_digest(*CODE),
            }
            record = None if arguments.again else results.load(name, inputs)
            if record is None and arguments.there:
                continue
            if record is None:
                server = server or Server()
                fleet = fleet or Fleet(server, grids, max(FLEETS))
                record = results.save(name, inputs, fleet.run(case))
                console.print(f"{name}: {[one['path'][-1] for one in record['figures']['tuners']]}")
            found[case] = record["figures"]
    finally:
        if fleet is not None:
            fleet.close()
        if server is not None:
            server.close()
    whole = {case: one for case, one in found.items() if all(replace(case, tuners=many) in found for many in FLEETS)}
    rows = list(rows_of(whole))
    if not rows:
        console.print("Nothing is there that this code has measured.")
        return 0
    lines = [f"{'kept' if kept else 'BROKEN'}: {text}" for text, kept in verdicts(rows)] if not arguments.quick else []
    console.print(table(rows), *lines, sep="\n")
    (results.folder / "table.md").write_text(
        table(rows) + "\n" + "".join(f"- {line}\n" for line in lines), encoding="utf-8"
    )
    if arguments.json:
        write_json(arguments.json, {"rows": [asdict(row) for row in rows], "verdicts": lines})
    return 1 if any(line.startswith("BROKEN") for line in lines) else 0


def _grid(rig: str) -> Times:
    """As study 004 has measured it."""
    import json

    file = HERE.parent / "004-tuner-regret" / "results" / f"grid--{rig}.json"
    return grid.times_of(json.loads(file.read_text(encoding="utf-8"))["figures"])


if __name__ == "__main__":
    sys.exit(main())
