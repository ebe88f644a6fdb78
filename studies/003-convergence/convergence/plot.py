"""The figures as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from convergence.analysis import HURTS_PERCENT, Runs, excess_percent, over_seeds
from convergence.predict import QUANTITIES, points
from convergence.report import all_rates, late_settings
from convergence.setting import INTERVALS, RATES, REGIMES, SEEDS, Method, Regime, Setting, published

# Distinguishable with any colour vision.
BLUE, RED, GREEN, YELLOW, PINK, GREY = "#0072b2", "#d55e00", "#009e73", "#e69f00", "#cc79a7", "#777777"
Style = dict[str, Any]
RULE_STYLES: dict[str, tuple[Method, bool, Style]] = {
    "replay, L = S": ("replay", True, {"color": BLUE, "marker": "o"}),
    "replay, L = 1": ("replay", False, {"color": GREEN, "marker": "s", "ls": "dashed"}),
    "mean, L = S": ("mean", True, {"color": RED, "marker": "^"}),
    "mean, L = 1": ("mean", False, {"color": YELLOW, "marker": "v", "ls": "dashed"}),
}
QUANTITY = "weights moved, first 32 steps"


def draw(folder: Path, runs: Runs) -> str | None:
    """Write three SVGs; None, or why there are none."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        return "no picture was drawn: matplotlib is not installed (it is in the extra dev)"
    with mpl.rc_context({"svg.hashsalt": "003-convergence", "font.size": 8}):
        for name, (size, paint) in PICTURES.items():
            figure = Figure(figsize=size, layout="constrained")
            paint(figure, runs)
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
    return None


def _scale(axis: Any) -> None:
    axis.set_yscale("symlog", linthresh=0.1, linscale=0.5)
    axis.axhline(HURTS_PERCENT, color=GREY, lw=0.8, ls="dotted")
    axis.axhline(0, color=GREY, lw=0.8)
    axis.set_yticks([0, 0.1, 1, 10], ["0", "0.1", "1", "10"])
    axis.set_ylim(-0.05, 70)
    axis.minorticks_off()


def _legend(figure: Any, axis: Any) -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(5, len(labels)))


def intervals(figure: Any, runs: Runs) -> None:
    """Excess over S, a panel for each regime and learning rate."""
    axes = figure.subplots(len(REGIMES), len(RATES), sharex=True, sharey=True)
    for row, regime in enumerate(REGIMES):
        for column, lr in enumerate(RATES):
            axis = axes[row][column]
            for name, (rule, full, style) in RULE_STYLES.items():
                found = [(s, excess_percent(runs, _late(regime, rule, lr, s, full))) for s in INTERVALS]
                there = [(s, excess) for s, excess in found if excess is not None]
                axis.plot([s for s, _ in there], [excess for _, excess in there], label=name, ms=4, lw=1, **style)
            axis.set_xscale("log", base=2)
            axis.set_xticks(INTERVALS, [str(s) for s in INTERVALS])
            axis.set_title(f"{regime}, learning rate {lr:g}")
            _scale(axis)
        axes[row][0].set_ylabel("excess loss over synchronous, %")
    for axis in axes[-1]:
        axis.set_xlabel("S (k = 0.05, one seed)")
    _legend(figure, axes[0][0])


def _late(regime: Regime, rule: Method, lr: float, size: int, full: bool) -> Setting:
    one: Method = "replay" if size == 1 else rule  # at S = 1 they are the same
    return Setting(regime=regime, method=one, lr=lr, ratio=0.05, interval=size, lag=size if full else 1)


RATE_STYLES: dict[str, tuple[Setting, Style]] = {
    "replay, L = 4": (published("fine-tuning", "replay", 0.0), {"color": BLUE, "marker": "o", "lw": 1}),
    "replay, L = 1": (published("fine-tuning", "replay", 0.0, lag=1), {"color": GREEN, "marker": "s", "lw": 1}),
    "mean, L = 4": (published("fine-tuning", "mean", 0.0), {"color": RED, "marker": "^", "lw": 1}),
    "DeepSpeed, tutorial": (published("fine-tuning", "deepspeed", 0.0), {"color": PINK, "marker": "D", "lw": 0}),
    "DeepSpeed, repaired": (
        published("fine-tuning", "deepspeed repaired", 0.0),
        {"color": GREY, "marker": "x", "lw": 0},
    ),
}


def rates(figure: Any, runs: Runs) -> None:
    """Excess over the learning rate at k = 0.05, S = 4, with intervals where there are five seeds."""
    axes = figure.subplots(1, len(REGIMES), sharey=True)
    for axis, regime in zip(axes, REGIMES, strict=True):
        for name, (setting, style) in RATE_STYLES.items():
            found = [
                (lr, over_seeds(runs, replace(setting, regime=regime, lr=lr), SEEDS)) for lr in all_rates(runs, regime)
            ]
            there = [(lr, band) for lr, band in found if band is not None]
            means = [band.mean for _, band in there]
            halves = [band.half or 0.0 for _, band in there]
            axis.errorbar([lr for lr, _ in there], means, halves, label=name, ms=4, capsize=3, elinewidth=1, **style)
        axis.set_xscale("log")
        axis.set_title(regime)
        axis.set_xlabel("learning rate (k = 0.05, S = 4; bars: 95% over five seeds)")
        _scale(axis)
    axes[0].set_ylabel("excess loss over synchronous, %")
    _legend(figure, axes[0])


def telling(figure: Any, runs: Runs) -> None:
    """Excess of replay over what the synchronous warm-up measured."""
    axis = figure.subplots()
    colours = (BLUE, GREEN, RED, YELLOW)
    for regime, marker in zip(REGIMES, ("o", "^"), strict=True):
        for size, colour in zip(INTERVALS, colours, strict=True):
            chosen = [p for p in points(runs, late_settings(runs, regime)) if p.setting.interval == size]
            found = [(QUANTITIES[QUANTITY](p.setting, p.probed), p.excess) for p in chosen]
            known = [(value, excess) for value, excess in found if value is not None]
            x, y = [value for value, _ in known], [excess for _, excess in known]
            axis.scatter(x, y, s=14, marker=marker, color=colour, alpha=0.8, label=f"{regime}, S = {size}")
    axis.set_xscale("log")
    axis.set_xlabel("change of the weights over the mean staleness, relative to them; first 32 steps, synchronous")
    axis.set_ylabel("excess loss of replay over synchronous, %")
    _scale(axis)
    handles: Sequence[Any] = axis.get_legend_handles_labels()[0]
    figure.legend(handles=handles, loc="outside lower center", ncols=4)


PICTURES: dict[str, tuple[tuple[float, float], Any]] = {
    "intervals": ((9, 5.5), intervals),
    "rates": ((9, 4), rates),
    "telling": ((6.5, 4.5), telling),
}
