"""Sentences about what stands beside the bottleneck: NVML against the events, uneven ranks, throttling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zftune.profile.units import ms, percent

Document = Mapping[str, Any]

DISAGREEMENT_POINTS = 10.0
"""Difference between NVML's idle share and the events' stall from which it is told."""
_UNEVEN = 0.05
_THROTTLED = 0.05
_PRESSED_PERCENT = 10.0
_CROWDED_PERCENT = 50.0
_HARMLESS = {"idle", "gpu idle", "none"}


def observations(document: Document) -> Iterator[str]:
    """One sentence each, for what is worth telling; none if nothing is."""
    for find in (_disagreement, _slowest_rank, _quota, _core_pressure, _memory_pressure, _clocks, _neighbours):
        sentence = find(document)
        if sentence is not None:
            yield sentence


def _disagreement(document: Document) -> str | None:
    stall, busy = document["stall"], (document["nvml"] or {}).get("utilisation_percent")
    if stall is None or busy is None or document["rig"] is not None:
        return None
    idle, stalled = 1 - busy / 100, stall["fraction"]
    if round(100 * abs(idle - stalled), 6) <= DISAGREEMENT_POINTS:
        return None
    why = (
        "the device also waits for what no event pair covers, such as launches"
        if idle > stalled
        else "kernels that only wait, such as those of NCCL, count as busy there"
    )
    return f"NVML saw the device idle {percent(idle)} of the time, the events saw {percent(stalled)} of stall: {why}."


def _slowest_rank(document: Document) -> str | None:
    ranks = document["ranks"]
    if all("comm_ms" in rank for rank in ranks):
        return _waited_for(ranks)
    slowest = max(ranks, key=lambda rank: rank["step_ms"]["mean"])
    mean, own = slowest["step_ms"]["mean"], ranks[0]["step_ms"]["mean"]
    if mean <= (1 + _UNEVEN) * own:
        return None
    return f"Rank {slowest['rank']} is slower than rank {ranks[0]['rank']}: {ms(mean)} a step instead of {ms(own)}."


def _waited_for(ranks: Sequence[Mapping[str, Any]]) -> str | None:
    """The rank that has most to do itself: where ranks meet in each step, all of them take as long."""
    own = {rank["rank"]: rank["step_ms"]["mean"] - rank["comm_ms"] for rank in ranks}
    slowest, least = max(own, key=lambda rank: own[rank]), min(own.values())
    if own[slowest] <= (1 + _UNEVEN) * least:
        return None
    return (
        f"Rank {slowest} is the slowest: without its collectives a step takes it {ms(own[slowest])}, the fastest one "
        f"{ms(least)}; the others wait for it in them."
    )


def _quota(document: Document) -> str | None:
    system = document["system"] or {}
    share = system.get("throttled_fraction")
    if share is None or share < _THROTTLED:
        return None
    return f"The CPU quota held this run back {percent(share)} of the time: give it more cores or use fewer threads."


def _core_pressure(document: Document) -> str | None:
    share = (document["system"] or {}).get("psi_cpu_percent")
    if share is None or share < _CROWDED_PERCENT:
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
