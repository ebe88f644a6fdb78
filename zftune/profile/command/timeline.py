"""The timeline of a command: the phases of its steps, and beside them what our own runtime recorded of one window."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zftune.profile.command.records import Rank, Row

_STEPS = 4
_LANES = {"forward": "compute", "backward": "compute", "optimizer": "compute", "data": "data"}
_OF_RUNTIME = ("d2h", "h2d", "host", "stall")

Lanes = dict[str, list[list[Any]]]


def timeline_of(main: Rank, runtime: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The document's "timeline": the window that the runtime recorded, else the first four steps' phases.

    Args:
        main: the process whose steps are shown.
        runtime: the runtime's own timeline, its first step numbered as the rows are; None if there is none.
    """
    if runtime is not None:
        first, count = runtime["first_step"], runtime["steps"]
        steps = [step for step in main.steps if first <= step["index"] < first + count]
        if len(steps) == count:  # else the window is not wholly among the measured steps
            stalls = runtime["lanes"].get("stall", [])
            recorded = {lane: runtime["lanes"][lane] for lane in _OF_RUNTIME if lane in runtime["lanes"]}
            return {
                "first_step": first,
                "steps": count,
                "length_ms": runtime["length_ms"],
                "lanes": {**_phases(steps, stalls), **recorded},
            }
    steps = main.steps[:_STEPS]
    lanes = _phases(steps, [])
    if not any(lanes.values()):
        return None
    length_ms = sum(step["step_ms"] for step in steps)
    return {"first_step": steps[0]["index"], "steps": len(steps), "length_ms": length_ms, "lanes": lanes}


def _phases(steps: Sequence[Row], stalls: Sequence[Sequence[Any]]) -> Lanes:
    """Lanes of the phases, the stalls taken out of those of the compute stream; one step begins where another ends."""
    without = _without(stalls)
    lanes: Lanes = {lane: [] for lane in dict.fromkeys(_LANES.values())}
    offset_ms = 0.0
    for step in steps:
        for name, begin_ms, end_ms in step.get("spans") or ():
            if name in _LANES and begin_ms < end_ms:
                lane = _LANES[name]
                whole = (offset_ms + begin_ms, offset_ms + end_ms)
                parts = without(*whole) if lane == "compute" else [whole]
                lanes[lane] += [[begin, end, name] for begin, end in parts]
        offset_ms += step["step_ms"]
    return lanes


def _without(stalls: Sequence[Sequence[Any]]) -> Callable[[float, float], list[tuple[float, float]]]:
    """Takes the stalls out of a span; imports torch only where there are some: in a folder that is gone that fails."""
    if not stalls:
        return lambda begin_ms, end_ms: [(begin_ms, end_ms)]
    from zenflow.timeline import Span, without

    gaps = [Span(begin_ms, end_ms, cause) for begin_ms, end_ms, cause in stalls]
    return lambda begin_ms, end_ms: list(without(begin_ms, end_ms, gaps))
