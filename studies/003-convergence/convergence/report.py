"""The runs as tables, in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from convergence.analysis import (
    HURTS_PERCENT,
    Interval,
    Runs,
    excess_percent,
    hurting_rate,
    interval,
    loss,
    over_seeds,
    rule_rate,
)
from convergence.predict import (
    PROMISED,
    Bound,
    Point,
    Prediction,
    bound,
    duels,
    halves,
    late_percent,
    movement_percent,
    points,
    predictions,
)
from convergence.setting import (
    AHEAD,
    AHEAD_METHODS,
    BETWEEN,
    HURTING,
    INTERVALS,
    LATER,
    LONGER,
    RATES,
    RATIOS,
    REGIMES,
    RULES,
    SCHEDULES,
    SEEDS,
    AheadMethod,
    Regime,
    Setting,
    ahead,
    grid,
    instruments,
    published,
    remedies,
    seeds,
)

NONE = "-"


def all_rates(runs: Runs, regime: Regime) -> list[float]:
    """Learning rates that have a synchronous run, ascending, among those that the study looks at."""
    found = {
        hurting_rate(runs, regime, (*RATES, *BETWEEN[regime])),
        rule_rate(runs, regime, (*RATES, *BETWEEN[regime])),
    }
    wanted = {*RATES, *BETWEEN[regime], *(rate for rate in found if rate is not None)}
    return sorted(lr for lr in wanted if loss(runs, Setting(regime=regime, method="synchronous", lr=lr)) is not None)


def number(value: float | None, form: str = "+.3f") -> str:
    """A figure, or a dash."""
    return NONE if value is None else format(value, form)


def with_interval(found: Interval | None, form: str = "+.3f") -> str:
    """A mean and half the width of its interval."""
    if found is None:
        return NONE
    return number(found.mean, form) + ("" if found.half is None else f" ± {found.half:.2g}")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A Markdown table, its first column to the left."""
    yield f"| {' | '.join(head)} |"
    yield "|---|" + "---:|" * (len(head) - 1)
    yield from (f"| {' | '.join(row)} |" for row in rows)


def grid_table(runs: Runs, regime: Regime) -> Iterator[str]:
    """Excess of every setting of the grid, in percent of the synchronous loss."""
    cells = [(lr, ratio) for lr in RATES for ratio in RATIOS]
    rows = []
    for size in INTERVALS:
        for rule in RULES if size > 1 else RULES[:1]:
            for lag in sorted({1, size}):
                late = Setting(regime=regime, method=rule, lr=0.0, interval=size, lag=lag)
                found = [excess_percent(runs, replace(late, lr=lr, ratio=ratio)) for lr, ratio in cells]
                name = f"{'either' if size == 1 else rule}, S = {size}, L = {lag}"
                rows.append([name, *(number(value) for value in found)])
    losses = [loss(runs, Setting(regime=regime, method="synchronous", lr=lr)) for lr, _ in cells]
    rows.append(["synchronous loss, nats", *(number(value, ".4f") for value in losses)])
    yield from table(["excess, %", *(f"{lr:g}, k = {ratio:g}" for lr, ratio in cells)], rows)


def seeds_table(runs: Runs, regime: Regime) -> Iterator[str]:
    """Mean loss and paired excess over the seeds, for each method and learning rate."""
    lates: dict[str, Setting] = {
        "replay, L = 4": published(regime, "replay", 0.0),
        "replay, L = 1": published(regime, "replay", 0.0, lag=1),
        "mean, L = 4": published(regime, "mean", 0.0),
        "DeepSpeed's ZenFlow, tutorial": published(regime, "deepspeed", 0.0),
        "DeepSpeed's ZenFlow, repaired": published(regime, "deepspeed repaired", 0.0),
    }
    rows = []
    for schedule in SCHEDULES:
        for lr in all_rates(runs, regime):
            own = Setting(regime=regime, method="synchronous", lr=lr, schedule=schedule)
            losses = [loss(runs, replace(own, seed=seed)) for seed in SEEDS]
            there = [value for value in losses if value is not None]
            if not there:
                continue
            late = [over_seeds(runs, replace(s, lr=lr, schedule=schedule), SEEDS) for s in lates.values()]
            name = f"{lr:g}" + ("" if schedule == "constant" else ", up and down")
            rows.append([name, str(len(there)), with_interval(interval(there), ".4f"), *map(with_interval, late)])
    yield from table(["learning rate", "seeds", "synchronous loss", *(f"{name}, %" for name in lates)], rows)


def crossover_lines(runs: Runs, regime: Regime) -> Iterator[str]:
    """Where replay begins to hurt, where the mean overtakes it, and each method's best learning rate."""
    rates = all_rates(runs, regime)
    for lag in (4, 1):
        rate = hurting_rate(runs, regime, rates, lag)
        known = "does not cross here" if rate is None else f"from a learning rate of {rate:g} on"
        yield f"- replay, S = 4, L = {lag}, more than {HURTS_PERCENT}% above synchronous: {known}"
    rate = rule_rate(runs, regime, rates)
    yield f"- replay worse than the mean, S = L = 4: {'does not cross here' if rate is None else f'from {rate:g} on'}"
    lates = {
        "synchronous": Setting(regime=regime, method="synchronous", lr=0.0),
        "replay, L = 4": published(regime, "replay", 0.0),
        "replay, L = 1": published(regime, "replay", 0.0, lag=1),
        "mean, L = 4": published(regime, "mean", 0.0),
    }
    best = []
    for name, setting in lates.items():
        found = [(value, lr) for lr in rates if (value := loss(runs, replace(setting, lr=lr))) is not None]
        if found:
            best.append(f"{name} {min(found)[0]:.4f} at {min(found)[1]:g}")
    yield f"- each at its best learning rate of these (seed 0): {', '.join(best)}"


def remedy_table(runs: Runs) -> Iterator[str]:
    """Excess where staleness hurts, with one thing changed at a time."""
    places: list[tuple[Regime, float]] = [("fine-tuning", 1e-4), *HURTING]
    rows = []
    for name, change in REMEDIES.items():
        base = [published(regime, "replay", lr) for regime, lr in places]
        rows.append([name, *(number(excess_percent(runs, replace(setting, **change))) for setting in base)])  # type: ignore[arg-type]
    yield from table(["excess, %", *(f"{regime}, {lr:g}" for regime, lr in places)], rows)


REMEDIES: dict[str, dict[str, object]] = {
    "replay, k = 0.05, S = 4, L = 4": {},
    "L = 1": {"lag": 1},
    "S = 2, L = 2": {"interval": 2, "lag": 2},
    "S = 2, L = 1": {"interval": 2, "lag": 1},
    "S = 1, L = 1": {"interval": 1, "lag": 1},
    "S = 4 without overlap": {"lag": 0},
    "mean": {"method": "mean"},
    "mean without overlap": {"method": "mean", "lag": 0},
    **{f"first {steps} of 300 steps synchronous": {"warm_up": steps} for steps in (50, 100, 200)},
    "S = 2, L = 1, first 50 synchronous": {"interval": 2, "lag": 1, "warm_up": 50},
    "k = 0.2": {"ratio": 0.2},
    "k = 0.5": {"ratio": 0.5},
    "learning rate up and down": {"schedule": "decay"},
    "learning rate up and down, L = 1": {"schedule": "decay", "lag": 1},
    "learning rate up and down, mean": {"schedule": "decay", "method": "mean"},
}
"""What may help, as a change of replay at the published setting."""


def late_settings(runs: Runs, regime: Regime) -> list[Setting]:
    """Replay at one seed with a constant learning rate: the grid, and the rates between."""
    between = [published(regime, "replay", lr, lag=lag) for lr in all_rates(runs, regime) for lag in (1, 4)]
    found = [s for s in (*grid(regime), *between) if s.method == "replay"]
    return list({setting.key: setting for setting in found}.values())


def prediction_table(runs: Runs, found_in: Callable[[Runs, list[Setting]], list[Point]], limit: float) -> Iterator[str]:
    """How each quantity goes with the excess of replay, over both regimes and in each."""
    sets: dict[str, tuple[Regime, ...]] = {"both": REGIMES, **{regime: (regime,) for regime in REGIMES}}
    by_set: dict[str, dict[str, Prediction]] = {}
    for name, regimes in sets.items():
        settings = [setting for regime in regimes for setting in late_settings(runs, regime)]
        by_set[name] = {row.quantity: row for row in predictions(found_in(runs, settings), limit)}
    head = ["quantity", "largest harmless", "smallest harmful"]
    rows = []
    for quantity, row in by_set["both"].items():
        cells = [quantity, number(row.largest_good, ".3g"), number(row.smallest_bad, ".3g")]
        for name in sets:
            found = by_set[name].get(quantity)
            pair = (None, None) if found is None else (found.correlation, found.separation)
            cells += [number(value, ".3f") for value in pair]
        rows.append(cells)
    for name in sets:
        n = max((row.n for row in by_set[name].values()), default=0)
        head += [f"{name} ({n}): rank correlation", "separation"]
    yield from table(head, rows)


def every_late(runs: Runs) -> list[Setting]:
    """All of replay with overlap at a constant learning rate and one seed: the grid, between, and what may help."""
    found = [setting for regime in REGIMES for setting in late_settings(runs, regime)]
    found += [s for s in remedies() if s.method == "replay" and s.lag and s.schedule == "constant"]
    return list({setting.key: setting for setting in found}.values())


_HALVES = 1000


def bound_table(runs: Runs) -> Iterator[str]:
    """The bound on the excess by movement: chosen on one half of the settings, judged on the other."""
    found = [point for point in points(runs, every_late(runs)) if movement_percent(point.probed)]
    by_regime = {regime: [point for point in found if point.setting.regime == regime] for regime in REGIMES}
    if not all(by_regime.values()):
        return
    first, second = by_regime.values()
    names = {"fine-tuning": bound(first, second), "from scratch": bound(second, first)}
    others = points(runs, (s for regime in REGIMES for s in seeds(regime, RATES) if s.method == "replay" and s.seed))
    if others:
        names["seed 0 (judged: seeds 1 to 4)"] = bound(found, others)
    rows = [[name, *_of_bound(one)] for name, one in names.items()]
    random = list(halves(found, _HALVES))
    shares, worst = sorted(100 * one.above / one.judged for one in random), sorted(one.worst for one in random)
    middle, most = _HALVES // 2, round(0.9 * _HALVES)
    coefficient = sorted(one.coefficient for one in random)[middle]
    rows.append(
        [
            f"{_HALVES} random halves: median (90%)",
            *(f"{coefficient:.1f}", "", ""),
            f"{shares[middle]:.1f}% ({shares[most]:.1f}%)",
            f"{worst[middle]:.2f} ({worst[most]:.2f})",
        ]
    )
    yield from table(["chosen on", "coefficient", "settings", "judged on", "above the bound", "worst, times it"], rows)
    yield ""
    coefficient = names["fine-tuning"].coefficient
    for quality, promised in PROMISED.items():
        limit = (promised / coefficient) ** 0.5
        allowed = [point for point in found if late_percent(point) <= limit]
        lost = max((point.excess for point in allowed), default=0.0)
        needless = sum(point.excess <= promised for point in found) - len(allowed)
        yield (
            f"- {quality}, at most {promised}%: weights may move {limit:.3f}%. {len(allowed)} of {len(found)} settings "
            f"are allowed, {sum(point.setting.regime == REGIMES[1] for point in allowed)} of them from scratch, "
            f"which lost {lost:.2f}% at most; {needless} that lost no more than was promised are refused"
        )


def _of_bound(found: Bound) -> list[str]:
    share = 100 * found.above / found.judged
    return [
        f"{found.coefficient:.1f}", str(found.chosen), str(found.judged), f"{found.above} ({share:.1f}%)",
        f"{found.worst:.2f}",
    ]  # fmt: skip


def instrument_table(runs: Runs) -> Iterator[str]:
    """What the runtime reports of the movement, beside that of torch's AdamW at the same places."""
    rows = []
    for setting in instruments():
        own, probed = runs.get(setting.key), runs.get(setting.probe().key)
        expected = None if probed is None else movement_percent(probed)
        if own is not None and expected:
            found = own["movement_percent"]
            name = f"{setting.regime}, {setting.lr:g}, S = {setting.interval}"
            cells = [expected, found, own["whole_percent"]]
            rows.append([name, *(f"{cell:.4f}" for cell in cells), f"{100 * (found / expected - 1):+.1f}"])
    yield from table(["", "torch, %", "runtime, %", "without sampling, %", "runtime against torch, %"], rows)


def look_ahead_tables(runs: Runs) -> str:
    """What late updates lose with and without look-ahead, over seeds."""
    title = "# 003: excess over synchronous AdamW in percent, mean and 95% interval over seeds"
    return "\n\n".join([title, *(look_ahead_table(runs, methods) for methods in (AHEAD_METHODS, LONGER, LATER))]) + "\n"


def look_ahead_table(runs: Runs, methods: Sequence[AheadMethod]) -> str:
    """A row for each regime and learning rate."""
    rows = []
    for regime, lr in AHEAD:
        found = [over_seeds(runs, ahead(regime, lr, how), SEEDS) for how in methods]
        rows.append([f"{regime}, {lr:g}", *map(with_interval, found)])
    names = [f"{method}, k = {ratio:g}, S = {size}, L = {lag}" for method, ratio, size, lag in methods]
    return "\n".join(table(["regime, learning rate", *names], rows))


def markdown(runs: Runs) -> str:
    """Every table of the study."""
    lines = ["# 003: tables", "", "Excess is of the held-out loss over the synchronous run of the same seed."]
    for regime in REGIMES:
        if not all_rates(runs, regime):
            continue
        lines += ["", f"## {regime}: grid, one seed", "", *grid_table(runs, regime)]
        lines += ["", f"## {regime}: k = 0.05, S = 4, mean and 95% interval over seeds", "", *seeds_table(runs, regime)]
        lines += ["", *crossover_lines(runs, regime)]
    lines += ["", "## What helps where it hurts, one seed", "", *remedy_table(runs)]
    lines += ["", f"## What tells that replay will be more than {HURTS_PERCENT}% above synchronous, one seed", ""]
    lines += prediction_table(runs, points, HURTS_PERCENT)
    lines += ["", "## What tells that replay will be worse than the mean of the same knobs, one seed", ""]
    lines += prediction_table(runs, duels, 0.0)
    lines += ["", "## Excess at most so many times the square of what weights move before late updates arrive", ""]
    lines += bound_table(runs)
    lines += ["", "## What the runtime reports of movement", "", *instrument_table(runs)]
    return "\n".join(lines) + "\n"
