"""Which rule for the noise of step times holds 95% of the differences of runs that do not differ?

See README.md beside this file.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import numpy as np  # noqa: E402
from numpy.typing import NDArray  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from studykit import Job, Results, code_digest, done, parser, write_json  # noqa: E402

from zftune.quality import assumed_coverage  # noqa: E402
from zftune.store.types import Decision  # noqa: E402
from zftune.tuner.scores import ERRORS, Sample, error_of_mean, gain  # noqa: E402
from zftune.tuner.search import Search, SearchOptions  # noqa: E402
from zftune.tuner.space import Forecast, Setting, space_for  # noqa: E402
from zftune.tuner.states import Outcome, Request  # noqa: E402

CODE = (*(f"zftune/tuner/{part}.py" for part in ("scores", "search", "states", "trials")), "studies/022-noise/run.py")
WINDOWS = {1: (1.0,), 4: (1.0, 1.0, 1.0, 3.0), 16: (*(1.0,) * 15, 6.0)}
"""By S: what the steps of a window take, the one that waits for the host last."""
KINDS = ("independent", "correlation 0.3", "correlation 0.6", "correlation 0.9", "slow steps", "slow runs")
RULES = ("search before", "search", "compare before", "compare")
LEAST, LEAST_OF_FEW = 0.92, 0.80
"""Coverage that is promised: in general, and where steps are correlated by 0.9."""
_RESAMPLES = 400
LOADS = ("independent", "correlation 0.97", "load for 3 s", "load for 10 s")
"""What searches meet: 5% noise, and other work that slows steps by a quarter and comes and goes."""
GAINS = (0.0, 0.04, 0.10)
"""Of the one setting of eight that is faster than the others."""
_STEP_S, _SLOWER, _PLANNED = 0.1, 1.25, 8

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Case:
    """Pairs of runs that do not differ."""

    update_interval: int
    steps: int
    pairs: int
    """Of each kind."""


FULL = tuple(Case(*shape, 1000) for shape in ((1, 20), (1, 60), (1, 200), (4, 20), (4, 60), (16, 64)))
QUICK = (Case(1, 60, 100), Case(4, 20, 100))
SEARCHES, QUICK_SEARCHES = 100, 5
"""Of each kind of load and each gain."""


def step_times(kind: str, count: int, random: np.random.Generator) -> Array:
    """[steps] relative times: 5% noise, or 3% beside slow steps."""
    drawn = random.standard_normal(count)
    if kind.startswith("correlation"):
        one = float(kind.split()[1])
        for step in range(1, count):
            drawn[step] = one * drawn[step - 1] + math.sqrt(1 - one**2) * drawn[step]
    if kind == "slow steps":  # one in twenty takes twice as long
        return np.exp(0.03 * drawn) * np.where(random.random(count) < 0.05, 2.0, 1.0)
    if kind == "slow runs":  # beside other work: five steps in a row, one in five, take 1.4 times as long
        slow = np.empty(count, dtype=bool)
        beside = random.random() < 0.2
        for step in range(count):
            beside = random.random() >= 0.2 if beside else random.random() < 0.05
            slow[step] = beside
        return np.exp(0.03 * drawn) * np.where(slow, 1.4, 1.0)
    return np.exp(0.05 * drawn)


def search_before(windows: Array, random: np.random.Generator) -> tuple[float, float]:
    """The score and its error by residuals that are drawn one by one."""
    middle, count = np.median(windows, axis=0), len(windows)
    residuals = 1.0 + (windows / middle - 1.0) * math.sqrt(count / (count - 1))
    drawn = random.choice(residuals.ravel(), size=(_RESAMPLES, *windows.shape))
    return float(middle.mean()), float((middle * np.median(drawn, axis=1)).mean(axis=1).std(ddof=1))


def compare_before(windows: Array, random: np.random.Generator) -> tuple[float, float]:
    """The mean and its error by windows that are drawn one by one, or steps where there are fewer than four."""
    blocks = windows.mean(axis=1) if len(windows) >= 4 else windows.ravel()
    drawn = blocks[random.integers(0, len(blocks), (_RESAMPLES, len(blocks)))]
    return float(windows.mean()), float(drawn.mean(axis=1).std(ddof=1))


def covered(case: Case) -> Mapping[str, Any]:
    """By kind and rule, the share of pairs whose difference is within two standard errors."""
    return {kind: _covered(case, kind, np.random.default_rng(seed)) for seed, kind in enumerate(KINDS)}


def _covered(case: Case, kind: str, random: np.random.Generator) -> dict[str, float]:
    hits = dict.fromkeys(RULES, 0)
    before: dict[str, Callable[[Array, np.random.Generator], tuple[float, float]]] = {
        "search before": search_before,
        "compare before": compare_before,
    }
    for pair in range(case.pairs):
        shape = np.array(WINDOWS[case.update_interval])
        runs = [step_times(kind, case.steps, random).reshape(-1, len(shape)) * shape for _ in range(2)]
        for rule, figures in before.items():
            (a, first), (b, second) = (figures(one, random) for one in runs)
            hits[rule] += abs(b - a) <= ERRORS * math.hypot(first, second)
        samples = [Sample.of(one.ravel().tolist(), case.update_interval, 1) for one in runs]
        hits["search"] += not gain(samples[:1], samples[1:], seed=pair).beyond_noise
        errors = [error_of_mean(one.ravel().tolist(), case.update_interval) or 0.0 for one in runs]
        hits["compare"] += abs(runs[1].mean() - runs[0].mean()) <= ERRORS * math.hypot(*errors)
    return {rule: int(count) / case.pairs for rule, count in hits.items()}


class Machine:
    """Trains in simulated time beside other work.

    Args:
        load: one of `LOADS`.
        faster: a setting whose steps take less time than those of all others.
        gain: by this share.
        random: where the noise comes from.
    """

    def __init__(self, load: str, faster: Setting, gain: float, random: np.random.Generator) -> None:
        self._faster, self._gain, self._random = faster, gain, random
        self._alike = float(load.split()[1]) if load.startswith("correlation") else 0.0
        self._lasts_s = float(load.split()[2]) if load.startswith("load") else math.inf
        self._last, self._beside = float(random.standard_normal()), bool(random.random() < 0.5)

    def step_ms(self, setting: Setting) -> float:
        """What the next step takes."""
        self._last = self._alike * self._last + math.sqrt(1 - self._alike**2) * float(self._random.standard_normal())
        time_ms = 1e3 * _STEP_S * self.relative(setting) * math.exp(0.05 * self._last)
        if math.isinf(self._lasts_s):
            return time_ms
        if self._random.random() < _STEP_S / self._lasts_s:
            self._beside = not self._beside
        return time_ms * (_SLOWER if self._beside else 1.0)

    def relative(self, setting: Setting) -> float:
        """Its time without noise over that of the others."""
        return 1 - self._gain if setting == self._faster else 1.0

    def measure(self, request: Request) -> Outcome:
        """What training would have shown."""
        discarded = tuple(self.step_ms(request.setting) for _ in range(request.discard))
        steps: list[float] = []
        for _ in range(request.steps):
            steps.append(self.step_ms(request.setting))
            reason = request.abort_reason(discarded, steps)
            if reason is not None:
                return Outcome("aborted", tuple(steps), discarded, reason=reason)
        return Outcome("measured", tuple(steps), discarded)


def searched(load: str, gain: float, searches: int) -> Mapping[str, float]:
    """Of searches among settings of which one at most is faster: what they adopted, and whether errors were right."""
    start = Setting(topk_ratio=0.1, update_interval=4, apply_lag=1)
    space = space_for(start, "published", coverage=assumed_coverage)
    allowed = [one for one in space.settings() if one != start and one.offload_ratio == start.offload_ratio]
    alike = Forecast(step_ms=1e3 * _STEP_S, device_bytes=0, host_bytes=0)
    held, wrong, found, steps = [], 0, 0, 0
    for seed in range(searches):
        random = np.random.default_rng([seed, 22])
        planned = [allowed[index] for index in random.permutation(len(allowed))[:_PLANNED]]
        machine = Machine(load, planned[_PLANNED // 2], gain, random)
        options = SearchOptions(seed=seed, sampler="none", grant_s=1e6)
        search = Search(space, start, lambda _setting: alike, planned, options)
        while (request := search.next()) is not None:
            before, decided = search.book.incumbent.setting, len(search.notes)
            outcome = machine.measure(request)
            search.tell(outcome)
            steps += outcome.step_count
            for note in filter(_compares_times, search.notes[decided:]):
                after = search.book.trials[note.trial or 0].setting
                true = 1 - machine.relative(after) / machine.relative(before)
                held.append(abs(note.details["gain"] - true) <= ERRORS * note.details["error"])
                wrong += note.kind == "adopt" and true <= 0
        found += machine.relative(search.book.incumbent.setting) < 1
    return {
        "comparisons": len(held) / searches,
        "held": sum(held) / len(held) if held else math.nan,
        "wrong": wrong / searches,
        "found": found / searches,
        "steps": steps / searches,
    }


def _compares_times(note: Decision) -> bool:
    """Whether it follows from a comparison, and not from one of settings that are as fast."""
    return note.kind in ("adopt", "keep") and "error" in note.details and "dopted for " not in note.reason


def search_jobs(searches: int, digest: str) -> list[Job]:
    """One for each kind of load and each gain."""
    return [
        Job(
            f"search-{load.replace(' ', '-')}-{gain:g}",
            {"load": load, "gain": gain, "searches": searches, "code": digest},
            searched,
            (load, gain, searches),
        )
        for load in LOADS
        for gain in GAINS
    ]


def verdicts(found: Mapping[Case, Mapping[str, Any]]) -> list[tuple[str, bool]]:
    """What was promised, and whether it held."""
    lowest = {kind: min(one[kind][rule] for one in found.values() for rule in ("search", "compare")) for kind in KINDS}
    few = lowest.pop(KINDS[3])
    most = min(lowest.values())
    return [
        (f"two standard errors hold at least {LEAST:.0%}, but for {KINDS[3]}: {most:.1%}", most >= LEAST),
        (f"two standard errors hold at least {LEAST_OF_FEW:.0%} at {KINDS[3]}: {few:.1%}", few >= LEAST_OF_FEW),
    ]


HEADS = ("steps", "S", "noise", *RULES)


def main() -> int:
    """Command line; 1 where a promise was not kept."""
    arguments = parser("Which rule for the noise of step times is right?").parse_args()
    results, digest = Results.of(HERE, arguments), code_digest(*CODE)
    cases = QUICK if arguments.quick else FULL
    jobs = [
        Job(f"s{case.update_interval}-n{case.steps}", {**dataclasses.asdict(case), "code": digest}, covered, (case,))
        for case in cases
    ]
    records = done(results, jobs, again=arguments.again, tell=lambda _count: None)
    found = dict(zip(cases, records, strict=True))
    jobs = search_jobs(QUICK_SEARCHES if arguments.quick else SEARCHES, digest)
    searches = done(results, jobs, again=arguments.again, tell=lambda _count: None)
    console = Console(width=None if sys.stdout.isatty() else 120)
    rows = [
        (str(case.steps), str(case.update_interval), kind, *(f"{figures[kind][rule]:.1%}" for rule in RULES))
        for case, figures in found.items()
        for kind in KINDS
    ]
    said = [] if arguments.quick else verdicts(found)  # a hundred pairs do not tell 92% from 95%
    show(console, rows, said, results.folder / "table.md")
    show_searches(console, searches, results.folder / "searches.md")
    if arguments.json:
        document = [{**dataclasses.asdict(case), "covered": figures} for case, figures in found.items()]
        write_json(
            arguments.json, {"cases": document, "searches": searches, "verdicts": [[s, kept] for s, kept in said]}
        )
    return 0 if all(kept for _, kept in said) else 1


SEARCH_HEADS = ("noise", "true gain", "within two errors", "adopted what is not faster", "found what is", "steps")


def show_searches(console: Console, searches: Sequence[Mapping[str, Any]], path: Path) -> None:
    """What whole searches came to, on the terminal and as a table in a file."""
    table = Table(title="searches among nine settings of which one at most is faster")
    for head in SEARCH_HEADS:
        table.add_column(head, justify="left" if head == "noise" else "right")
    lines = [SEARCH_HEADS, ["---", *["---:"] * (len(SEARCH_HEADS) - 1)]]
    for (load, gain_share), one in zip(((load, share) for load in LOADS for share in GAINS), searches, strict=True):
        shares = [f"{one[name]:.1%}" for name in ("held", "wrong", "found")]
        lines.append((load, f"{gain_share:.0%}", *shares, f"{one['steps']:.0f}"))
        table.add_row(*lines[-1])
    console.print(table)
    path.write_text("\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n", encoding="utf-8")


def show(console: Console, rows: Sequence[Sequence[str]], said: Sequence[tuple[str, bool]], path: Path) -> None:
    """All figures and verdicts, on the terminal and as a table in a file."""
    table = Table(title="differences of runs that do not differ: share within two standard errors")
    for head in HEADS:
        table.add_column(head, justify="left" if head == "noise" else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for sentence, kept in said:
        console.print(f"{'kept  ' if kept else 'BROKEN'} {sentence}", highlight=False)
    lines = [HEADS, ["---:", "---:", "---", *["---:"] * len(RULES)], *rows]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    text += "\n\n" + "\n".join(f"- {'kept' if kept else 'BROKEN'}: {sentence}" for sentence, kept in said) + "\n"
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
