"""Figures of a profile document from step times and the runtime's statistics, for both kinds of profile."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zftune.profile.schema import CAUSES
from zftune.quality import LEAST_FOR_TREND, expected_loss_percent, late_percent, movement_percent, summary
from zftune.text import number

if TYPE_CHECKING:
    from zenflow import StepStats, ZenFlowConfig


NO_STREAM = "plain CPU: there is no device stream whose waits could be called stalls"
SIMULATED_THREAD = "time is simulated, so that what Python takes on this machine is no part of it"
_NO_LOSS = "no backward pass began from a single number, and the script gave none to zftune.log_loss"
NO_FINITE_LOSS = "no loss of the measured steps is a finite number"


def finite(loss: float | None) -> float | None:
    """A loss as JSON may hold it."""
    return loss if loss is not None and math.isfinite(loss) else None


def step_ms(values: Iterable[float]) -> dict[str, float]:
    """Mean and percentiles."""
    ordered = sorted(values)
    return {
        "mean": statistics.fmean(ordered),
        "p50": statistics.median(ordered),
        "p95": max(statistics.median(ordered), ordered[round(0.95 * (len(ordered) - 1))]),
    }


def mean_of(tables: Sequence[Mapping[Any, float]]) -> dict[str, float]:
    """Mean of each entry over the steps; an entry that a step lacks is 0 there."""
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: sum(table.get(name, 0.0) for table in tables) / len(tables) for name in names}


def stall(by_step: Sequence[Mapping[Any, float] | None], mean_step_ms: float) -> dict[str, Any] | None:
    """The stall by cause; None where a step has none to tell."""
    known = [step for step in by_step if step is not None]
    if len(known) < len(by_step) or not known:
        return None
    means = mean_of(known)
    by_cause = {cause: means[cause] for cause in CAUSES if cause in means}
    total = sum(by_cause.values())
    # A step's waits lie within it, but for rounding of the marks.
    return {"fraction": min(1.0, total / mean_step_ms), "ms_per_step": total, "by_cause": by_cause}


def thread_lines(sampled: Mapping[str, Any] | None, mean_step_ms: float) -> dict[str, Any] | None:
    """The lines that held the training thread, in milliseconds a step.

    Args:
        sampled: what a `FrameSampler` saw.
    """
    if sampled is None:
        return None
    held_ms = sampled["fraction"] * mean_step_ms
    names = ("file", "line", "function")
    return {
        "of": sampled["of"],
        "samples": sampled["samples"],
        "ms_per_step": held_ms,
        "lines": [
            {
                **{name: line[name] for name in names},
                "share": line["share"],
                "ms_per_step": line["share"] * held_ms,
                "within": {name: line["within"][name] for name in names},
            }
            for line in sampled["lines"]
        ],
    }


def knobs(config: ZenFlowConfig, stats: Sequence[StepStats]) -> dict[str, Any]:
    """Every knob as a number; for those that are "auto", what they came to in the measured steps."""
    from zenflow.config import AUTO_SELECT_INTERVAL

    values = dataclasses.asdict(config)
    auto = [name for name in ("update_interval", "select_interval") if values[name] == "auto"]
    if "update_interval" in auto:
        closes = sum(step.closed for step in stats)
        values["update_interval"] = max(1, round(len(stats) / closes)) if closes else config.longest_window
    if "select_interval" in auto:
        values["select_interval"] = AUTO_SELECT_INTERVAL
    return {**values, "auto": auto}


def mean(stats: Sequence[StepStats], field: str) -> float:
    """Mean of a field that every step has."""
    return statistics.fmean(getattr(step, field) for step in stats)


def link(stats: Sequence[StepStats], model_bytes: int) -> dict[str, float]:
    """Bytes on the link per step."""
    d2h, h2d = mean(stats, "d2h_bytes"), mean(stats, "h2d_bytes")
    other = mean(stats, "index_bytes") + mean(stats, "migrated_bytes")
    return {
        "d2h_bytes_per_step": d2h,
        "h2d_bytes_per_step": h2d,
        "other_bytes_per_step": other,
        "bytes_over_model_bytes": (d2h + h2d + other) / model_bytes,
    }


def host(
    stats: Sequence[StepStats], rig_gbps: float | None, engine: tuple[str, int], missing: dict[str, str]
) -> dict[str, float | str | None] | None:
    """What the host did; measures its bandwidth here where there is no rig.

    A probe below what the host did is no ceiling, and is left out.

    Args:
        rig_gbps: what the rig's host does; None: it is this machine's.
    """
    from zftune.telemetry.bandwidth import host_bandwidth

    elements = sum(step.host_elements for step in stats)
    milliseconds = sum(step.host_ms for step in stats)
    if elements == 0 or milliseconds == 0:
        missing["host"] = "nothing was updated on the host"
        return None
    nbytes = sum(step.host_bytes for step in stats)
    name, threads = engine
    gbps = nbytes / milliseconds / 1e6
    ceiling_gbps = rig_gbps
    if ceiling_gbps is None:
        probed_gbps = host_bandwidth().gbps_max
        if gbps <= probed_gbps:
            ceiling_gbps = probed_gbps
        else:
            missing["host.ceiling_gbps"] = (
                f"the bandwidth probe reached {number(probed_gbps)} GB/s, less than the host updates themselves: their "
                "data fits into the processor's caches, or the machine was busier during the probe"
            )
    return {
        "update_ms": milliseconds / max(1, sum(step.closed for step in stats)),
        "gbps": gbps,
        "ceiling_gbps": ceiling_gbps,
        "bytes_per_element": nbytes / elements,
        "engine": name,
        "threads": threads,
    }


def host_memory(host_bytes: Mapping[str, int]) -> dict[str, int]:
    """Host memory by use."""
    return {f"host_{use}_bytes": host_bytes[use] for use in ("state", "log", "staging", "peak")}


def loss(losses: Sequence[float | None], missing: dict[str, str]) -> dict[str, Any] | None:
    """Where the loss begins and ends, and whether it falls.

    Args:
        losses: of the measured steps; None: not known. May be not a number.
    """
    known = [value for value in losses if value is not None]
    found = summary([value for value in known if math.isfinite(value)])
    if found is None:
        missing.setdefault("loss", NO_FINITE_LOSS if known else _NO_LOSS)
        return None
    if found.error is None:
        missing["loss.error"] = f"it takes {LEAST_FOR_TREND} losses to tell noise from a trend"
    return {**dataclasses.asdict(found), "not_finite": len(known) - found.count}


def selection(stats: Sequence[StepStats], missing: dict[str, str]) -> dict[str, float | None] | None:
    """What the selected columns cover, and how fast they change."""
    coverage = [step.coverage for step in stats if step.coverage is not None]
    churn = [step.churn for step in stats if step.churn is not None]
    if not coverage:
        missing["selection"] = "there is nothing to select at this topk_ratio and offload_ratio"
        return None
    if not churn:
        missing["selection.churn"] = "no reselection took effect in the measured steps"
    return {"coverage": statistics.fmean(coverage), "churn": statistics.fmean(churn) if churn else None}


def staleness(stats: Sequence[StepStats], missing: dict[str, str]) -> dict[str, float | int] | None:
    """How late gradients were applied."""
    applied = [
        (step.host_elements, step.staleness_mean_steps, step.staleness_max_steps)
        for step in stats
        if step.staleness_mean_steps is not None and step.staleness_max_steps is not None
    ]
    elements = sum(count for count, _, _ in applied)
    if not elements:
        missing["staleness"] = "no gradient was deferred"
        return None
    return {
        "mean": sum(count * late for count, late, _ in applied) / elements,
        "max": max(most for _, _, most in applied),
    }


def movement(stats: Sequence[StepStats], config: ZenFlowConfig, missing: dict[str, str]) -> dict[str, float] | None:
    """How far the deferred weights move, and what late updates may cost at that."""
    percent, late = movement_percent(stats), staleness(stats, {})
    if percent is None or late is None:
        missing["movement"] = "no deferred weight was updated twice in the measured steps"
        return None
    before = late_percent(percent, config.topk_ratio, late["mean"])
    late_steps = (1 - config.topk_ratio) * late["mean"]
    expected = expected_loss_percent(before, late_steps, guesses=config.guesses)
    return {"percent": percent, "late_percent": before, "expected_loss_percent": expected}


def roofs(document: Mapping[str, Any], missing: dict[str, str]) -> dict[str, float | None] | None:
    """What each resource takes for a step's work; the longest of them is the least possible step.

    Args:
        document: with step_ms, stall, link, host, knobs and rig.
    """
    stalled, traffic, rig = document["stall"], document["link"], document["rig"]
    if traffic is None:
        missing["roofs"] = document["missing"]["link"]
        return None
    if stalled is None:
        missing["roofs"] = "without a GPU stream the step cannot be told from its waits"
        return None
    rates = {name: None if rig is None else rig[f"link_{name}_gbps"] for name in ("d2h", "h2d")}
    times: dict[str, float | None] = {"compute_ms": max(0.0, document["step_ms"]["mean"] - stalled["ms_per_step"])}
    for name, rate in rates.items():
        times[f"{name}_ms"] = None if rate is None else traffic[f"{name}_bytes_per_step"] / rate / 1e6
        if rate is None:
            reason = "the link's rate was not measured"
            missing |= {f"roofs.{name}_ms": reason, f"roofs.{name}_gbps": reason}
    worker = document["host"]
    if worker is None or worker["ceiling_gbps"] is None:
        reason = missing["host" if worker is None else "host.ceiling_gbps"]
        missing |= dict.fromkeys(("roofs.host_ms", "roofs.host_gbps"), reason)
        times["host_ms"] = rates["host"] = None
    else:
        rates["host"] = worker["ceiling_gbps"]
        a_step = worker["update_ms"] / document["knobs"]["update_interval"]
        times["host_ms"] = a_step * worker["gbps"] / worker["ceiling_gbps"]
    least = max((value for value in times.values() if value is not None), default=0.0)
    if least <= 0:
        missing["roofs"] = "nothing that bounds the step was measured"
        return None
    return {**times, "least_step_ms": least, **{f"{name}_gbps": rate for name, rate in rates.items()}}
