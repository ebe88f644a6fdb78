"""Two profiles beside each other: what changed, and whether by more than the steps of each vary."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from zftune.profile.units import ms, number, percent
from zftune.report.noise import standard_error
from zftune.report.settings import Setting, changed_settings, warnings_about
from zftune.report.values import Document, figures, shown

Finding = Literal["beyond noise", "within noise", "same", "changed", "noise unknown", "only in A", "only in B"]

SCHEMA_NAME = "zftune.comparison/1"
_ERRORS = 2.0
"""Standard errors of a difference that count as noise."""
_SAME = 1e-3
"""Relative difference up to which figures without a noise are called the same."""
_COUNTS = ("link", "memory")
_NO_NOISE = (
    "host.update_ms",
    "host.gbps",
    "practicality",
    "hidden_ms_per_step",
    "roofs.least_step_ms",
    "selection.coverage",
    "staleness.mean",
    "nvml.utilisation_percent",
    "nvml.sm_utilisation_percent",
    "nvml.pcie_rx_gbps",
    "nvml.pcie_tx_gbps",
    "nvml.power_w",
    "nvml.memory_used_bytes",
    "system.cpu_percent",
    "system.rss_bytes",
)


@dataclass(frozen=True, slots=True)
class Difference:
    """A figure in both profiles."""

    name: str
    """Dotted, as in the document."""
    a: float | None
    """None where that profile lacks it."""
    b: float | None
    standard_error: float | None
    """Of b - a; None where the figure has no value for each step."""
    finding: Finding

    @property
    def change(self) -> float | None:
        """From a to b."""
        return None if self.a is None or self.b is None else self.b - self.a

    @property
    def relative(self) -> float | None:
        """The change as a share of a."""
        return None if self.change is None or not self.a else self.change / abs(self.a)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a comparison found."""

    differences: list[Difference]
    settings: list[Setting]
    """Knobs, workload, versions and hardware that differ."""
    warnings: list[str]
    """Why the figures may not be comparable."""
    verdict: list[str]

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "schema": SCHEMA_NAME,
            "verdict": self.verdict,
            "warnings": self.warnings,
            "differences": [
                {**dataclasses.asdict(one), "change": one.change, "relative": one.relative} for one in self.differences
            ],
            "settings": [dataclasses.asdict(one) for one in self.settings],
        }


def compare(a: Document, b: Document) -> Comparison:
    """Compare two valid profile documents; `b` is seen as the change of `a`.

    Noise is what the steps of each run vary by; what differs from run to run on top of it no single pair can show.
    """
    differences = [*_timed(a, b), *_others(a, b)]
    settings = changed_settings(a, b)
    return Comparison(differences, settings, warnings_about(a, b, settings), [*_verdict(differences, settings)])


# --- figures ----------------------------------------------------------------------------------------------------------


def _timed(a: Document, b: Document) -> Iterator[Difference]:
    """Figures that every step has a value of."""
    yield _compared("step_ms.mean", _series(a, "step_ms"), _series(b, "step_ms"), _window(a), _window(b))
    for field, name in (("stall_ms", "stall.by_cause"), ("phases_ms", "phases_ms")):
        if field == "stall_ms" and a["stall"] is not None and b["stall"] is not None:
            totals = (_totals(a), _totals(b))
            yield _compared("stall.ms_per_step", *totals, _window(a), _window(b))
        keys = dict.fromkeys(key for side in (a, b) for row in side["per_step"] for key in row[field] or ())
        for key in keys:
            yield _compared(f"{name}.{key}", _series(a, field, key), _series(b, field, key), _window(a), _window(b))


def _series(document: Document, field: str, key: str | None = None) -> list[float] | None:
    """The figure step by step; None where the profile does not have it."""
    rows = [row[field] for row in document["per_step"]]
    if key is None:
        return rows
    if any(row is None for row in rows):
        return None
    known = [row.get(key) for row in rows]
    # A cause that cannot occur is left out of a profile that tells causes apart.
    filled = [0.0 if value is None and field == "stall_ms" else value for value in known]
    return None if any(value is None for value in filled) else filled


def _totals(document: Document) -> list[float] | None:
    rows = [row["stall_ms"] for row in document["per_step"]]
    return None if any(row is None for row in rows) else [sum(row.values()) for row in rows]


def _window(document: Document) -> int:
    knobs = document["knobs"]
    return 1 if knobs is None else int(knobs["update_interval"])


def _compared(name: str, a: list[float] | None, b: list[float] | None, *windows: int) -> Difference:
    if a is None or b is None:
        values = [None if side is None else statistics.fmean(side) for side in (a, b)]
        return Difference(name, values[0], values[1], None, _without_noise(values[0], values[1], "noise unknown"))
    first, second = statistics.fmean(a), statistics.fmean(b)
    errors = [standard_error(side, window) for side, window in zip((a, b), windows, strict=True)]
    if errors[0] is None or errors[1] is None:
        return Difference(name, first, second, None, "noise unknown")
    error = math.hypot(errors[0], errors[1])
    beyond = abs(second - first) > _ERRORS * error + 1e-9 * abs(first)
    return Difference(name, first, second, error, "beyond noise" if beyond else "within noise")


def _others(a: Document, b: Document) -> Iterator[Difference]:
    """Counts, which have no noise, and means of which only the mean is known."""
    known = [{name: value for name, value in figures(side) if _is_number(value)} for side in (a, b)]
    for name in dict.fromkeys([*known[0], *known[1]]):
        is_count = name.partition(".")[0] in _COUNTS
        if is_count or name in _NO_NOISE:
            values = known[0].get(name), known[1].get(name)
            yield Difference(name, *values, None, _without_noise(*values, "changed" if is_count else "noise unknown"))


def _without_noise(a: float | None, b: float | None, otherwise: Finding) -> Finding:
    if a is None or b is None:
        return "only in B" if a is None else "only in A"
    return "same" if abs(b - a) <= _SAME * max(abs(a), abs(b)) else otherwise


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# --- verdict ----------------------------------------------------------------------------------------------------------


def _verdict(differences: list[Difference], settings: list[Setting]) -> Iterator[str]:
    by_name = {one.name: one for one in differences}
    yield _about_step(by_name["step_ms.mean"])
    stall = by_name.get("stall.ms_per_step")
    causes = [one for one in differences if one.name.startswith("stall.by_cause.") and one.finding == "beyond noise"]
    causes.sort(key=lambda one: -abs(one.change or 0.0))
    if stall is not None and stall.finding in ("beyond noise", "within noise"):
        yield _about_stall(stall, causes)
    knobs = [one for one in settings if one.name.startswith("knobs.")]
    if knobs:
        changes = ", ".join(f"{one.name.removeprefix('knobs.')} {one.a} → {one.b}" for one in knobs[:4])
        more = f" and {len(knobs) - 4} more" if len(knobs) > 4 else ""
        yield f"Knobs that changed: {changes}{more}."


def _about_step(step: Difference) -> str:
    assert step.a is not None
    assert step.b is not None
    if step.standard_error is None:
        return f"The step goes from {ms(step.a)} to {ms(step.b)}; there are too few steps to know the noise."
    error = f"{number(step.standard_error)} ms"
    if step.finding == "within noise":
        return (
            f"The step does not differ beyond noise: {ms(step.a)} and {ms(step.b)}, a difference of "
            f"{number(step.b - step.a)} ms with a standard error of {error}."
        )
    word = "shorter" if step.b < step.a else "longer"
    share = percent(abs(step.b - step.a) / step.a)
    return f"The step is {share} {word}: {ms(step.a)} → {ms(step.b)}, with a standard error of {error}."


def _about_stall(stall: Difference, causes: list[Difference]) -> str:
    """A sentence; the causes are those that differ beyond noise, the largest difference first."""
    assert stall.a is not None
    assert stall.b is not None
    most = [
        f"{one.name.rpartition('.')[2]} ({shown(one.name, one.a)} → {shown(one.name, one.b)})" for one in causes[:1]
    ]
    if stall.finding == "within noise":
        return "Stall does not differ beyond noise" + "".join(f" in all, but that by {one} does" for one in most) + "."
    by = "".join(f", most of it by {one}" for one in most)
    return f"Stall goes from {ms(stall.a)} to {ms(stall.b)} a step{by}."
