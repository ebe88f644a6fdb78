"""From records to figures and claims."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from studykit import percentile

from sidebyside.setting import (
    NO_OFFLOAD,
    OVERLAPPED,
    REPLAY,
    REPLAY_SPLIT,
    SEQUENTIAL,
    UPDATE_INTERVAL,
    UPSTREAM_ZENFLOW,
    ZERO_OFFLOAD,
)

LEAST_SHARE, MOST_TIME, MOST_SPREAD, ERRORS = 0.5, 0.8, 1.15, 2.0
FIRST_LOSS = 0.01  # how far a first loss may be from the plain model's, relative; noise is at least three times as much

Records = Sequence[Mapping[str, Any]]
"""Figures of one size, a record for each seed."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds with its standard error; None for one seed."""

    mean: float
    error: float | None

    @classmethod
    def of(cls, values: Iterable[float]) -> Estimate:
        """Of one value a seed."""
        found = list(values)
        mean = math.fsum(found) / len(found)
        return cls(mean, statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else None)


@dataclass(frozen=True, slots=True)
class Row:
    """One system at one size."""

    mean_ms: float
    """Of a step, all work included."""
    processor_ms: float
    """Processor time of a step, over all threads and processes."""
    p50_ms: float
    p95_ms: float
    spread: float
    """p95 over p50 of single steps, the median over the seeds."""
    window_spread: float
    """The same of the means over windows of `UPDATE_INTERVAL` steps."""
    backward_ms: float
    """Forward and backward, and what a system does meanwhile."""
    bytes_per_element: float
    losses: Estimate
    """Held-out, at equal steps: the last."""
    at_equal_time: Estimate
    """Held-out, when the fastest has taken its last step."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What should hold, and what was found."""

    text: str
    found: str
    holds: bool | None
    """None: cannot be judged from what is there."""


def rows(records: Records) -> dict[str, Row]:
    """Every system's row."""
    names = list(records[0]["systems"])
    equal_time = [at_equal_time(record["systems"]) for record in records]
    return {name: _row([r["systems"][name] for r in records], [t[name] for t in equal_time]) for name in names}


def _row(runs: Sequence[Mapping[str, Any]], equal_time: Sequence[float]) -> Row:
    steps = [sorted(_flat(run)) for run in runs]
    windows = [sorted(windows_of(run)) for run in runs]
    parts = [statistics.fmean(part) for part in zip(*(p for run in runs for p in run["parts_ms"]), strict=True)]
    return Row(
        mean_ms=statistics.fmean(mean_of(run) for run in runs),
        processor_ms=statistics.fmean(ms for run in runs for ms in run["processor_ms"]),
        p50_ms=statistics.median(percentile(each, 0.5) for each in steps),
        p95_ms=statistics.median(percentile(each, 0.95) for each in steps),
        spread=statistics.median(percentile(each, 0.95) / percentile(each, 0.5) for each in steps),
        window_spread=statistics.median(percentile(each, 0.95) / percentile(each, 0.5) for each in windows),
        backward_ms=parts[0] + parts[1],
        bytes_per_element=sum(runs[0]["host_bytes"].values()) / runs[0]["elements"],
        losses=Estimate.of(last_loss(run) for run in runs),
        at_equal_time=Estimate.of(equal_time),
    )


def _flat(run: Mapping[str, Any]) -> list[float]:
    return [step for turn in run["steps_ms"] for step in turn]


def windows_of(run: Mapping[str, Any]) -> list[float]:
    """Mean step of each counted window, in ms."""
    size = UPDATE_INTERVAL
    return [
        statistics.fmean(turn[start : start + size]) for turn in run["steps_ms"] for start in range(0, len(turn), size)
    ]


def mean_of(run: Mapping[str, Any]) -> float:
    """Mean counted step, in ms."""
    return statistics.fmean(_flat(run))


def last_loss(run: Mapping[str, Any]) -> float:
    """Held-out loss after all steps."""
    loss: float = run["held_out"][max(run["held_out"], key=int)]
    return loss


def at_equal_time(systems: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Each system's held-out loss when the fastest has taken its last step, linear between evaluations."""
    end_ms = min(mean_of(run) * max(map(int, run["held_out"])) for run in systems.values())
    return {name: _loss_after(run, end_ms / mean_of(run)) for name, run in systems.items()}


def _loss_after(run: Mapping[str, Any], steps: float) -> float:
    points = sorted((int(number), loss) for number, loss in run["held_out"].items())
    for (before, first), (after, second) in itertools.pairwise(points):
        if steps <= after:
            return float(first + (second - first) * (steps - before) / (after - before))
    return float(points[-1][1])


def ratios(records: Records, name: str, other: str) -> list[float]:
    """Mean step of one system over another's, turn by turn."""
    return [
        statistics.fmean(mine) / statistics.fmean(theirs)
        for record in records
        for mine, theirs in zip(record["systems"][name]["steps_ms"], record["systems"][other]["steps_ms"], strict=True)
    ]


def offloading_share(found: Mapping[str, Row]) -> float:
    """What ZeRO-Offload's step has besides the plain model's forward and backward, as a share of it.

    Gradients on their way, their norm, the update, and weights on their way back: some of it runs inside backward.
    """
    return 1 - found[NO_OFFLOAD].backward_ms / found[ZERO_OFFLOAD].mean_ms


def fastest_upstream(found: Mapping[str, Row]) -> str:
    """The mode of upstream's ZenFlow with the shorter mean step."""
    return min(UPSTREAM_ZENFLOW, key=lambda name: found[name].mean_ms)


def first_losses(records: Records) -> Claim:
    """Whether every system began with the pretrained weights as they are."""
    worst = max(
        (abs(run["losses"][0] / record["systems"][NO_OFFLOAD]["losses"][0] - 1), name)
        for record in records
        for name, run in record["systems"].items()
    )
    return Claim(
        f"every system's first loss is the plain model's, within {FIRST_LOSS:.0%}",
        f"{worst[0]:.2%} off at most ({worst[1]})",
        worst[0] <= FIRST_LOSS,
    )


def claims(records: Records) -> list[Claim]:
    """What should hold at the largest size."""
    found = rows(records)
    replay, fastest, share = found[REPLAY], fastest_upstream(found), offloading_share(found)
    times, beside = (ratios(records, name, fastest) for name in (REPLAY, REPLAY_SPLIT))
    middle = statistics.median(times)
    upstream = {name: found[name].spread for name in UPSTREAM_ZENFLOW}
    return [
        first_losses(records),
        Claim(f"offloading is at least {LEAST_SHARE} of ZeRO-Offload's step", f"{share:.2f}", share >= LEAST_SHARE),
        Claim(
            f"replay takes at most {MOST_TIME} of the step of upstream's faster ZenFlow ({fastest})",
            f"{middle:.2f} ({min(times):.2f} - {max(times):.2f}); with 1 + 1 threads {statistics.median(beside):.2f}",
            middle <= MOST_TIME,
        ),
        Claim(
            f"replay's p95/p50 is at most {MOST_SPREAD}",
            f"{replay.spread:.2f}; ZeRO-Offload, whose steps are all alike: {found[ZERO_OFFLOAD].spread:.2f}",
            replay.spread <= MOST_SPREAD,
        ),
        Claim(
            "replay's p95/p50 is below upstream ZenFlow's",
            f"{replay.spread:.2f}; sequential {upstream[SEQUENTIAL]:.2f}, overlapped {upstream[OVERLAPPED]:.2f}",
            replay.spread < min(upstream.values()),
        ),
        *(_loss_claim(records, name) for name in UPSTREAM_ZENFLOW),
    ]


def _loss_claim(records: Records, name: str) -> Claim:
    differences = [last_loss(r["systems"][REPLAY]) - last_loss(r["systems"][name]) for r in records]
    found = Estimate.of(differences)
    text = f"replay's held-out loss at equal steps is not above that of {name} by more than {ERRORS:g} standard errors"
    if found.error is None:
        return Claim(text, f"{found.mean:+.4f}, one seed", None)
    holds = found.mean <= ERRORS * found.error
    return Claim(text, f"{found.mean:+.4f}, standard error {found.error:.4f}, {len(records)} seeds", holds)
