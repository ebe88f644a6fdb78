"""Three made up profiles, coherent as measured ones: offloaded on a rig, a script on a CPU, a script with NVML."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from tests.support.zftune.report.fields import (
    GPU,
    HARDWARE,
    KNOBS,
    NO_DRIVER,
    NVML,
    RIG,
    SOFTWARE,
    SYSTEM,
    USES,
    WINDOW,
    WORKLOAD,
)

Document = dict[str, Any]
Row = dict[str, Any]

CAUSES = ("host", "h2d", "d2h", "select")
_SCRIPT = "measured by hooks around a script, which owns no such figure"


def rig_profile(steps: int = 24, *, stretch: float = 1.0) -> Document:
    """The built-in workload on an emulated accelerator; the steps are `stretch` times as long."""
    rows = _rig_rows(steps, stretch)
    document = _common(rows) | {
        "device": "cpu (emulated accelerator)",
        "command": None,
        "seed": 0,
        "rig": RIG,
        "knobs": knobs(),
        "hidden_ms_per_step": 61.5,
        "link": {
            "d2h_bytes_per_step": 1_654_000,
            "h2d_bytes_per_step": 413_500,
            "other_bytes_per_step": 5_200,
            "bytes_over_model_bytes": 1.19,
        },
        "host": {
            "update_ms": 689.2,
            "gbps": 0.0527,
            "ceiling_gbps": 0.0529,
            "bytes_per_element": 44.0,
            "engine": "native",
            "threads": 1,
        },
        "memory": {
            "device_peak_bytes": None,
            "host_state_bytes": 11_564_000,
            "host_log_bytes": 6_608_000,
            "host_staging_bytes": 1_652_000,
            "host_peak_bytes": 21_012_000,
        },
        "selection": {"coverage": 0.88, "churn": 0.12},
        "staleness": {"mean": 3.4, "max": 7},
        "roofs": {
            "compute_ms": 200.5 * stretch,
            "d2h_ms": 47.7,
            "h2d_ms": 11.9,
            "host_ms": 172.3,
            "least_step_ms": max(200.5 * stretch, 172.3),
            "d2h_gbps": 0.0347,
            "h2d_gbps": 0.0347,
            "host_gbps": 0.0529,
        },
        "timeline": rig_timeline(rows),
        "series": {"nvml": None, "system": _system_rows(rows)},
        "system": SYSTEM,
        "missing": {
            "memory.device_peak_bytes": "an emulated accelerator has no memory of its own",
            "nvml": NO_DRIVER,
            "series.nvml": NO_DRIVER,
            "baselines": "the baselines were switched off",
            "practicality": "the baselines were switched off",
        },
        "verdict": [
            "Offloading holds the device up for 8.4% of a step, mostly waiting for the host's update.",
            "Raise update_interval from 4 to 6: the host's pass then fits beside the steps.",
        ],
    }
    document["sources"] = _sources(document, "rig")
    return document


def cpu_profile(steps: int = 12) -> Document:
    """A script on a plain CPU: no stream, so no stall."""
    rows = _script_rows(steps, {"data": 12.0, "forward": 80.0, "backward": 150.0, "optimizer": 30.0, "other": 5.0})
    no_stream = "plain CPU: there is no device stream whose waits could be called stalls"
    document = _common(rows) | {
        "device": "cpu",
        "command": _command(["Trainer of transformers 5.23.0"]),
        "timeline": _script_timeline(rows),
        "series": {"nvml": None, "system": _system_rows(rows)},
        "system": SYSTEM,
        "missing": _script_missing()
        | {
            "stall": no_stream,
            "hidden_ms_per_step": no_stream,
            "nvml": NO_DRIVER,
            "series.nvml": NO_DRIVER,
            "per_step.stall_ms": no_stream,
            "memory": _SCRIPT,
        },
        "verdict": ["What bounds the step is the backward pass: 150 ms of 277 ms (54%)."],
    }
    document["sources"] = _sources(document, "wall clock")
    return document


def gpu_profile(steps: int = 16) -> Document:
    """A DeepSpeed script on two GPUs, whose counters were sampled."""
    phases = {"data": 1.5, "forward": 210.0, "backward": 480.0, "optimizer": 640.0, "other": 3.5}
    rows = _script_rows(steps, phases, {"host": 540.0, "h2d": 42.0, "d2h": 18.0, "comm": 25.0, "data": 1.5})
    document = _common(rows) | {
        "device": "NVIDIA A100-SXM4-80GB",
        "command": _command(["DeepSpeed 0.19.6, ZeRO stage 2, optimizer offloaded to cpu"], ranks=2),
        "hardware": HARDWARE | {"gpus": [GPU, GPU], "missing": {}},
        "hidden_ms_per_step": 21.0,
        "timeline": _script_timeline(rows),
        "series": {"nvml": _nvml_rows(rows), "system": _system_rows(rows)},
        "nvml": NVML,
        "system": SYSTEM,
        "memory": {
            "device_peak_bytes": 61_200_000_000,
            "host_state_bytes": None,
            "host_log_bytes": None,
            "host_staging_bytes": None,
            "host_peak_bytes": None,
        },
        "missing": _script_missing()
        | {f"memory.host_{use}_bytes": _SCRIPT for use in ("state", "log", "staging", "peak")}
        | {
            "nvml.dram_percent": "GPM is not supported on this GPU",
            "nvml.sm_occupancy_percent": "GPM is not supported",
        },
        "verdict": ["The GPU waits for the host's update: 540 ms of 1.34 s a step (40%).", "Turn ZenFlow on."],
    }
    document["ranks"].append(document["ranks"][0] | {"rank": 1})
    document["sources"] = _sources(document, "event")
    return document


def knobs(**changed: Any) -> Document:
    return KNOBS | changed


def _rig_rows(steps: int, stretch: float) -> list[Row]:
    """Every fourth step closes a window and waits; the host is late for the step after it."""
    rows, begin = [], 0.0
    for index in range(steps):
        wobble = 0.4 * math.sin(7.0 * index)
        first, last = index % WINDOW == 0, index % WINDOW == WINDOW - 1
        stall = {"host": (38.0 + wobble) if first else 0.0, "h2d": 1.6, "d2h": 0.0, "select": 6.0 if last else 0.0}
        stall = {cause: stretch * value for cause, value in stall.items()}
        phases = {"data": 0.0, "forward": 28.0, "backward": 170.0 + wobble, "optimizer": 2.5, "other": 0.0}
        phases = {name: stretch * value for name, value in phases.items()}
        phases["forward"] += stall["host"] + stall["h2d"]
        phases["optimizer"] += stall["select"]
        step_ms = sum(phases.values())
        rows.append(_row(9 + index, begin, step_ms, phases, stall, {**stall, "host": stall["host"] + 60.0}))
        begin += step_ms
    return rows


def _script_rows(steps: int, phases: Row, stall: Row | None = None) -> list[Row]:
    rows, begin = [], 0.0
    for index in range(steps):
        wobble = 1 + 0.02 * math.sin(5.0 * index)
        own = {name: value * wobble for name, value in phases.items()}
        waits = {cause: value * wobble for cause, value in (stall or {"data": phases["data"]}).items()}
        rows.append(_row(9 + index, begin, sum(own.values()), own, None if stall is None else waits, waits))
        begin += sum(own.values())
    return rows


def _row(step: int, begin_ms: float, step_ms: float, phases: Row, stall: Row | None, waits: Row) -> Row:
    return {
        "step": step,
        "begin_ms": begin_ms,
        "step_ms": step_ms,
        "phases_ms": phases,
        "stall_ms": stall,
        "waits_ms": waits,
    }


def _means(rows: Sequence[Row], field: str) -> Row | None:
    if any(row[field] is None for row in rows):
        return None
    return {name: statistics.fmean(row[field][name] for row in rows) for name in rows[0][field]}


def rig_timeline(rows: Sequence[Row]) -> Document:
    """One update window with every lane, in which one copy and one job go on after the end."""
    lanes: dict[str, list[list[Any]]] = {lane: [] for lane in ("compute", "d2h", "h2d", "host", "data", "stall")}
    first = min(WINDOW, len(rows) - WINDOW)
    at = 0.0
    for row in rows[first : first + WINDOW]:
        stall, phases, end = row["stall_ms"], row["phases_ms"], at + row["step_ms"]
        lanes["data"].append([at, at + 0.3, "batch"])
        for cause in ("host", "h2d"):
            if stall[cause]:
                lanes["stall"].append([at, at + stall[cause], cause])
                at += stall[cause]
        forward = phases["forward"] - stall["host"] - stall["h2d"]
        lanes["compute"].append([at, at + forward, "forward"])
        at += forward
        backward = phases["backward"]
        lanes["compute"].append([at, at + backward, "backward"])
        for part in range(6):
            begin = at + backward * (part + 0.5) / 6
            lanes["d2h"].append([begin, begin + 0.8 * backward / 6, "276 kB"])
        at += backward
        lanes["compute"].append([at, at + phases["optimizer"] - stall["select"], "optimizer"])
        at += phases["optimizer"] - stall["select"]
        if stall["select"]:
            lanes["stall"].append([at, at + stall["select"], "select"])
        at = end
    each = 1.03 * at / 16
    for job in range(16):
        lanes["host"].append([job * each, (job + 1) * each, f"updating layers.{job // 4}.weight{job % 4}"])
        lanes["h2d"].append([(job + 1) * each - 8.0, (job + 1) * each, "103 kB"])
    return {"first_step": rows[first]["step"], "steps": WINDOW, "length_ms": at, "lanes": lanes}


def _script_timeline(rows: Sequence[Row]) -> Document:
    lanes: dict[str, list[list[Any]]] = {"compute": [], "data": []}
    if rows[0]["stall_ms"] is not None:
        lanes |= {"stall": [], "comm": []}
    at = 0.0
    for row in rows[:WINDOW]:
        for phase in ("data", "forward", "backward", "optimizer", "other"):
            end = at + row["phases_ms"][phase]
            lanes["data" if phase == "data" else "compute"].append([at, end, phase])
            if phase == "optimizer" and row["stall_ms"] is not None:
                lanes["stall"].append([at, at + row["stall_ms"]["host"], "host"])
                lanes["comm"].append([end - 30.0, end - 5.0, "all_reduce"])
            at = end
    return {"first_step": rows[0]["step"], "steps": WINDOW, "length_ms": at, "lanes": lanes}


def _moments(rows: Sequence[Row]) -> list[float]:
    length = rows[-1]["begin_ms"] + rows[-1]["step_ms"]
    return [200.0 * number for number in range(int(length / 200.0) + 1)]


def _system_rows(rows: Sequence[Row]) -> list[Row]:
    return [
        {
            "at_ms": at,
            "cpu_percent": 140.0 + 6.0 * math.sin(at / 300.0),
            "machine_cpu_percent": 17.5,
            "memory_used_bytes": 9.1e9,
            "rss_bytes": 1.3e9 + 4e4 * at,
            "psi_cpu_percent": 0.4,
            "psi_memory_percent": 0.0,
            "psi_io_percent": 0.1,
            "throttled_percent": None,
        }
        for at in _moments(rows)
    ]


def _nvml_rows(rows: Sequence[Row]) -> list[Row]:
    return [
        {
            "at_ms": at,
            "device": device,
            "utilisation_percent": 55.0 + 20.0 * math.sin(at / 400.0 + device),
            "sm_utilisation_percent": None if at < 150.0 else 50.0 + 15.0 * math.sin(at / 400.0 + device),
            "pcie_rx_gbps": 9.0 + 6.0 * math.sin(at / 350.0),
            "pcie_tx_gbps": 5.0 + 4.0 * math.cos(at / 350.0),
            "power_w": 260.0 + 60.0 * math.sin(at / 500.0 + device),
            "memory_used_bytes": 61.2e9 + 1e8 * device,
            "sm_clock_mhz": 1410.0,
        }
        for at in _moments(rows)
        for device in (0, 1)
    ]


def _common(rows: Sequence[Row]) -> Document:
    """The fields that every profile fills the same way; what a script does not know is null."""
    times = sorted(row["step_ms"] for row in rows)
    mean = statistics.fmean(times)
    step_ms = {"mean": mean, "p50": statistics.median(times), "p95": times[round(0.95 * (len(times) - 1))]}
    by_cause = _means(rows, "stall_ms")
    total = None if by_cause is None else sum(by_cause.values())
    stall = None if total is None else {"fraction": total / mean, "ms_per_step": total, "by_cause": by_cause}
    script = ("seed", "rig", "knobs", "link", "host", "selection", "staleness", "practicality", "baselines", "roofs")
    return {
        "schema": "zftune.profile/1",
        "workload": WORKLOAD,
        "fingerprint": {"hw_id": "5b1f0c9a77d2e314", "model_id": "c22c73f049e6aa17"},
        "hardware": HARDWARE,
        "software": SOFTWARE,
        **dict.fromkeys(script),
        "memory": dict.fromkeys(("device_peak_bytes", *(f"host_{use}_bytes" for use in USES))),
        "steps": {"measured": len(rows), "discarded": 8},
        "step_ms": step_ms,
        "throughput": {"steps_per_s": 1e3 / mean, "tokens_per_s": 64e3 / mean},
        "phases_ms": _means(rows, "phases_ms"),
        "stall": stall,
        "hidden_ms_per_step": None,
        "waits_ms": _means(rows, "waits_ms"),
        "nvml": None,
        "ranks": [{"rank": 0, "steps": len(rows), "step_ms": step_ms, "phases_ms": _means(rows, "phases_ms")}],
        "per_step": list(rows),
        "overhead_fraction": 0.004,
    }


def _script_missing() -> dict[str, str]:
    names = ("seed", "knobs", "link", "host", "selection", "staleness", "practicality", "baselines", "roofs")
    return dict.fromkeys(names, _SCRIPT)


def _command(systems: list[str], ranks: int = 1) -> Document:
    return {"script": "train.py", "systems": systems, "ranks": ranks, "exit_code": 0, "stopped": False}


def _sources(document: Document, timed: str) -> dict[str, str]:
    every = dict.fromkeys(("step_ms", "throughput", "phases_ms", "stall", "ranks", "per_step", "timeline"), timed)
    every |= dict.fromkeys(("hidden_ms_per_step", "practicality", "baselines", "roofs"), timed)
    every |= {"waits_ms": "wall clock", "overhead_fraction": "wall clock", "system": "psutil", "nvml": "NVML"}
    every |= {"series": "psutil", "link": "count", "memory": "count", "selection": "count", "staleness": "count"}
    every |= {"host": timed, "host.bytes_per_element": "count"}
    return {name: source for name, source in every.items() if document[name.partition(".")[0]] is not None}
