"""The verdict: what holds the step up, and which knob to turn, in a few sentences with numbers.

A pure function of the profile document. The order of the questions: should this run offload at all; does it
wait, for what, and what shortens that; how does it stand against ZeRO-Offload.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from zftune.profile.derive import NO_FINITE_LOSS
from zftune.quality import coverage_warning, figure
from zftune.text import UNEVEN, ms, number, percent, size, slowest_rank, times

_NOTABLE = 0.1  # share of a step from which a second phase is worth a sentence
_SMALL_STALL = 0.05  # share of a step: below it the stall is not what to work on
_IDLE_PERCENT = 50.0  # of a core, for each rank: below it a step is no computing, at least not on the CPU
WITH_DATA = "forward and what precedes it"
"""What the phase "forward" is called where nobody saw a data loader."""
_PLAIN_WORK = {
    "data": "loading data",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer",
    "other": "work outside the forward pass, backward pass and optimizer",
}
_WAITS = {
    "host": "the host optimizer",
    "h2d": "copies to the device",
    "d2h": "copies to the host",
    "select": "the selection of columns",
    "comm": "communication between ranks",
    "data": "the next batch",
}
_COMPUTE = "What is left is compute: a lower precision, torch.compile or a faster device shortens it."
_LEAST_SAMPLES = 20
"""Of the training thread's frames, for a verdict."""
_LAUNCHING = ("forward", "backward", "optimizer")
_FEWER_LAUNCHES = (
    "More tokens a step or torch.compile help against that; a faster device or a lower precision does not."
)
_PLAIN_ADVICE = {
    "other": "Look there for logging, evaluation, clipping and .item() calls: none of them has to happen every step.",
    "comm": "Look at the interconnect, or give every rank a larger micro-batch.",
    "h2d": "Pin the memory that is copied from, and copy with non_blocking=True.",
    "d2h": "Copy with non_blocking=True into pinned memory, and read losses less often.",
    "select": "Raise select_interval: columns then change tiers less often.",
}
_NO_LOADER = (
    "No torch DataLoader gave the batches, so getting them is in there, as are evaluations between two steps; with one "
    "it is told apart."
)
_IDLE = "The processes use {cores} of a core: a step waits, for data, disk, network or a timer, rather than computes."
_FUSED = "A fused optimizer (fused=True) makes fewer passes, gradient accumulation makes fewer steps."
_OFFLOADED = (
    "It works on the host while the device waits: ZenFlow with overlap_step lets it work beside the next steps, and "
    "an offload ratio below 1 (Twin-Flow) gives it less to do."
)
_ZENFLOW = "Raise ZenFlow's update_interval or topk_ratio: the host then has less to do a step."


def plain_verdict(document: Document) -> list[str]:
    """Sentences, the most important first; the document's own "verdict" is not read."""
    stall, phases = document["stall"], document["phases_ms"]
    held = thread_ms(document) is not None
    stalled = stall is not None and stall["fraction"] >= _SMALL_STALL and bool(stall["by_cause"])
    if stalled and not held:
        return [_stalled(document, stall), _advice(_longest(stall["by_cause"]), document)]
    sentences = [f"What bounds the step is the training thread. {_held(document)}"] if held else []
    known = {name: value for name, value in (phases or {}).items() if value is not None}
    if stalled:
        sentences.append(_stalled(document, stall))
    elif stall is not None:
        whole = "" if "data" in known else " for what is known"
        waits = f"{ms(stall['ms_per_step'])} a step ({percent(stall['fraction'])})"
        sentences.append(f"{'Beyond that the' if held else 'The'} device hardly waits{whole}: {waits}.")
    if not known:
        return [*sentences, "What a step consists of was not recorded."]
    first = _longest(known)
    sentences.append(
        f"{_share(known[first], document)} of a step is {_of_step(_PLAIN_WORK, first, known[first], document)}."
    )
    advice = _advice(first, document)
    sentences += [] if held and advice == _COMPUTE else [advice]
    sentences += [_FEWER_LAUNCHES] if held and first in _LAUNCHING else []
    more = [name for name in ("data", "optimizer", "other") if name != first and name in known]
    for name in sorted(more, key=lambda name: -known[name]):
        if known[name] >= _NOTABLE * document["step_ms"]["mean"]:
            sentences.append(f"Then {_of_step(_PLAIN_WORK, name, known[name], document)}. {_advice(name, document)}")
    return sentences


def _share(value: float, document: Document) -> str:
    return "Most" if value > document["step_ms"]["mean"] / 2 else "The longest part"


def _stalled(document: Document, stall: Mapping[str, Any]) -> str:
    cause = _longest(stall["by_cause"])
    return (
        f"The device waits {ms(stall['ms_per_step'])} of {ms(document['step_ms']['mean'])} a step "
        f"({percent(stall['fraction'])}), {percent(stall['by_cause'][cause] / stall['ms_per_step'])} of it for "
        f"{_WAITS[cause]}."
    )


def phase_names(document: Document) -> dict[str, str]:
    """Of the phases, on every screen and page, those that are not called as in the document."""
    return {} if (document["phases_ms"] or {}).get("data") is not None else {"forward": WITH_DATA}


def _of_step(names: Mapping[str, str], name: str, value: float, document: Document) -> str:
    mean = document["step_ms"]["mean"]
    what = f"{names[name]}{' and what precedes it' if name in phase_names(document) else ''}"
    return f"{what}: {ms(value)} of {ms(mean)} ({percent(min(1.0, value / mean))})"


def _advice(name: str, document: Document) -> str:
    if name in ("forward", "backward"):
        return _advice_on_compute(name, document)
    if name == "data":
        return advice_on_data(document)
    if name not in ("optimizer", "host"):
        return _PLAIN_ADVICE[name]
    systems = " ".join((document["command"] or {}).get("systems", ()))
    if "ZenFlow" in systems:
        return _ZENFLOW
    return _OFFLOADED if "offload" in systems.lower() or name == "host" else _FUSED


def advice_on_data(document: Document) -> str:
    """What helps a training that waits for batches, by the workers that there are."""
    workers, cores = (document["command"] or {}).get("loader_workers"), document["hardware"]["usable_cores"]
    if workers is None:
        return "Give the DataLoader workers, more of them, or let them prefetch; or prepare the data beforehand."
    if workers == 0:
        return "The DataLoader has no workers: give it some (num_workers), or prepare the data beforehand."
    has = f"The DataLoader has {workers} worker{'s' if workers > 1 else ''}"
    if cores is not None and workers >= cores:
        return f"{has} on {cores:g} usable cores, more would not help: prepare the data beforehand."
    return f"{has}: give it more, let them prefetch more (prefetch_factor), or prepare the data beforehand."


def _advice_on_compute(name: str, document: Document) -> str:
    """A faster device helps, unless it is not computing that takes the time."""
    used = (document["system"] or {}).get("cpu_percent")
    idle = used is not None and used < _IDLE_PERCENT * len(document["ranks"])
    if document["stall"] is None and idle and _core_pressure(document) is None:  # else it waits for a core
        return _IDLE.format(cores=number((used or 0.0) / 100))
    return _NO_LOADER if name == "forward" and document["phases_ms"]["data"] is None else _COMPUTE


def thread_ms(document: Document) -> float | None:
    """Time of a step in which the training thread leaves the device idle: its idle time less the events' stall.

    Returns:
        None if it is not known, or not the largest part of a step.
    """
    stall = document["stall"]
    held = None if stall is None else _idle_beyond(stall["ms_per_step"], document)
    if held is None:
        return None
    busy = document["step_ms"]["mean"] - held - stall["ms_per_step"]
    return held if held >= max(busy, *stall["by_cause"].values(), 0.0) else None


def _idle_beyond(stall_ms: float, document: Document) -> float | None:
    if idle_lines(document) is not None:
        return float(document["thread_lines"]["ms_per_step"])
    if document["rig"] is not None:  # the emulator counts it; absent from older documents
        return document["rig"].get("thread_idle_ms") or None
    busy = (document["nvml"] or {}).get("utilisation_percent")
    if busy is None:
        return None
    phases = {name: value for name, value in (document["phases_ms"] or {}).items() if value is not None}
    if not phases or _longest(phases) not in _LAUNCHING:
        return None
    seen = document.get("idle")
    if seen is not None and seen["by_cause"]["launch"] < seen["ms_per_step"] / 2:  # torch.profiler knows another cause
        return None
    return float(document["step_ms"]["mean"] * (1 - busy / 100) - stall_ms)


def idle_lines(document: Document) -> list[dict[str, Any]] | None:
    """The lines that held the training thread while the device idled; None if not known from enough samples."""
    sampled = document.get("thread_lines")
    if sampled is None or sampled["of"] != "idle" or sampled["samples"] < _LEAST_SAMPLES:
        return None
    lines: list[dict[str, Any]] = sampled["lines"]
    return lines


def place(line: Mapping[str, Any]) -> str:
    """A line of Python, with its function."""
    return f"{line['file']}:{line['line']} ({line['function'].replace('<locals>.', '')})"


def _held(document: Document) -> str:
    """How long the training thread leaves the device idle, and where."""
    lines, held, mean = idle_lines(document), thread_ms(document) or 0.0, document["step_ms"]["mean"]
    if not lines and document["rig"] is None:
        return _launches(document)
    where = f", {ms(lines[0]['ms_per_step'])} of that in {place(lines[0])}" if lines else ""
    return f"It leaves the device idle for {ms(held)} of {ms(mean)} a step ({percent(held / mean)}){where}."


def _launches(document: Document) -> str:
    profiled = document.get("idle")
    counted = "" if profiled is None else f" ({ms(profiled['by_cause']['launch'])} a step by torch.profiler)"
    idle = percent(1 - document["nvml"]["utilisation_percent"] / 100)
    return (
        f"NVML saw the device idle {idle} of the time: the training thread launches operations more slowly than the "
        f"device runs them{counted}."
    )


def _longest(values: Mapping[str, float]) -> str:
    return max(values, key=lambda name: values[name])


DISAGREEMENT_POINTS = 10.0
"""Difference between NVML's idle share and the events' stall from which it is told."""
_THROTTLED = 0.05
_PRESSED_PERCENT = 10.0
CROWDED_PERCENT = 50.0
_HARMLESS = {"idle", "gpu idle", "none"}


def observations(document: Document) -> Iterator[str]:
    """One sentence each, for what is worth telling; none if nothing is."""
    for find in _FINDERS:
        sentence = find(document)
        if sentence is not None:
            yield sentence


def _loss(document: Document) -> str | None:
    found = document.get("loss")
    wrong = 0 if found is None else found["not_finite"]
    if document["missing"].get("loss") == NO_FINITE_LOSS:
        return "The loss is not a finite number in any measured step: this training is broken."
    if wrong:
        return f"The loss is not a finite number in {wrong} of the measured steps."
    if found is None or found["trend"] != "rising":
        return None
    first, last = (figure(found[name], found["error"]) for name in ("first", "last"))
    return f"The loss rises over the measured steps, from {first} to {last}, however fast they are."


def _coverage(document: Document) -> str | None:
    selection = document["selection"] or {}
    return coverage_warning(selection.get("coverage"), document["knobs"] or {})


def _disagreement(document: Document) -> str | None:
    stall, busy = document["stall"], (document["nvml"] or {}).get("utilisation_percent")
    if stall is None or busy is None or document["rig"] is not None:
        return None
    idle, stalled = 1 - busy / 100, stall["fraction"]
    if round(100 * abs(idle - stalled), 6) <= DISAGREEMENT_POINTS or thread_ms(document) is not None:
        return None  # within reach of each other, or told as what bounds the step
    profiled = document.get("idle")
    of_launches = "" if profiled is None else f" ({ms(profiled['by_cause']['launch'])} a step by torch.profiler)"
    why = (
        f"the device also waits for what no event pair covers, such as launches{of_launches}"
        if idle > stalled
        else "kernels that only wait, such as those of NCCL, count as busy there"
    )
    return f"NVML saw the device idle {percent(idle)} of the time, the events saw {percent(stalled)} of stall: {why}."


def _slowest_rank(document: Document) -> str | None:
    ranks = document["ranks"]
    if all("comm_ms" in rank for rank in ranks):
        return slowest_rank({rank["rank"]: rank["step_ms"]["mean"] - rank["comm_ms"] for rank in ranks})
    slowest = max(ranks, key=lambda rank: rank["step_ms"]["mean"])
    mean, own = slowest["step_ms"]["mean"], ranks[0]["step_ms"]["mean"]
    if mean <= (1 + UNEVEN) * own:
        return None
    return f"Rank {slowest['rank']} is slower than rank {ranks[0]['rank']}: {ms(mean)} a step instead of {ms(own)}."


def _quota(document: Document) -> str | None:
    system = document["system"] or {}
    share = system.get("throttled_fraction")
    if share is None or share < _THROTTLED:
        return None
    return f"The CPU quota held this run back {percent(share)} of the time: give it more cores or use fewer threads."


def _core_pressure(document: Document) -> str | None:
    share = (document["system"] or {}).get("psi_cpu_percent")
    if share is None or share < CROWDED_PERCENT:
        return None
    return (
        f"Tasks waited for a core {percent(share / 100)} of the time: the machine has fewer cores than its programs "
        "use, and steps are longer than they would be alone."
    )


def _memory_pressure(document: Document) -> str | None:
    share = (document["system"] or {}).get("psi_memory_percent")
    if share is None or share < _PRESSED_PERCENT:
        return None
    return f"Tasks waited for memory {percent(share / 100)} of the time: the host swaps or reclaims."


def _clocks(document: Document) -> str | None:
    reasons = (document["nvml"] or {}).get("throttle_reasons") or ()
    reasons = [reason for reason in reasons if reason.lower() not in _HARMLESS]
    return f"The device's clocks were held down: {', '.join(reasons)}." if reasons else None


def _neighbours(document: Document) -> str | None:
    others = (document["nvml"] or {}).get("other_processes")
    if not others:
        return None
    return f"{others} other process{'es' if others > 1 else ''} used the device meanwhile."


_FINDERS = (
    _loss,
    _coverage,
    _disagreement,
    _slowest_rank,
    _quota,
    _core_pressure,
    _memory_pressure,
    _clocks,
    _neighbours,
)


Document = Mapping[str, Any]

_WORTHWHILE = 0.03  # share of a step that offloading must cost before it is advised against
_SPARE = 0.9  # share of the GPU's memory that may be used without offloading
_SMALL_STATE = 0.05  # state below this share of the GPU's memory is never worth offloading
_FEW_TRAINABLE = 0.05  # share of the parameters: an adapter such as LoRA
_SAME_SPEED = 0.02
_STATE_BYTES = 12  # fp32 master and two moments of an element
_MANY_STEPS = 64  # a longer window helps no more: 4S dominates the traffic of 28 + 4S
_SLOW_HOST = 0.6  # of the ceiling

_OWN_WAITS = {
    **_WAITS,
    "host": "the host update",
    "h2d": "updated weights on their way to the device",
    "d2h": "gradients on their way to the host",
}
_OWN_WORK = {
    **_PLAIN_WORK,
    "optimizer": "the optimizer's own work on the device",
    "other": "work outside of it",
}


def verdict(document: Document) -> list[str]:
    """Name the bottleneck and the knob to turn, or say that offloading is not the way.

    Returns:
        Sentences, the most important first.
    """
    if document["knobs"] is None:
        return _cores_first(document, [*plain_verdict(document), *observations(document)])
    against = do_not_offload(document)
    sentences = [against, *_bottleneck(document, advise=against is None), _comparison(document)]
    told = [*(sentence for sentence in sentences if sentence is not None), *observations(document)]
    return _cores_first(document, told)


def _cores_first(document: Document, sentences: list[str]) -> list[str]:
    """Missing cores lead where they take a larger share of the time than the stall: they may be its cause, too."""
    system, stall = document["system"] or {}, document["stall"]
    waited = 0.0 if stall is None else stall["fraction"]
    shares = (
        (system.get("throttled_fraction"), _quota),
        ((system.get("psi_cpu_percent") or 0.0) / 100, _core_pressure),
    )
    missing = [find(document) for share, find in shares if share is not None and share > waited]
    if document["rig"] is not None:  # its time may be simulated
        return sentences
    first = [one for one in missing if one is not None]
    return [*first, *(one for one in sentences if one not in first)]


def do_not_offload(document: Document) -> str | None:
    """Why offloading is a mistake here, in a sentence; None: it is none, or that is not known."""
    trainable, parameters = document["workload"]["trainable"], document["workload"]["parameters"]
    knobs = document["knobs"]  # None: another optimizer than ours trains
    if knobs is None or knobs["offload_ratio"] == 0 or trainable is None or parameters is None:
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
    if stall["fraction"] < _SMALL_STALL or not stall["by_cause"]:
        return [f"Offloading hardly stalls the device: it waits {waits}.", _bound(document)]
    cause, waited = max(stall["by_cause"].items(), key=lambda item: item[1])
    sentence = f"The device waits {waits}, {percent(waited / stall['ms_per_step'])} of it for {_OWN_WAITS[cause]}."
    if thread_ms(document) is not None:
        return [_bound(document), sentence]
    return [sentence, _ADVICE[cause](document)] if advise else [sentence]


def _bound(document: Document) -> str:
    phases = {name: value for name, value in (document["phases_ms"] or {}).items() if value is not None}
    if not phases:
        return "What bounds the step was not measured."
    if thread_ms(document) is not None:
        resident = (document["baselines"] or {}).get("no_offload")
        step = "" if resident is None else f", {ms(resident['step_ms']['mean'])} a step without offloading"
        whole = f"What bounds the step now is the training thread{step}. {_held(document)}"
        calls = "Offloading makes such calls for each weight. " if document["knobs"]["offload_ratio"] else ""
        return f"{whole} {calls}{_FEWER_LAUNCHES}"
    name, value = max(phases.items(), key=lambda item: item[1])
    return f"What bounds the step now is {_of_step(_OWN_WORK, name, value, document)}."


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
    if lag is not None and lag < interval and knobs["window_phase"] == "together":
        return f"Raise apply_lag from {lag} to {interval}: the weights then spread over the whole window."
    return f"Raise update_interval above {interval}: weights then cross the link less often."


def _advise_select(document: Document) -> str:
    now = document["knobs"]["select_interval"]
    return f"Raise select_interval from {now} to {2 * now} or more: columns then change tiers less often."


def _advise_comm(_: Document) -> str:
    return "No offloading setting shortens that: look at the interconnect, or give every rank a larger micro-batch."


def _advise_data(document: Document) -> str:
    return f"No offloading setting shortens that. {advice_on_data(document)}"


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
