"""The verdict on a command that has no knobs of ours: what dominates its step, and what helps against it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zftune.profile.units import ms, number, percent

Document = Mapping[str, Any]

_NOTABLE = 0.1  # share of a step from which a second phase is worth a sentence
_SMALL_STALL = 0.05
_IDLE_PERCENT = 50.0  # of a core, for each rank: below it a step is no computing, at least not on the CPU
WITH_DATA = "forward and what precedes it"
"""What the screen calls the phase "forward" where nobody saw a data loader."""
_WORK = {
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
_ADVICE = {
    "data": "Give the DataLoader workers, more of them, or let them prefetch; or prepare the data beforehand.",
    "other": "Look there for logging, evaluation, clipping and .item() calls: none of them has to happen every step.",
    "comm": "Look at the interconnect, or give every rank a larger micro-batch.",
    "h2d": "Pin the memory that is copied from, and copy with non_blocking=True.",
    "d2h": "Copy with non_blocking=True into pinned memory, and read losses less often.",
    "select": "Raise select_interval: columns then change tiers less often.",
}
_NO_LOADER = "No torch DataLoader gave the batches, so getting them is in there; with one it is told apart."
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
    if stall is not None and stall["fraction"] >= _SMALL_STALL and stall["by_cause"]:
        return [_stalled(document, stall), _advice(_longest(stall["by_cause"]), document)]
    sentences = []
    known = {name: value for name, value in (phases or {}).items() if value is not None}
    if stall is not None:
        whole = "" if "data" in known else " for what is known"
        waits = f"{ms(stall['ms_per_step'])} a step ({percent(stall['fraction'])})"
        sentences.append(f"The device hardly waits{whole}: {waits}.")
    if not known:
        return [*sentences, "What a step consists of was not recorded."]
    first = _longest(known)
    sentences += [f"Most of a step is {_of_step(first, known[first], document)}.", _advice(first, document)]
    more = [name for name in ("data", "optimizer", "other") if name != first and name in known]
    for name in sorted(more, key=lambda name: -known[name]):
        if known[name] >= _NOTABLE * document["step_ms"]["mean"]:
            sentences.append(f"Then {_of_step(name, known[name], document)}. {_advice(name, document)}")
    return sentences


def _stalled(document: Document, stall: Mapping[str, Any]) -> str:
    cause = _longest(stall["by_cause"])
    return (
        f"The device waits {ms(stall['ms_per_step'])} of {ms(document['step_ms']['mean'])} a step "
        f"({percent(stall['fraction'])}), {percent(stall['by_cause'][cause] / stall['ms_per_step'])} of it for "
        f"{_WAITS[cause]}."
    )


def _of_step(name: str, value: float, document: Document) -> str:
    mean = document["step_ms"]["mean"]
    return f"{work(_WORK, name, document)}: {ms(value)} of {ms(mean)} ({percent(min(1.0, value / mean))})"


def work(names: Mapping[str, str], name: str, document: Document) -> str:
    """What a phase is called; the forward pass has the batches' share in it where nobody saw them loaded."""
    unseen = name == "forward" and (document["phases_ms"] or {}).get("data") is None
    return f"{names[name]} and what precedes it" if unseen else names[name]


def _advice(name: str, document: Document) -> str:
    if name in ("forward", "backward"):
        return _advice_on_compute(name, document)
    if name not in ("optimizer", "host"):
        return _ADVICE[name]
    systems = " ".join((document["command"] or {}).get("systems", ()))
    if "ZenFlow" in systems:
        return _ZENFLOW
    return _OFFLOADED if "offload" in systems.lower() or name == "host" else _FUSED


def _advice_on_compute(name: str, document: Document) -> str:
    """A faster device helps, unless it is not computing that takes the time."""
    used = (document["system"] or {}).get("cpu_percent")
    if document["stall"] is None and used is not None and used < _IDLE_PERCENT * len(document["ranks"]):
        return _IDLE.format(cores=number(used / 100))
    return _NO_LOADER if name == "forward" and document["phases_ms"]["data"] is None else _COMPUTE


def _longest(values: Mapping[str, float]) -> str:
    return max(values, key=lambda name: values[name])
