"""The verdict on a command that has no knobs of ours: what dominates its step, and what helps against it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zftune.profile.units import ms, percent

Document = Mapping[str, Any]

_NOTABLE = 0.1  # share of a step from which a second phase is worth a sentence
_SMALL_STALL = 0.05
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
    "forward": _COMPUTE,
    "backward": _COMPUTE,
    "other": "Look there for logging, evaluation, clipping and .item() calls: none of them has to happen every step.",
    "comm": "Look at the interconnect, or give every rank a larger micro-batch.",
    "h2d": "Pin the memory that is copied from, and copy with non_blocking=True.",
    "d2h": "Copy with non_blocking=True into pinned memory, and read losses less often.",
    "select": "Raise select_interval: columns then change tiers less often.",
}
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
    if stall is not None:
        sentences.append(f"The device hardly waits: {ms(stall['ms_per_step'])} a step ({percent(stall['fraction'])}).")
    known = {name: value for name, value in (phases or {}).items() if value is not None}
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
    return f"{_WORK[name]}: {ms(value)} of {ms(mean)} ({percent(min(1.0, value / mean))})"


def _advice(name: str, document: Document) -> str:
    if name not in ("optimizer", "host"):
        return _ADVICE[name]
    systems = " ".join((document["command"] or {}).get("systems", ()))
    if "ZenFlow" in systems:
        return _ZENFLOW
    return _OFFLOADED if "offload" in systems.lower() or name == "host" else _FUSED


def _longest(values: Mapping[str, float]) -> str:
    return max(values, key=lambda name: values[name])
