"""What the runs say: differences from AdamW at the same seed, their intervals, whether they are within the margin."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MARGIN_POINTS = 1.0
"""Of accuracy, that a variant may lose and still count as no worse; decided before any run was looked at."""

# Quantiles at 97.5% of Student's t with n - 1 degrees of freedom.
T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}

Runs = Mapping[str, Mapping[str, Mapping[int, Mapping[str, Any]]]]
"""Figures by problem, variant and seed."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its 95% confidence interval."""

    mean: float
    half: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Student's t; that of one value is not known."""
        if len(values) == 1:
            return cls(values[0], math.inf, 1)
        half = T_975[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
        return cls(statistics.fmean(values), half, len(values))

    def text(self, digits: int) -> str:
        """As it stands in a table."""
        signed = f"{self.mean:+.{digits}f}"
        return f"{signed} ± {self.half:.{digits}f}" if math.isfinite(self.half) else f"{signed} (one seed)"

    def no_worse(self, margin: float) -> bool:
        """Whether the whole interval is above -margin."""
        return self.mean - self.half > -margin


def paired(runs: Runs, problem: str, variant: str, figure: str, factor: float = 1.0) -> dict[int, float]:
    """By seed, a figure less AdamW's at the same seed; of the seeds that both have."""
    late, synchronous = (runs.get(problem, {}).get(name, {}) for name in (variant, "AdamW"))
    seeds = [seed for seed in sorted(late) if figure in late[seed] and figure in synchronous.get(seed, {})]
    return {seed: factor * (late[seed][figure] - synchronous[seed][figure]) for seed in seeds}


def over_tasks(runs: Runs, tasks: Iterable[str], variant: str) -> dict[int, float]:
    """By seed, the mean over the tasks of the difference in points; of the seeds that all tasks have."""
    every = [paired(runs, task, variant, "accuracy", 100.0) for task in tasks]
    seeds = sorted(set.intersection(*(set(each) for each in every)))
    return {seed: statistics.fmean(each[seed] for each in every) for seed in seeds}


def mean_of(runs: Mapping[int, Mapping[str, Any]], figure: str) -> float | None:
    """A figure's mean over the seeds that know it."""
    values = [run[figure] for run in runs.values() if run.get(figure) is not None]
    return statistics.fmean(values) if values else None


def early_movement(runs: Mapping[int, Mapping[str, Any]]) -> float | None:
    """How far the matrices move in four steps, relative to their norm, in percent: mean of the first 32 steps."""
    values = [
        run["moved"][place] for run in runs.values() for place in ("0", "12", "24") if place in run.get("moved", {})
    ]
    return 100.0 * statistics.fmean(values) if values else None


def most_movement(runs: Mapping[int, Mapping[str, Any]]) -> float | None:
    """The largest over a run's places, in percent, averaged over the seeds."""
    values = [max(run["moved"].values()) for run in runs.values() if run.get("moved")]
    return 100.0 * statistics.fmean(values) if values else None


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def markdown(runs: Runs, facts: Mapping[str, Mapping[str, Any]], variants: Sequence[str], language: str) -> str:
    """All tables.

    Args:
        runs: what has finished.
        facts: of each problem, by name: what the tables say beside the runs.
        variants: in the tables' order.
        language: the name of the problem that is no classification.
    """
    tasks = [name for name in facts if name != language]
    lines = ["# 023: results", ""]
    if tasks:
        lines += _tasks(runs, facts, tasks, variants)
    if language in facts:
        lines += _language(runs.get(language, {}), runs, facts[language], variants, language)
    return "\n".join(lines) + "\n"


def _tasks(runs: Runs, facts: Mapping[str, Any], tasks: Sequence[str], variants: Sequence[str]) -> list[str]:
    lines = [
        "| task | classes | train, test | most frequent | bag of words | AdamW |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for task in tasks:
        of, got = facts[task], mean_of(runs.get(task, {}).get("AdamW", {}), "accuracy")
        accuracy = _cell(None if got is None else 100 * got, 2)
        lines.append(
            f"| {task} | {of['classes']} | {of['train']}, {of['test']} | {100 * of['majority']:.1f} "
            f"| {100 * of['bag_of_words']:.1f} | {accuracy} |"
        )
    late = [variant for variant in variants if variant != "AdamW"]
    lines += ["", "Accuracy less AdamW's at the same seed, in points, 95%:", ""]
    lines += ["| task | " + " | ".join(late) + " |", "|---|" + "---:|" * len(late)]
    for task in tasks:
        cells = [_judged(paired(runs, task, variant, "accuracy", 100.0)) for variant in late]
        lines.append(f"| {task} | " + " | ".join(cells) + " |")
    if len(tasks) > 1:
        cells = [_judged(over_tasks(runs, tasks, variant)) for variant in late]
        lines.append("| mean of the tasks | " + " | ".join(cells) + " |")
    lines += [
        "",
        f"**Bold**: the whole interval is above -{MARGIN_POINTS:g}, the margin.",
        "",
        *_details(runs, tasks, variants),
    ]
    return lines


def _judged(values: Mapping[int, float]) -> str:
    if not values:
        return "-"
    found = Interval.of(list(values.values()))
    return f"**{found.text(2)}**" if found.no_worse(MARGIN_POINTS) else found.text(2)


def _details(runs: Runs, problems: Sequence[str], variants: Sequence[str]) -> list[str]:
    lines = [
        "| problem | variant | seeds | accuracy, % | loss | coverage | stale, steps | moved, % | at most | seconds |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for problem in problems:
        for variant in variants:
            of = runs.get(problem, {}).get(variant, {})
            accuracy = mean_of(of, "accuracy")
            cells = (
                _cell(None if accuracy is None else 100 * accuracy, 2),
                _cell(mean_of(of, "loss"), 4),
                _cell(mean_of(of, "coverage"), 3),
                _cell(mean_of(of, "staleness"), 2),
                _cell(early_movement(of), 3),
                _cell(most_movement(of), 3),
                _cell(mean_of(of, "seconds"), 0),
            )
            lines.append(f"| {problem} | {variant} | {len(of)} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _language(
    of: Mapping[str, Mapping[int, Mapping[str, Any]]],
    runs: Runs,
    facts: Mapping[str, Any],
    variants: Sequence[str],
    language: str,
) -> list[str]:
    pretraining = facts["pretraining"]
    told = (
        f"The language model has {pretraining['parameters'] / 1e6:.1f} million parameters and was pretrained on "
        f"{pretraining['tokens'] / 1e6:.2f} million tokens ({pretraining['seconds'] / 60:.0f} minutes): held-out loss "
        f"{pretraining['held_out']:.3f} nats a token there, {pretraining['other_corpus']:.3f} on the second corpus."
    )
    lines = [told, "", "| variant | held-out loss | less AdamW's, nats | in percent |", "|---|---:|---:|---:|"]
    synchronous = mean_of(of.get("AdamW", {}), "loss")
    for variant in variants:
        loss = mean_of(of.get(variant, {}), "loss")
        values = [] if variant == "AdamW" else list(paired(runs, language, variant, "loss").values())
        percent = "-" if not values or synchronous is None else f"{100 * statistics.fmean(values) / synchronous:+.2f}"
        difference = Interval.of(values).text(4) if values else "-"
        lines.append(f"| {variant} | {_cell(loss, 4)} | {difference} | {percent} |")
    return [*lines, "", *_details(runs, [language], variants)]
