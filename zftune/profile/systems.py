"""The rows of a comparison: this run and the baselines that were measured with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Document = Mapping[str, Any]

_BASELINES = {
    "no_offload": "no offload",
    "zero_offload": "ZeRO-Offload",
    "zero_offload_pipelined": "ZeRO-Offload, pipelined",
}


@dataclass(frozen=True, slots=True)
class System:
    """One measured system. What was not measured is None."""

    name: str
    style: str
    mean_ms: float
    p50_ms: float
    p95_ms: float
    stall_fraction: float | None
    stall_ms: float | None
    by_cause: Mapping[str, float] | None
    phases: Mapping[str, float | None] | None
    against_zero_offload: float | None
    """Speed relative to ZeRO-Offload in DeepSpeed's order."""
    practicality: float | None
    """Speed relative to no offloading."""


def systems(document: Document) -> list[System]:
    """This run first, then every baseline that there is."""
    baselines = {name: run for name, run in (document["baselines"] or {}).items() if run is not None}
    name = "this run" if document["knobs"] is None else f"this run: {label(document['knobs'])}"
    rows = [_system(document, name, "bold", baselines)]
    rows += [_system(baselines[key], name, "", baselines) for key, name in _BASELINES.items() if key in baselines]
    return rows


def label(knobs: Mapping[str, Any]) -> str:
    """The familiar name of a point of the knob space."""
    if knobs["offload_ratio"] == 0:
        return "no offload"
    if knobs["topk_ratio"] > 0:
        return "ZenFlow"
    if knobs["offload_ratio"] < 1:
        return "Twin-Flow"
    if knobs["update_interval"] > 1 or knobs["overlap_step"]:
        return "delayed updates"
    return "ZeRO-Offload" if knobs["pipeline"] == "none" else "ZeRO-Offload, pipelined"


def _system(run: Mapping[str, Any], name: str, style: str, baselines: Mapping[str, Any]) -> System:
    step, stall = run["step_ms"], run["stall"]
    return System(
        name=name,
        style=style,
        mean_ms=step["mean"],
        p50_ms=step["p50"],
        p95_ms=step["p95"],
        stall_fraction=None if stall is None else stall["fraction"],
        stall_ms=None if stall is None else stall["ms_per_step"],
        by_cause=None if stall is None else stall["by_cause"],
        phases=run.get("phases_ms"),
        against_zero_offload=_speed(baselines.get("zero_offload"), step["mean"]),
        practicality=_speed(baselines.get("no_offload"), step["mean"]),
    )


def _speed(baseline: Mapping[str, Any] | None, mean_ms: float) -> float | None:
    return None if baseline is None else float(baseline["step_ms"]["mean"]) / mean_ms
