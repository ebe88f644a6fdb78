"""Two profiles beside each other: what changed, and whether by more than noise; as a document and on a screen."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from zftune.errors import BadInputError
from zftune.profile.schema import SCHEMA_NAME as PROFILE_SCHEMA
from zftune.profile.schema import first_fault
from zftune.quality import figure
from zftune.report.tables import Setting, changed_settings, crowded, is_workload, warnings_about
from zftune.report.values import Document, figures, shown
from zftune.text import ms, number, percent
from zftune.tuner.evidence import ERRORS

_OF_MEDIAN = 1.2533
"""Standard error of a median over that of a mean, for a normal distribution."""
_MOST_CORRELATION = 0.9
_LEAST_FOR_CORRELATION = 8
_ALLOWED = "give a file that `zftune profile --json` wrote"


def read_profile(path: str) -> dict[str, Any]:
    """The profile document in a file.

    Raises:
        BadInputError: it cannot be read, is not JSON, or is not a valid profile.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInputError(f"'{path}': cannot be read ({error.strerror or error}), {_ALLOWED}") from error
    except (ValueError, RecursionError) as error:  # of bytes that are no text, a path that is none, and of JSON
        raise BadInputError(f"'{path}': is not JSON, {_ALLOWED}") from error
    name = document.get("schema") if isinstance(document, dict) else None
    if name != PROFILE_SCHEMA:
        _refuse(path, "has no schema" if name is None else f"has the schema {name!r:.60}")
    fault = first_fault(document)
    if fault is not None:
        _refuse(path, f"is not a valid profile ({fault})")
    return dict(document)


def _refuse(path: str, fault: str) -> NoReturn:
    raise BadInputError(f"'{path}': {fault}, {_ALLOWED} ({PROFILE_SCHEMA})")


_STYLES = {"beyond noise": "bold", "changed": "bold", "within noise": "dim"}

_ABOUT_NOISE = (
    "Noise is two standard errors of the difference (column error has one), estimated from the steps of each run and "
    "from how alike neighbouring steps are. Two runs with the same settings may differ by more."
)


def render(comparison: Comparison) -> RenderableType:
    """The whole screen, to be printed by a rich console."""
    return Group(*_parts(comparison))


def _parts(comparison: Comparison) -> Iterator[RenderableType]:
    sentences = [Text(sentence) for sentence in comparison.verdict]
    sentences[0].stylize("bold")
    yield Panel(Group(*sentences), title=Text("zftune compare", style="bold"), title_align="left")
    for warning in comparison.warnings:
        yield Text(f"warning: {warning}", style="yellow")
    found = [one for one in comparison.differences if one.finding != "same" and (one.a or one.b)]
    yield _figures(found, same_work=comparison.same_work)
    same = sum(one.finding == "same" for one in comparison.differences)
    if same:
        yield Text(f"{same} more figure{'s are' if same > 1 else ' is'} the same in both.", style="dim")
    if comparison.same_work:
        yield Text(_ABOUT_NOISE, style="dim")
    if comparison.settings:
        yield Text()
        yield _settings(comparison.settings)


def _figures(differences: list[Difference], *, same_work: bool) -> Table:
    table = Table(box=None, expand=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("figure", no_wrap=True)
    for title in ("A", "B", *(("change", "error") if same_work else ())):
        table.add_column(title, justify="right", no_wrap=True)
    if same_work:
        table.add_column("", no_wrap=True)
    for one in differences:
        values = (shown(one.name, value).replace(" × the model", "×") for value in (one.a, one.b))  # 80 columns
        found = (_change(one), _error(one), one.finding) if same_work else ()
        style = _STYLES.get(one.finding, "") if same_work else ""
        table.add_row(*(Text(cell) for cell in (one.name, *values, *found)), style=style)
    return table


def _change(one: Difference) -> str:
    if one.change is None:
        return "–"
    if one.relative is not None and percent(abs(one.relative)).startswith("<"):
        return percent(abs(one.relative))
    sign = "+" if one.change > 0 else "−" if one.change < 0 else ""
    return f"{sign}{percent(abs(one.relative))}" if one.relative is not None else f"{sign}{number(abs(one.change))}"


def _error(one: Difference) -> str:
    unit = "" if one.name == "loss" else " ms"
    return "" if one.standard_error is None else f"{_two_digits(one.standard_error)}{unit}"


def _two_digits(error: float) -> str:
    if error == 0 or not math.isfinite(error):
        return f"{error:g}"
    if error < _LEAST_ERROR:
        return f"< {_LEAST_ERROR:g}"
    digits = 1 - math.floor(math.log10(error))
    return f"{round(error, digits):,.{max(0, digits)}f}"


def _settings(settings: list[Setting]) -> Table:
    table = Table(box=None, expand=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("setting", no_wrap=True)
    for title in ("A", "B"):
        table.add_column(title, overflow="fold")
    for one in settings:
        table.add_row(Text(one.name), Text(one.a), Text(one.b))
    return table


Finding = Literal["beyond noise", "within noise", "same", "changed", "noise unknown", "only in A", "only in B"]

SCHEMA_NAME = "zftune.comparison/1"
_LEAST_FOR_TREND = 5
"""Steps: a line through fewer leaves nothing to tell noise by."""
_SEED = 0  # the same two files always compare alike
_SAME = 1e-3
"""Relative difference up to which figures without a noise are called the same."""
_LEAST_ERROR = 1e-6
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
    a: float | None
    """None where that profile lacks it."""
    b: float | None
    standard_error: float | None
    """Of b - a; None where the figure has no value for each step."""
    finding: Finding

    @property
    def change(self) -> float | None:
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
    warnings: list[str]
    """Why the figures may not be comparable."""
    verdict: list[str]
    same_work: bool = True
    """Whether both train the same model on batches of one shape: else no change of times, bytes or losses is shown."""

    def document(self) -> dict[str, Any]:
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
    steps = _late_steps(a, b)
    differences = [*_timed(a, b), *_loss(a, b, steps), *_others(a, b)]
    settings = changed_settings(a, b)
    same_work = not any(is_workload(one) for one in settings)
    busy = bool(crowded(a, b))
    found = _verdict(differences, settings, steps, busy) if same_work else _of_other_work(differences, settings)
    return Comparison(differences, settings, warnings_about(a, b, settings), [*found], same_work)


# --- figures ----------------------------------------------------------------------------------------------------------


def _timed(a: Document, b: Document) -> Iterator[Difference]:
    steps = _series(a, "step_ms"), _series(b, "step_ms")
    yield _compared("step_ms.mean", *steps, _window(a), _window(b))
    yield _typical(a, b)
    for field, name in (("stall_ms", "stall.by_cause"), ("phases_ms", "phases_ms")):
        if field == "stall_ms" and a["stall"] is not None and b["stall"] is not None:
            totals = (_totals(a), _totals(b))
            yield _compared("stall.ms_per_step", *totals, _window(a), _window(b))
        keys = dict.fromkeys(key for side in (a, b) for row in side["per_step"] for key in row[field] or ())
        for key in keys:
            yield _compared(f"{name}.{key}", _series(a, field, key), _series(b, field, key), _window(a), _window(b))


def _typical(a: Document, b: Document) -> Difference:
    """The step time that a search would compare the two by: slow steps that come now and then leave it as it is."""
    found = [_typical_step(_series(side, "step_ms") or (), _window(side)) for side in (a, b)]
    (first, one), (second, other) = found
    if one is None or other is None:
        return Difference("step_ms.typical", first, second, None, _without_noise(first, second, "noise unknown"))
    error = math.hypot(one, other)
    finding: Finding = "beyond noise" if abs(second - first) > ERRORS * error + 1e-9 * first else "within noise"
    return Difference("step_ms.typical", first, second, error, finding)


def _typical_step(steps_ms: Sequence[float], window: int) -> tuple[float, float | None]:
    """Of each place in the window the median, of these the mean, and its standard error; None: fewer than two windows.

    The error is that of a mean of as many steps without far outliers, times what a median's is larger.
    """
    rows = len(steps_ms) // window
    if rows < 2:
        return statistics.median(steps_ms or (0.0,)), None
    places = [sorted(steps_ms[place : rows * window : window]) for place in range(window)]
    medians = [statistics.median(place) for place in places]
    relative = [ms / medians[step % window] for step, ms in enumerate(steps_ms[: rows * window])]
    width = 3 * 1.4826 * statistics.median(abs(one - 1) for one in relative)
    clipped = [min(max(one, 1 - width), 1 + width) for one in relative]
    typical = statistics.fmean(medians)
    return typical, _OF_MEDIAN * typical * (error_of_mean(clipped, window) or 0.0)


def _series(document: Document, field: str, key: str | None = None) -> list[float] | None:
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
    errors = [error_of_mean(side, window) for side, window in zip((a, b), windows, strict=True)]
    if errors[0] is None or errors[1] is None:
        return Difference(name, first, second, None, "noise unknown")
    error = math.hypot(errors[0], errors[1])
    beyond = abs(second - first) > ERRORS * error + 1e-9 * abs(first)
    return Difference(name, first, second, error, "beyond noise" if beyond else "within noise")


def _losses(document: Document) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in document["per_step"] if row.get("loss") is not None}


def _late_steps(a: Document, b: Document) -> list[int]:
    """The later half of the steps whose loss both have: where what a change of knobs costs has begun to show."""
    common = sorted(_losses(a).keys() & _losses(b).keys())
    return common[len(common) // 2 :]


def _loss(a: Document, b: Document, steps: Sequence[int]) -> Iterator[Difference]:
    """Step by step, since runs that see the same batches share most noise. A steady drift is no noise."""
    first, second = _losses(a), _losses(b)
    if not steps:
        last, other = ((document.get("loss") or {}).get("last") for document in (a, b))
        if last is not None or other is not None:
            yield Difference("loss", last, other, None, _without_noise(last, other, "noise unknown"))
        return
    apart = [second[step] - first[step] for step in steps]
    error = error_of_mean(_without_trend(apart), 1)
    means = statistics.fmean(first[step] for step in steps), statistics.fmean(second[step] for step in steps)
    if error is None:
        yield Difference("loss", *means, None, "noise unknown")
        return
    beyond = abs(statistics.fmean(apart)) > ERRORS * error + 1e-9 * abs(means[0])
    yield Difference("loss", *means, error, "beyond noise" if beyond else "within noise")


def _without_trend(values: Sequence[float]) -> list[float]:
    """What is left of a straight line, widened by the degree of freedom that it takes; few values stay as they are."""
    if len(values) < _LEAST_FOR_TREND:
        return list(values)
    places = range(len(values))
    slope, start = statistics.linear_regression(places, values)
    wider = math.sqrt((len(values) - 1) / (len(values) - 2))
    return [wider * (value - start - slope * place) for place, value in zip(places, values, strict=True)]


def _others(a: Document, b: Document) -> Iterator[Difference]:
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


def _verdict(differences: list[Difference], settings: list[Setting], steps: Sequence[int], busy: bool) -> Iterator[str]:
    by_name = {one.name: one for one in differences}
    step = by_name["step_ms.typical"]
    loss = by_name.get("loss")
    unsure = " Other work on the machine may be why." if busy and step.finding == "beyond noise" else ""
    yield f"{_about_step(step)}{unsure}"
    yield from _about_mean(by_name["step_ms.mean"], step)
    if loss is not None:
        yield _about_loss(loss, step, steps)
    stall = by_name.get("stall.ms_per_step")
    causes = [one for one in differences if one.name.startswith("stall.by_cause.") and one.finding == "beyond noise"]
    causes.sort(key=lambda one: -abs(one.change or 0.0))
    if stall is not None and stall.finding in ("beyond noise", "within noise"):
        yield _about_stall(stall, causes)
    yield from _about_knobs(settings)
    if loss is None:
        yield "Neither profile has a loss: this comparison is of the speed alone."


def _of_other_work(differences: list[Difference], settings: list[Setting]) -> Iterator[str]:
    step = next(one for one in differences if one.name == "step_ms.typical")
    both = f"{ms(step.a or 0.0)} in A, {ms(step.b or 0.0)} in B"
    yield f"The steps do different work, so that they are not compared: the typical one takes {both}."
    yield from _about_knobs(settings)


def _about_knobs(settings: list[Setting]) -> Iterator[str]:
    knobs = [one for one in settings if one.name.startswith("knobs.")]
    if knobs:
        changes = ", ".join(f"{one.name.removeprefix('knobs.')} {one.a} → {one.b}" for one in knobs[:4])
        more = f" and {len(knobs) - 4} more" if len(knobs) > 4 else ""
        yield f"Settings that changed: {changes}{more}."


def _about_step(step: Difference) -> str:
    assert step.a is not None
    assert step.b is not None
    if step.standard_error is None:
        return f"The typical step goes from {ms(step.a)} to {ms(step.b)}; there are too few steps to see the noise."
    error = f"{_two_digits(step.standard_error)} ms"
    if step.finding == "within noise":
        return (
            f"The typical step does not differ beyond noise: {ms(step.a)} and {ms(step.b)}, a difference of "
            f"{number(step.b - step.a)} ms with a standard error of {error}."
        )
    word = "shorter" if step.b < step.a else "longer"
    share = percent(abs(step.b - step.a) / step.a)
    return f"The typical step is {share} {word}: {ms(step.a)} → {ms(step.b)}, with a standard error of {error}."


def _about_mean(mean: Difference, step: Difference) -> Iterator[str]:
    """Where one run had some very slow steps, such as those beside other work, its mean is not that of most steps."""
    if mean.finding != "beyond noise" or mean.change is None or step.change is None:
        return
    how = "does" if step.finding != "beyond noise" else "goes the other way" if mean.change * step.change < 0 else ""
    if how:
        yield (
            f"The mean step {how}: {ms(mean.a or 0.0)} → {ms(mean.b or 0.0)}. It counts slow steps, which the typical "
            "step does not: where they come from other work, profile both again on a quiet machine."
        )


def _about_loss(loss: Difference, step: Difference, steps: Sequence[int]) -> str:
    if loss.a is None or loss.b is None:
        return f"Only {'A' if loss.b is None else 'B'} has a loss: this comparison is of the speed alone."
    if loss.standard_error is None:
        return "The losses are not of the same steps, or are too few: whether the change costs loss is not known."
    first, second = (figure(value, loss.standard_error) for value in (loss.a, loss.b))
    error = _two_digits(loss.standard_error)
    where = f"in steps {steps[0]} to {steps[-1]} of both"
    if loss.finding == "within noise":
        return f"The loss does not differ beyond noise {where}: {first} and {second}, with a standard error of {error}."
    higher, shorter = loss.b > loss.a, step.finding == "beyond noise" and (step.b or 0.0) < (step.a or 0.0)
    share = "" if loss.relative is None else f"{percent(abs(loss.relative))} "
    but = ": the shorter step is not free" if higher and shorter else ""
    word = "higher" if higher else "lower"
    return f"The loss is {share}{word} {where}: {first} → {second}, with a standard error of {error}{but}."


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


def error_of_mean(values: Sequence[float], interval: int) -> float | None:
    """Standard error of the mean of `values`, one for each step in order; None where there are fewer than two.

    Steps of a window of `interval` steps differ by their place in it, which is no noise. Where there are not two whole
    windows all steps are taken as alike, which gives a larger error.
    """
    if len(values) < 2:
        return None
    rows = len(values) // interval
    whole = np.asarray(values[: rows * interval] if rows >= 2 else values, dtype=np.float64)
    windows = whole.reshape(rows, interval) if rows >= 2 else whole.reshape(-1, 1)
    left = windows - windows.mean(axis=0)
    variance = float((left**2).sum()) / (left.size - left.shape[1])
    widths = left.std(axis=0)  # a place that varies more would hide how alike its neighbours are
    series = (left / np.where(widths > 0, widths, 1.0)).ravel()
    return math.sqrt(variance / len(values)) * _correlation_factor(series)


def _correlation_factor(series: np.ndarray) -> float:
    """By how much errors grow where neighbours are alike, as for an AR(1) process (bias corrected, Kendall 1954)."""
    centred = series - series.mean()
    power, steps = float((centred**2).sum()), len(series)
    if power == 0.0 or steps < _LEAST_FOR_CORRELATION:
        return 1.0
    found = float((centred[1:] * centred[:-1]).sum()) / power
    correlation = min(max((steps * found + 1) / (steps - 4), 0.0), _MOST_CORRELATION)
    return math.sqrt((1 + correlation) / (1 - correlation))
