"""The profile document (`zftune.profile/1`) from measurements."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zftune.emulation import Rig
from zftune.emulation.machines import rig_document
from zftune.profile import derive
from zftune.profile.companions import TorchAdamW
from zftune.profile.measure import Measurement, Task
from zftune.profile.sampling import Sampling
from zftune.profile.schema import SCHEMA_NAME, validate
from zftune.profile.verdict import verdict
from zftune.telemetry import fingerprint, hardware, software

BASELINES = ("no_offload", "zero_offload", "zero_offload_pipelined")

_IDLES_IN_STALLS = "emulated hardware has no kernel launches, so that it is idle only in stalls"
_NO_KERNEL_SEEN = "torch.profiler saw no kernel, it may need permission to watch the GPU"
_SWITCHED_OFF = "the baselines were switched off"
_TOO_LARGE = "it does not fit into the GPU's memory"
_WAITS_TOGETHER = "the runtime counts the training thread's waits together: see hidden_ms_per_step"
_NO_WINDOW = "no whole update window lies in the measured steps"
_NO_OVERHEAD = "needs interleaved runs with and without measuring, which this profile does not make"


def build_document(
    task: Task,
    own: Measurement,
    baselines: Mapping[str, Measurement | None] | None,
    ranks: list[dict[str, Any]],
    *,
    device_name: str,
    sampling: Sampling,
) -> dict[str, Any]:
    """Put a profile together and check it against its schema.

    Args:
        baselines: the others, by their names in `BASELINES`, None for one that the GPU's memory was too small for;
            None if they were not measured.

    Raises:
        ProfileError: the document breaks its own schema.
    """
    workload = task.build()
    rig = task.rig_for(workload)
    fitting = {name: run for name, run in (baselines or {}).items() if run is not None}
    missing: dict[str, str] = {}
    machine = hardware()
    document: dict[str, Any] = {
        "schema": SCHEMA_NAME,
        "device": device_name,
        "command": None,
        "seed": task.seed,
        "workload": task.describe(workload),
        "fingerprint": fingerprint(workload.module, machine=machine, rig=None if rig is None else rig.name),
        "hardware": machine,
        "software": software(),
        "rig": None if rig is None else _rig(rig, [own, *fitting.values()]),
        "steps": {"measured": len(own.stats), "discarded": own.discarded},
        "throughput": _throughput(task, own),
        "ranks": ranks,
        **_own(own, rig, workload.module, missing),
        "practicality": _speed(fitting, "no_offload", own),
        "baselines": None if baselines is None else _baselines(fitting, own, missing),
        "overhead_fraction": None,
        "missing": missing,
        **sampling.fields(*own.span_ns, missing),
    }
    missing |= _reasons(document, fitting)
    document["roofs"] = derive.roofs(document, missing)
    document["sources"] = _sources(document, "event" if rig is None else "rig") | sampling.sources(document)
    document["verdict"] = verdict(document)
    validate(document)
    return document


def everybodys(task: Task, own: Measurement) -> list[dict[str, Any]]:
    """The step times of each rank; called by all of them."""
    mine = {
        "rank": task.rank,
        "steps": len(own.stats),
        "step_ms": derive.step_ms(own.step_ms),
        "phases_ms": derive.mean_of([step["phases_ms"] for step in _per_step(own)]),
    }
    stall = _stall(own)
    if stall is not None and "comm" in stall["by_cause"]:
        mine["comm_ms"] = stall["by_cause"]["comm"]
    if task.ranks == 1:
        return [mine]
    found: list[Any] = [None] * task.ranks
    torch.distributed.all_gather_object(found, mine)
    return found


def _own(own: Measurement, rig: Rig | None, module: Any, missing: dict[str, str]) -> dict[str, Any]:
    model_bytes = sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)
    rig_gbps = None if rig is None else rig.host_gbps
    step_ms, stall, per_step = derive.step_ms(own.step_ms), _stall(own), _per_step(own)
    phases_ms = derive.mean_of([step["phases_ms"] for step in per_step])
    assert own.config is not None
    return {
        "knobs": derive.knobs(own.config, own.stats),
        "step_ms": step_ms,
        "phases_ms": phases_ms,
        "stall": stall,
        "idle": own.idle,
        "thread_lines": derive.thread_lines(own.lines, step_ms["mean"]),
        "hidden_ms_per_step": None if stall is None else derive.mean(own.stats, "hidden_ms"),
        "waits_ms": None,
        "link": derive.link(own.stats, model_bytes),
        "host": derive.host(own.stats, rig_gbps, (own.host_engine, own.host_threads), missing),
        "memory": _memory(own, missing),
        "selection": derive.selection(own.stats, missing),
        "staleness": derive.staleness(own.stats, missing),
        "movement": derive.movement(own.stats, own.config, missing),
        "loss": derive.loss(own.losses, missing),
        "per_step": per_step,
        "timeline": own.timeline,
    }


def _per_step(own: Measurement) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    begin_ms = 0.0
    for stats, phases_ms, step_ms, loss in zip(own.stats, own.phases_ms, own.step_ms, own.losses, strict=True):
        row = {
            "step": stats.step,
            "begin_ms": begin_ms,
            "step_ms": step_ms,
            "phases_ms": {**phases_ms, "other": max(0.0, step_ms - sum(phases_ms.values()))},  # but for rounding 0
            "stall_ms": None if stats.stall_ms is None else dict(stats.stall_ms),
            "waits_ms": {},
            "loss": derive.finite(loss),
        }
        rows.append(row)
        begin_ms += step_ms
    return rows


def _reasons(document: Mapping[str, Any], fitting: Mapping[str, Measurement]) -> dict[str, str]:
    reasons = {"overhead_fraction": _NO_OVERHEAD, "waits_ms": _WAITS_TOGETHER}
    if any(step["loss"] is None for step in document["per_step"]):
        reasons["per_step.loss"] = "it is not a finite number"
    if document["timeline"] is None:
        reasons["timeline"] = _NO_WINDOW
    if document["stall"] is None:
        reasons |= dict.fromkeys(("stall", "hidden_ms_per_step", "per_step.stall_ms"), derive.NO_STREAM)
        reasons |= {f"baselines.{name}.stall": derive.NO_STREAM for name in fitting}
    if document["idle"] is None:
        on_rig, on_cpu = document["rig"] is not None, document["stall"] is None
        reasons["idle"] = _IDLES_IN_STALLS if on_rig else derive.NO_STREAM if on_cpu else _NO_KERNEL_SEEN
    if document["thread_lines"] is None:
        reasons["thread_lines"] = derive.SIMULATED_THREAD
    if document["baselines"] is None:
        reasons |= {"baselines": _SWITCHED_OFF, "practicality": _SWITCHED_OFF}
    elif "no_offload" not in fitting:
        reasons["practicality"] = _TOO_LARGE
    return reasons


def _rig(rig: Rig, runs: Sequence[Measurement]) -> dict[str, Any]:
    slacks = [run.slack for run in runs if run.slack is not None]
    return rig_document(rig, slacks, attempts=max(run.attempts for run in runs))


def _throughput(task: Task, run: Measurement) -> dict[str, float]:
    steps_per_s = 1e3 / statistics.fmean(run.step_ms)
    return {"steps_per_s": steps_per_s, "tokens_per_s": steps_per_s * task.ranks * task.micro_batch * task.sequence}


def _stall(run: Measurement) -> dict[str, Any] | None:
    found = derive.stall([step.stall_ms for step in run.stats], statistics.fmean(run.step_ms))
    comm = [step.comm_ms for step in run.stats if step.comm_ms is not None]
    return {**found, "collectives": derive.mean_of(comm)} if found is not None and comm else found


def _memory(run: Measurement, missing: dict[str, str]) -> dict[str, int | None]:
    if run.device_peak_bytes is None:
        missing["memory.device_peak_bytes"] = "there is no GPU whose memory could be counted"
    return {"device_peak_bytes": run.device_peak_bytes, **derive.host_memory(run.host_bytes)}


def _speed(runs: Mapping[str, Measurement], name: str, own: Measurement) -> float | None:
    return statistics.fmean(runs[name].step_ms) / statistics.fmean(own.step_ms) if name in runs else None


def _baselines(
    runs: Mapping[str, Measurement], own: Measurement, missing: dict[str, str]
) -> dict[str, dict[str, Any] | None]:
    missing |= {f"baselines.{name}": _TOO_LARGE for name in BASELINES if name not in runs}
    return {name: _baseline(runs[name], own) if name in runs else None for name in BASELINES}


def _baseline(run: Measurement, own: Measurement) -> dict[str, Any]:
    torchs = {"optimizer": TorchAdamW.NAME}
    return {
        "step_ms": derive.step_ms(run.step_ms),
        "stall": _stall(run),
        **(torchs if run.config is None else {"knobs": derive.knobs(run.config, run.stats)}),
        "speedup": statistics.fmean(run.step_ms) / statistics.fmean(own.step_ms),
    }


def _sources(document: Mapping[str, Any], event: str) -> dict[str, str]:
    sources = {
        "step_ms": event,
        "throughput": event,
        "phases_ms": event,
        "stall": event,
        "idle": "torch.profiler",
        "thread_lines": "sampled frames",
        "hidden_ms_per_step": event,
        "link": "count",
        "host": "wall clock" if event == "event" else "rig",
        "host.ceiling_gbps": "bandwidth probe" if event == "event" else "rig",
        "host.bytes_per_element": "count",
        "memory": "count",
        "memory.device_peak_bytes": "torch allocator",
        "selection": "count",
        "staleness": "count",
        "movement": "count",
        "loss": "backward",
        "practicality": event,
        "baselines": event,
        "ranks": event,
        "per_step": event,
        "timeline": event,
        "roofs": event,
    }
    return {name: source for name, source in sources.items() if _is_there(document, name)}


def _is_there(document: Mapping[str, Any], path: str) -> bool:
    value: Any = document
    for part in path.split("."):
        value = None if value is None else value[part]
    return value is not None
