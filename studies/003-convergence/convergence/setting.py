"""What one run is: its setting, and the parts of the study that it belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Regime = Literal["fine-tuning", "from scratch"]
Method = Literal[
    "synchronous", "replay", "coast", "staggered", "guess", "mean", "probe", "instrument", "ahead",
    "deepspeed", "deepspeed repaired",
]  # fmt: skip
Schedule = Literal["constant", "decay"]

REGIMES: tuple[Regime, ...] = ("fine-tuning", "from scratch")
SCHEDULES: tuple[Schedule, ...] = ("constant", "decay")
RULES: tuple[Method, ...] = ("replay", "mean")
"""Of `deferred_update`; "coast" is replay with `look_ahead="coast"`, "staggered" that in staggered windows, "guess"
that with `look_ahead="guess"`; "ahead" is synchronous AdamW whose weights are shown moved on as with "coast"."""
AheadMethod = tuple[Method, float, int, int]
"""With the share of the columns that is selected, S and L."""
AHEAD_METHODS: tuple[AheadMethod, ...] = (
    ("replay", 0.05, 4, 4),
    ("coast", 0.05, 4, 4),
    ("staggered", 0.05, 4, 1),
    ("guess", 0.05, 4, 1),
    ("guess", 0.0, 4, 1),
)
LONGER: tuple[AheadMethod, ...] = (
    ("replay", 0.05, 8, 8),
    ("guess", 0.05, 8, 1),
    ("guess", 0.0, 8, 1),
    ("guess", 0.0, 16, 1),
    ("ahead", 0.0, 4, 1),
)
"""Longer windows, and the control: what looking ahead does where nothing is late."""
LATER: tuple[AheadMethod, ...] = (("guess", 0.0, 4, 2), ("guess", 0.0, 4, 3))
"""Windows that are visible later than in the next step, as a slow host needs them."""
RATES = (1e-5, 1e-4, 1e-3)
RATIOS = (0.0, 0.05, 0.1)
INTERVALS = (1, 2, 4, 8)
SEEDS = (0, 1, 2, 3, 4)
BETWEEN: dict[Regime, tuple[float, ...]] = {
    "fine-tuning": (5e-5, 2e-4, 3e-4, 5e-4, 2e-3),
    "from scratch": (3e-5, 3e-4, 2e-3),
}
"""Learning rates between and beyond those of the grid, for the crossover and each method's best rate."""
AHEAD: tuple[tuple[Regime, float], ...] = (
    ("fine-tuning", 1e-4),
    ("fine-tuning", 3e-4),
    ("fine-tuning", 1e-3),
    ("from scratch", 1e-4),
    ("from scratch", 1e-3),
)
"""Where replay with and without look-ahead are compared, all seeds."""
HURTING: tuple[tuple[Regime, float], ...] = (("fine-tuning", 3e-4), ("fine-tuning", 1e-3), ("from scratch", 1e-3))
"""Where late updates cost something, so that remedies can be told apart."""


@dataclass(frozen=True, order=True, kw_only=True)
class Setting:
    """One run. `lag` is 0 where nothing overlaps: a window's updates are visible in the step that closes it."""

    regime: Regime
    method: Method
    lr: float
    ratio: float = 0.0
    interval: int = 1
    lag: int = 0
    warm_up: int = 0
    schedule: Schedule = "constant"
    seed: int = 0
    bucket_kib: int = 0
    """Size of a bucket; 0: the runtime's own, in which this model is one bucket."""

    @property
    def key(self) -> str:
        """The whole setting in a line."""
        knobs = f"k={self.ratio:g} S={self.interval} L={self.lag} W={self.warm_up}"
        buckets = f" buckets of {self.bucket_kib} KiB" if self.bucket_kib else ""
        return f"{self.regime}, {self.method}: lr={self.lr:g} {self.schedule} {knobs} seed={self.seed}{buckets}"

    @property
    def staleness(self) -> float:
        """Mean steps from a deferred gradient to its update, in a model of many buckets; 0 where nothing is late."""
        return (self.interval + (self.lag or -1)) / 2

    def synchronous(self) -> Setting:
        """The run that this one is compared with: the same but that nothing is late."""
        own = {"regime": self.regime, "lr": self.lr, "schedule": self.schedule, "seed": self.seed}
        return Setting(method="synchronous", **own)  # type: ignore[arg-type]

    def probe(self) -> Setting:
        """The run that measures what could tell how this one will end."""
        return Setting(regime=self.regime, method="probe", lr=self.lr, schedule=self.schedule)


def published(regime: Regime, method: Method, lr: float, **more: object) -> Setting:
    """k = 0.05, S = 4, L = S, what the tutorial of DeepSpeed's ZenFlow sets."""
    return Setting(**{"regime": regime, "method": method, "lr": lr, "ratio": 0.05, "interval": 4, "lag": 4, **more})  # type: ignore[arg-type]


def grid(regime: Regime) -> Iterator[Setting]:
    """Every learning rate, rule, k, S and L at one seed; at S = 1 both rules are the same update."""
    for lr in RATES:
        start = Setting(regime=regime, method="synchronous", lr=lr)
        yield start
        yield start.probe()
        for ratio in RATIOS:
            for interval in INTERVALS:
                for rule in RULES if interval > 1 else RULES[:1]:
                    for lag in sorted({1, interval}):
                        yield replace(start, method=rule, ratio=ratio, interval=interval, lag=lag)


def four_of(regime: Regime, lr: float, seeds: Sequence[int]) -> Iterator[Setting]:
    """Synchronous, replay at both lags, and mean, at k = 0.05 and S = 4."""
    for seed in seeds:
        yield Setting(regime=regime, method="synchronous", lr=lr, seed=seed)
        yield published(regime, "replay", lr, seed=seed)
        yield published(regime, "replay", lr, seed=seed, lag=1)
        yield published(regime, "mean", lr, seed=seed)


def seeds(regime: Regime, lrs: Sequence[float]) -> Iterator[Setting]:
    """Five seeds."""
    for lr in lrs:
        yield from four_of(regime, lr, SEEDS)


def upstream() -> Iterator[Setting]:
    """DeepSpeed's ZenFlow: five seeds as its tutorial sets it, one without the defects that settings can avoid.

    At 1e-3, where every late method is far from AdamW, one seed of each.
    """
    for lr in RATES:
        for seed in SEEDS if lr < RATES[-1] else SEEDS[:1]:
            yield published("fine-tuning", "deepspeed", lr, seed=seed)
        yield published("fine-tuning", "deepspeed repaired", lr)


def between(regime: Regime) -> Iterator[Setting]:
    """One seed at more learning rates."""
    for lr in BETWEEN[regime]:
        yield from four_of(regime, lr, SEEDS[:1])
        yield Setting(regime=regime, method="probe", lr=lr)


def instruments() -> Iterator[Setting]:
    """What the runtime reports of movement: synchronous, and in windows."""
    for regime in REGIMES:
        for lr in RATES:
            start = Setting(regime=regime, method="instrument", lr=lr, ratio=0.05)
            yield start
            yield from (replace(start, interval=size, lag=size) for size in (4, 8))


def ahead(regime: Regime, lr: float, how: AheadMethod, seed: int = 0) -> Setting:
    """In as many buckets as a large model has."""
    method, ratio, interval, lag = how
    return published(regime, method, lr, bucket_kib=16, ratio=ratio, interval=interval, lag=lag, seed=seed)


def look_ahead(methods: Sequence[AheadMethod]) -> Iterator[Setting]:
    """Late updates with and without look-ahead."""
    for seed in SEEDS:
        for regime, lr in AHEAD:
            yield Setting(regime=regime, method="synchronous", lr=lr, seed=seed)
            yield from (ahead(regime, lr, how, seed) for how in methods)


def remedies() -> Iterator[Setting]:
    """Where staleness hurts: no overlap, synchronous first steps, more columns on the device, another schedule."""
    for regime, lr in HURTING:
        replay = published(regime, "replay", lr)
        yield replay.synchronous()
        yield from (replace(replay, method=rule, lag=0) for rule in RULES)
        yield from (replace(replay, interval=size, lag=lag) for size, lag in ((1, 1), (2, 1), (2, 2)))
        yield from (replace(replay, warm_up=steps) for steps in (50, 100, 200))
        yield from (replace(replay, ratio=ratio) for ratio in (0.2, 0.5))
        yield replace(replay, interval=2, lag=1, warm_up=50)
        for setting in four_of(regime, lr, SEEDS[:1]):
            yield replace(setting, schedule="decay")
    for lr, seeds_of in ((1e-4, SEEDS[:1]), (3e-4, SEEDS)):
        for setting in four_of("fine-tuning", lr, seeds_of):
            yield replace(setting, schedule="decay")
