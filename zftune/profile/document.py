"""The profile document (`zftune.profile/1`) from measurements."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from zenflow import Rig, StepStats, host_bandwidth
from zenflow.config import AUTO_SELECT_INTERVAL
from zenflow.stats import CAUSES
from zftune.profile.measure import Measurement, Task
from zftune.profile.schema import SCHEMA_NAME, validate
from zftune.profile.verdict import verdict
from zftune.telemetry import fingerprint, hardware, software

BASELINES = ("no_offload", "zero_offload", "zero_offload_pipelined")

_NOT_SAMPLED = "the in-process profile does not sample NVML"
_NO_STREAM = "plain CPU: there is no device stream whose waits could be called stalls"
_SWITCHED_OFF = "the baselines were switched off"
_TOO_LARGE = "it does not fit into the GPU's memory"
_NO_OVERHEAD = "needs interleaved runs with and without measuring, which this profile does not make"


def build_document(
    task: Task, own: Measurement, baselines: Mapping[str, Measurement | None] | None, *, device_name: str
) -> dict[str, Any]:
    """Put a profile together and check it against its schema.

    Args:
        task: what was trained.
        own: the run under the given knobs.
        baselines: the others, by their names in `BASELINES`, None for one that the GPU's memory was too small for;
            None if they were not measured.
        device_name: the GPU's name, or what stands for one.

    Raises:
        ProfileError: the document breaks its own schema.
    """
    workload = task.build()
    rig = task.rig_for(workload)
    fitting = {name: run for name, run in (baselines or {}).items() if run is not None}
    missing: dict[str, str] = {}
    machine = hardware()
    event = "event" if rig is None else "rig"
    stall = _stall(own)
    document: dict[str, Any] = {
        "schema": SCHEMA_NAME,
        "device": device_name,
        "seed": task.seed,
        "workload": workload.describe(micro_batch=task.micro_batch, sequence=task.sequence, text=task.corpus.name),
        "fingerprint": fingerprint(workload.module, machine=machine, rig=None if rig is None else rig.name),
        "hardware": machine,
        "software": software(),
        "rig": None if rig is None else _rig(rig, [own, *fitting.values()]),
        "knobs": _knobs(own),
        "steps": {"measured": len(own.stats), "discarded": own.discarded},
        "step_ms": _step_ms(own),
        "throughput": _throughput(task, own),
        "phases_ms": own.phases_ms,
        "stall": stall,
        "hidden_ms_per_step": None if stall is None else _mean(own.stats, "hidden_ms"),
        "link": _link(own, workload.module),
        "host": _host(own, rig, missing),
        "memory": _memory(own, missing),
        "selection": _selection(own, missing),
        "staleness": _staleness(own, missing),
        "practicality": _speed(fitting, "no_offload", own),
        "baselines": None if baselines is None else _baselines(fitting, own, missing),
        "nvml": None,
        "overhead_fraction": None,
        "missing": missing,
        "verdict": [],
    }
    missing |= _reasons(document, fitting)
    document["sources"] = _sources(document, event)
    document["verdict"] = verdict(document)
    validate(document)
    return document


def _reasons(document: Mapping[str, Any], fitting: Mapping[str, Measurement]) -> dict[str, str]:
    """Why top-level fields are null."""
    reasons = {"nvml": _NOT_SAMPLED, "overhead_fraction": _NO_OVERHEAD}
    if document["stall"] is None:
        reasons |= {"stall": _NO_STREAM, "hidden_ms_per_step": _NO_STREAM}
        reasons |= {f"baselines.{name}.stall": _NO_STREAM for name in fitting}
    if document["baselines"] is None:
        reasons |= {"baselines": _SWITCHED_OFF, "practicality": _SWITCHED_OFF}
    elif "no_offload" not in fitting:
        reasons["practicality"] = _TOO_LARGE
    return reasons


def _rig(rig: Rig, runs: Sequence[Measurement]) -> dict[str, Any]:
    slacks = [run.slack for run in runs if run.slack is not None]
    margins_ms = [1e3 * margin for slack in slacks for margin in slack.margins_s]
    return {
        **dataclasses.asdict(rig),
        "segments": sum(slack.segments for slack in slacks),
        "late_segments": sum(slack.late for slack in slacks),
        "attempts": max(run.attempts for run in runs),
        "slack": {
            "min_ms": min(margins_ms),
            "p50_ms": statistics.median(margins_ms),
            "fraction_used_p50": statistics.median(used for slack in slacks for used in slack.used),
        },
    }


def _knobs(run: Measurement) -> dict[str, Any]:
    """Every knob as a number; for those that are "auto", what they came to in the measured steps."""
    knobs = dataclasses.asdict(run.config)
    auto = [name for name in ("update_interval", "select_interval") if knobs[name] == "auto"]
    if "update_interval" in auto:
        closes = sum(stats.closed for stats in run.stats)
        knobs["update_interval"] = max(1, round(len(run.stats) / closes)) if closes else run.config.longest_window
    if "select_interval" in auto:
        knobs["select_interval"] = AUTO_SELECT_INTERVAL
    return {**knobs, "auto": auto}


def _step_ms(run: Measurement) -> dict[str, float]:
    ordered = sorted(run.step_ms)
    return {
        "mean": statistics.fmean(ordered),
        "p50": statistics.median(ordered),
        "p95": ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))],
    }


def _throughput(task: Task, run: Measurement) -> dict[str, float]:
    steps_per_s = 1e3 / statistics.fmean(run.step_ms)
    return {"steps_per_s": steps_per_s, "tokens_per_s": steps_per_s * task.micro_batch * task.sequence}


def _mean(stats: Sequence[StepStats], field: str) -> float:
    return statistics.fmean(getattr(step, field) for step in stats)


def _stall(run: Measurement) -> dict[str, Any] | None:
    by_cause: dict[str, float] = dict.fromkeys(CAUSES, 0.0)
    for step in run.stats:
        if step.stall_ms is None:
            return None
        for cause, milliseconds in step.stall_ms.items():
            by_cause[cause] += milliseconds / len(run.stats)
    total = sum(by_cause.values())
    # A step's waits lie within it, but for rounding of the marks.
    fraction = min(1.0, total / statistics.fmean(run.step_ms))
    return {"fraction": fraction, "ms_per_step": total, "by_cause": by_cause}


def _link(run: Measurement, module: Any) -> dict[str, float]:
    d2h, h2d = _mean(run.stats, "d2h_bytes"), _mean(run.stats, "h2d_bytes")
    other = _mean(run.stats, "index_bytes") + _mean(run.stats, "migrated_bytes")
    model_bytes = sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)
    return {
        "d2h_bytes_per_step": d2h,
        "h2d_bytes_per_step": h2d,
        "other_bytes_per_step": other,
        "bytes_over_model_bytes": (d2h + h2d + other) / model_bytes,
    }


def _host(run: Measurement, rig: Rig | None, missing: dict[str, str]) -> dict[str, float | str] | None:
    elements = sum(step.host_elements for step in run.stats)
    if elements == 0:
        missing["host"] = "nothing was updated on the host"
        return None
    milliseconds = sum(step.host_ms for step in run.stats)
    nbytes = sum(step.host_bytes for step in run.stats)
    windows = sum(step.closed for step in run.stats)
    ceiling_gbps = host_bandwidth().gbps if rig is None else rig.host_gbps
    return {
        "update_ms": milliseconds / max(1, windows),
        "gbps": nbytes / milliseconds / 1e6,
        "ceiling_gbps": ceiling_gbps,
        "bytes_per_element": nbytes / elements,
        "engine": run.host_engine,
        "threads": run.host_threads,
    }


def _memory(run: Measurement, missing: dict[str, str]) -> dict[str, int | None]:
    if run.device_peak_bytes is None:
        missing["memory.device_peak_bytes"] = "there is no GPU whose memory could be counted"
    uses = ("state", "log", "staging", "peak")
    host = {f"host_{use}_bytes": run.host_bytes[use] for use in uses}
    return {"device_peak_bytes": run.device_peak_bytes, **host}


def _selection(run: Measurement, missing: dict[str, str]) -> dict[str, float | None] | None:
    coverage = [step.coverage for step in run.stats if step.coverage is not None]
    churn = [step.churn for step in run.stats if step.churn is not None]
    if not coverage:
        missing["selection"] = "there is nothing to select at this topk_ratio and offload_ratio"
        return None
    if not churn:
        missing["selection.churn"] = "no reselection took effect in the measured steps"
    return {"coverage": statistics.fmean(coverage), "churn": statistics.fmean(churn) if churn else None}


def _staleness(run: Measurement, missing: dict[str, str]) -> dict[str, float | int] | None:
    applied = [
        (step.host_elements, step.staleness_mean_steps, step.staleness_max_steps)
        for step in run.stats
        if step.staleness_mean_steps is not None and step.staleness_max_steps is not None
    ]
    if not applied:
        missing["staleness"] = "no gradient was deferred"
        return None
    elements = sum(count for count, _, _ in applied)
    return {
        "mean": sum(count * mean for count, mean, _ in applied) / elements,
        "max": max(most for _, _, most in applied),
    }


def _speed(runs: Mapping[str, Measurement], name: str, own: Measurement) -> float | None:
    return statistics.fmean(runs[name].step_ms) / statistics.fmean(own.step_ms) if name in runs else None


def _baselines(
    runs: Mapping[str, Measurement], own: Measurement, missing: dict[str, str]
) -> dict[str, dict[str, Any] | None]:
    missing |= {f"baselines.{name}": _TOO_LARGE for name in BASELINES if name not in runs}
    return {name: _baseline(runs[name], own) if name in runs else None for name in BASELINES}


def _baseline(run: Measurement, own: Measurement) -> dict[str, Any]:
    return {
        "step_ms": _step_ms(run),
        "stall": _stall(run),
        "knobs": _knobs(run),
        "speedup": statistics.fmean(run.step_ms) / statistics.fmean(own.step_ms),
    }


def _sources(document: Mapping[str, Any], event: str) -> dict[str, str]:
    sources = {
        "step_ms": event,
        "throughput": event,
        "phases_ms": event,
        "phases_ms.data": "wall clock",
        "stall": event,
        "hidden_ms_per_step": event,
        "link": "count",
        "host": "wall clock" if event == "event" else "rig",
        "host.ceiling_gbps": "bandwidth probe" if event == "event" else "rig",
        "host.bytes_per_element": "count",
        "memory": "count",
        "memory.device_peak_bytes": "torch allocator",
        "selection": "count",
        "staleness": "count",
        "practicality": event,
        "baselines": event,
    }
    return {name: source for name, source in sources.items() if _is_there(document, name)}


def _is_there(document: Mapping[str, Any], path: str) -> bool:
    value: Any = document
    for part in path.split("."):
        value = None if value is None else value[part]
    return value is not None
