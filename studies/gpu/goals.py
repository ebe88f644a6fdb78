"""What was wanted beside what was measured. A goal that is missed is a figure; it breaks nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from gpu.parts import KNOBS, LIKE

Figures = Mapping[str, Mapping[str, Any]]
"""Of each part, by its name."""

_OF_NO_OFFLOAD, _TIMES_ZERO_OFFLOAD, _TIMES_UPSTREAM = 0.85, 3.0, 1.5
_MOST_STALL, _STALL_APART, _OF_COPY, _PREDICTION_APART = 0.05, 0.10, 0.80, 0.15


@dataclass(frozen=True, slots=True)
class Goal:
    """One line of the table."""

    name: str
    wanted: str
    measured: str
    """With its unit; "not measured" and why where there is nothing."""
    met: bool | None
    """None: not measured, or it does not apply here."""

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def goals(figures: Figures, *, simulated: bool = False) -> list[Goal]:
    """All of them, in order.

    Args:
        figures: of each part that has some.
        simulated: whether they are of no GPU, so that they meet and miss nothing.
    """
    found = [*_speeds(figures), *_stalls(figures), *_kernels(figures), *_predictions(figures)]
    return [replace(goal, met=None) for goal in found] if simulated else found


def _step_ms(figures: Figures, part: str) -> float | None:
    step = figures.get(part, {}).get("step_ms")
    return None if step is None else float(step["p50"])


def _speeds(figures: Figures) -> Iterator[Goal]:
    ours = _step_ms(figures, "zenflow")
    said = figures.get("zenflow", {}).get("prediction") or {}
    reachable = said.get("s_min") is not None and said["s_min"] <= KNOBS["zenflow"]["update_interval"]
    plain = _ratio(_step_ms(figures, "adamw"), ours)
    wanted = f"at least {_OF_NO_OFFLOAD:.0%}"
    if said and not reachable:
        text = "not measured" if plain is None else f"{plain:.1%}"
        yield Goal("speed of AdamW without offloading", wanted, f"{text}; S_min is {said['s_min']}, so not asked", None)
    else:
        met = None if plain is None or not said else plain >= _OF_NO_OFFLOAD
        yield Goal("speed of AdamW without offloading", wanted, _share(plain), met)
    for name, part, times in (
        ("speed over our ZeRO-Offload", "zero-offload", _TIMES_ZERO_OFFLOAD),
        ("speed over DeepSpeed's ZeRO-Offload", "deepspeed-zero-offload", _TIMES_ZERO_OFFLOAD),
        ("speed over DeepSpeed's ZenFlow", "deepspeed-zenflow", _TIMES_UPSTREAM),
    ):
        ratio = _ratio(_step_ms(figures, part), ours)
        yield Goal(name, f"at least {times:g} x", _times(ratio), None if ratio is None else ratio >= times)


def _stalls(figures: Figures) -> Iterator[Goal]:
    share = (figures.get("zenflow", {}).get("stall") or {}).get("share")
    met = None if share is None else share <= _MOST_STALL
    yield Goal("stall of ZenFlow", f"at most {_MOST_STALL:.0%}", _share(share), met)
    for part in KNOBS:
        beside = figures.get(part, {}).get("stall_beside_idle")
        apart = None if beside is None else abs(beside["stall"] - beside["profiler_idle"])
        text = "not measured" if beside is None else f"{beside['stall']:.1%}, profiler {beside['profiler_idle']:.1%}"
        met = None if apart is None else apart <= _STALL_APART
        yield Goal(f"stall and the profiler's idle, {part}", f"within {100 * _STALL_APART:.0f} points", text, met)


def _kernels(figures: Figures) -> Iterator[Goal]:
    for kernel in ("pack and sum", "show", "update all"):
        share = (figures.get("kernels", {}).get(kernel) or {}).get("of_copy")
        met = None if share is None else share >= _OF_COPY
        yield Goal(f"kernel {kernel}, of a copy's rate", f"at least {_OF_COPY:.0%}", _share(share), met)


def _predictions(figures: Figures) -> Iterator[Goal]:
    for part in ("adamw", *KNOBS):
        over = (figures.get(part, {}).get("prediction") or {}).get("measured_over_predicted")
        met = None if over is None else abs(over - 1) <= _PREDICTION_APART
        text = "not measured" if over is None else f"{over - 1:+.1%}"
        like = f" (as {LIKE[part]})" if part in LIKE else ""
        yield Goal(f"step beside the planner's, {part}{like}", f"within {_PREDICTION_APART:.0%}", text, met)


def _ratio(theirs: float | None, ours: float | None) -> float | None:
    return None if theirs is None or not ours else theirs / ours


def _share(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1%}"


def _times(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f} x"
