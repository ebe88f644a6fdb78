"""The verdict: what holds the step up, and which knob to turn, in a few sentences with numbers.

A pure function of the profile document. The order of the questions: should this run offload at all; does it
wait, for what, and what shortens that; how does it stand against ZeRO-Offload.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from zftune.profile.observations import observations
from zftune.profile.plain_verdict import plain_verdict, work
from zftune.profile.units import ms, number, percent, size, times

Document = Mapping[str, Any]

SMALL_STALL = 0.05
"""Share of a step: below it the stall is not what to work on."""
_WORTHWHILE = 0.03  # share of a step that offloading must cost before it is advised against
_SPARE = 0.9  # share of the GPU's memory that may be used without offloading
_SMALL_STATE = 0.05  # state below this share of the GPU's memory is never worth offloading
_FEW_TRAINABLE = 0.05  # share of the parameters: an adapter such as LoRA
_SAME_SPEED = 0.02
_STATE_BYTES = 12  # fp32 master and two moments of an element
_MANY_STEPS = 64  # a longer window helps no more: 4S dominates the traffic of 28 + 4S
_SLOW_HOST = 0.6  # of the ceiling

WAITS = {
    "host": "the host update",
    "h2d": "updated weights on their way to the device",
    "d2h": "gradients on their way to the host",
    "select": "the selection of columns",
    "comm": "communication between ranks",
    "data": "the next batch",
}
_WORK = {
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer's own work on the device",
    "data": "loading data",
    "other": "work outside of it",
}


def verdict(document: Document) -> list[str]:
    """Name the bottleneck and the knob to turn, or say that offloading is not the way.

    Args:
        document: a profile document; its own "verdict" is not read.

    Returns:
        Sentences, the most important first.
    """
    if document["knobs"] is None:
        return [*plain_verdict(document), *observations(document)]
    against = _do_not_offload(document)
    sentences = [against, *_bottleneck(document, advise=against is None), _comparison(document)]
    return [*(sentence for sentence in sentences if sentence is not None), *observations(document)]


def _do_not_offload(document: Document) -> str | None:
    trainable, parameters = document["workload"]["trainable"], document["workload"]["parameters"]
    if document["knobs"]["offload_ratio"] == 0 or trainable is None or parameters is None:
        return None
    state = _STATE_BYTES * trainable
    if trainable < _FEW_TRAINABLE * parameters:
        return (
            f"Do not offload: only {percent(trainable / parameters)} of the parameters are trainable, and their "
            f"optimizer state is no more than {size(state)} (set offload_ratio to 0)."
        )
    memory = _device_memory(document)
    if document["rig"] is not None or memory is None:  # nobody knows the memory of an emulated device
        return None
    if state < _SMALL_STATE * memory:
        return (
            f"Do not offload: the whole optimizer state is {size(state)}, {percent(state / memory)} of the "
            f"device's {size(memory)} (set offload_ratio to 0)."
        )
    peak, practicality = document["memory"]["device_peak_bytes"], document["practicality"]
    if peak is None or practicality is None:
        return None
    needed = peak + state * document["knobs"]["offload_ratio"]
    if needed >= _SPARE * memory or practicality > 1 - _WORTHWHILE:
        return None
    return (
        f"Do not offload: it costs {percent(1 - practicality)} of the speed, and with all state on the device "
        f"{size(needed)} of its {size(memory)} would be in use (set offload_ratio to 0)."
    )


def _device_memory(document: Document) -> int | None:
    gpus = document["hardware"]["gpus"] or ()
    sizes = [gpu["memory_bytes"] for gpu in gpus if gpu["name"] == document["device"]]
    return min((memory for memory in sizes if memory is not None), default=None)


def _bottleneck(document: Document, *, advise: bool) -> list[str]:
    stall, mean = document["stall"], document["step_ms"]["mean"]
    if document["knobs"]["offload_ratio"] == 0:
        return ["This run does not offload: nothing waits for the host.", _bound(document)]
    if stall is None:
        reason = document["missing"].get("stall", "it was not measured")
        return [f"How long the device waits is unknown ({reason}).", _bound(document)]
    waits = f"{ms(stall['ms_per_step'])} of {ms(mean)} a step ({percent(stall['fraction'])})"
    if stall["fraction"] < SMALL_STALL or not stall["by_cause"]:
        return [f"Offloading hardly stalls the device: it waits {waits}.", _bound(document)]
    cause, waited = max(stall["by_cause"].items(), key=lambda item: item[1])
    sentence = f"The device waits {waits}, {percent(waited / stall['ms_per_step'])} of it for {WAITS[cause]}."
    return [sentence, _ADVICE[cause](document)] if advise else [sentence]


def _bound(document: Document) -> str:
    phases = {name: value for name, value in (document["phases_ms"] or {}).items() if value is not None}
    if not phases:
        return "What bounds the step was not measured."
    name, value = max(phases.items(), key=lambda item: item[1])
    mean = document["step_ms"]["mean"]
    what = work(_WORK, name, document)
    return f"What bounds the step now is {what}: {ms(value)} of {ms(mean)} ({percent(min(1.0, value / mean))})."


def _comparison(document: Document) -> str | None:
    rival = (document["baselines"] or {}).get("zero_offload")
    if rival is None or rival["knobs"] == document["knobs"]:
        return None
    own, stall, rival_stall = document["step_ms"]["mean"], document["stall"], rival["stall"]
    steps = f"({ms(own)} a step instead of {ms(rival['step_ms']['mean'])})"
    if abs(rival["speedup"] - 1) < _SAME_SPEED:
        return f"ZeRO-Offload in DeepSpeed's order is as fast {steps}."
    sentence = f"This is {times(rival['speedup'])} the speed of ZeRO-Offload in DeepSpeed's order {steps}"
    if stall is None or rival_stall is None or rival_stall["ms_per_step"] <= stall["ms_per_step"]:
        return f"{sentence}."
    return f"{sentence}, with {percent(1 - stall['ms_per_step'] / rival_stall['ms_per_step'])} less stall."


def _advise_host(document: Document) -> str:
    knobs = document["knobs"]
    interval = knobs["update_interval"]
    if not knobs["overlap_step"]:
        return _advise_overlap(document)
    host = document["host"] or {}
    gbps, ceiling = host.get("gbps"), host.get("ceiling_gbps")
    if gbps is not None and ceiling is not None and gbps < _SLOW_HOST * ceiling:
        return (
            f"The host engine moves {number(gbps)} of {number(ceiling)} GB/s ({percent(gbps / ceiling)}): give it more "
            "cores or bind them to the device's NUMA node before raising update_interval."
        )
    least = least_update_interval(document)
    if least is not None and least > interval:
        return f"Raise update_interval from {interval} to {least}: then the host keeps up with the device."
    if least is None and host.get("update_ms") is not None:
        return _advise_less_host_work(document)
    return f"Raise update_interval above {interval}, or topk_ratio above {knobs['topk_ratio']:g}."


def _advise_overlap(document: Document) -> str:
    knobs, interval = document["knobs"], least_update_interval(document) or 4
    changes = [f"update_interval {interval}"] if interval > knobs["update_interval"] else []
    if knobs["topk_ratio"] == 0:
        changes.append("a topk_ratio above 0, so that the important columns stay fresh")
    also = f", with {' and '.join(changes)}" if changes else ""
    return f"Turn overlap_step on{also}: the host then works beside the device."


def _advise_less_host_work(document: Document) -> str:
    """No window is long enough: fewer elements must be left to the host."""
    knobs = document["knobs"]
    interval = max(4, knobs["update_interval"])
    ratio = least_topk_ratio(document, interval)
    if ratio is None:
        return "No update_interval lets the host keep up: lower offload_ratio, or give the device more work a step."
    return (
        f"No update_interval lets the host keep up: raise topk_ratio from {knobs['topk_ratio']:g} to {ratio:.2f} "
        f"(at update_interval {interval}), or lower offload_ratio."
    )


def _advise_d2h(document: Document) -> str:
    knobs = document["knobs"]
    return (
        f"The link is the limit: raise topk_ratio above {knobs['topk_ratio']:g}, or lower offload_ratio below "
        f"{knobs['offload_ratio']:g}, so that fewer gradients cross it; a larger micro-batch hides more of it."
    )


def _advise_h2d(document: Document) -> str:
    knobs = document["knobs"]
    if not knobs["overlap_step"]:
        bucket = 'Set pipeline to "bucket", and turn' if knobs["pipeline"] == "none" else "Turn"
        return f"{bucket} overlap_step on, so that weights travel beside the next steps."
    interval, lag = knobs["update_interval"], knobs["apply_lag"]
    if lag is not None and lag < interval:
        return f"Raise apply_lag from {lag} to {interval}: the weights then spread over the whole window."
    return f"Raise update_interval above {interval}: weights then cross the link less often."


def _advise_select(document: Document) -> str:
    now = document["knobs"]["select_interval"]
    return f"Raise select_interval from {now} to {2 * now} or more: columns then change tiers less often."


def _advise_comm(_: Document) -> str:
    return "No offloading knob shortens that: look at the interconnect, or give every rank a larger micro-batch."


def _advise_data(_: Document) -> str:
    return "No offloading knob shortens that: give the data loader more workers or let it prefetch."


_ADVICE = {
    "host": _advise_host,
    "h2d": _advise_h2d,
    "d2h": _advise_d2h,
    "select": _advise_select,
    "comm": _advise_comm,
    "data": _advise_data,
}


def least_update_interval(document: Document) -> int | None:
    """Least S with T_host(S) <= S c, from the measured host pass; None if no S is enough or it was not measured.

    T_host(S) = a (28 + 4S), where a = (1-k) P / H comes from this run's own host pass; c is the mean step without
    its stall.
    """
    unit, compute = _host_unit_ms(document), _compute_ms(document)
    if unit is None or compute is None or compute <= 4 * unit:
        return None
    least = max(1, math.ceil(28 * unit / (compute - 4 * unit) - 1e-9))
    return least if least <= _MANY_STEPS else None


def least_topk_ratio(document: Document, interval: int) -> float | None:
    """Least topk_ratio, in hundredths, with which the host keeps up at `interval`; None if there is none below 1."""
    unit, compute = _host_unit_ms(document), _compute_ms(document)
    if unit is None or compute is None or unit == 0:
        return None
    deferred = (1 - document["knobs"]["topk_ratio"]) * interval * compute / (unit * (28 + 4 * interval))
    ratio = math.ceil(100 * (1 - deferred) - 1e-9) / 100
    return ratio if document["knobs"]["topk_ratio"] < ratio < 1 else None


def _host_unit_ms(document: Document) -> float | None:
    """Milliseconds that the host takes for one byte of each deferred element."""
    update_ms = (document["host"] or {}).get("update_ms")
    return None if update_ms is None else update_ms / (28 + 4 * document["knobs"]["update_interval"])


def _compute_ms(document: Document) -> float | None:
    stall = document["stall"]
    if stall is None:
        return None
    offloading = stall["ms_per_step"] - stall["by_cause"].get("comm", 0.0)  # the host works beside collectives, too
    return float(document["step_ms"]["mean"] - offloading)
