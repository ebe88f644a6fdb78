"""Timing contenders beside each other: every ratio comes from two samples taken right after each other."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from studykit import spread

from hostupdate.contenders import Contender
from hostupdate.machine import GRADIENT_BYTES, RESULT_BYTES, STATE_BYTES, Machine
from zftune.telemetry.bandwidth import host_bandwidth

PASS, IN_CACHE = "no-arithmetic pass", "in-cache replay"
_PAUSE_S = 0.003  # OpenMP's threads spin for a while after a parallel loop, on cores that the next contender needs
_GUESS_BYTES_PER_S = 40e9  # only for the number of passes in a sample
_SAMPLE_S = 0.004  # shorter samples are made of several windows

Sampler = Callable[[], float]
"""Takes one sample: nanoseconds for each element and logged gradient."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One kind of window."""

    interval: int
    replay: bool


@dataclass(slots=True)
class Times:
    """Samples of one setting."""

    ns: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By contender, nanoseconds for each element and logged gradient."""
    ratios: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By the other contender: time of the first, over the other's sample right beside it."""


def window_sampler(contender: Contender, setting: Setting, elements: int, *, warm: bool) -> Sampler:
    """Times windows of a contender.

    Args:
        contender: prepared and checked.
        setting: the kind of window.
        elements: of the contender's state.
        warm: whether an untimed window comes first in every sample, so that a small state is in the cache again.
    """

    def windows(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            contender.apply(setting.interval, replay=setting.replay)
        return (time.perf_counter() - begin) / count

    first_s = windows(1)
    repeats = 1 if first_s > 4 * _SAMPLE_S else max(1, round(_SAMPLE_S / windows(1)))

    def sample() -> float:
        time.sleep(_PAUSE_S)
        if warm:
            windows(1)
        return 1e9 * windows(repeats) / elements / setting.interval

    return sample


def pass_sampler(machine: Machine, elements: int, interval: int) -> Sampler:
    """Times the pass that moves the bytes of a window without arithmetic; it warms up by itself."""

    def run(repeats: int) -> float:
        found = host_bandwidth(
            elements=elements,
            update_interval=interval,
            gradient_bytes=GRADIENT_BYTES,
            threads=machine.threads,
            repeats=repeats,
        )
        return found.bytes_per_element / found.gbps

    traffic_bytes = elements * (2 * STATE_BYTES + interval * GRADIENT_BYTES + RESULT_BYTES)
    repeats = min(100, max(1, round(_SAMPLE_S * _GUESS_BYTES_PER_S / traffic_bytes)))

    def sample() -> float:
        time.sleep(_PAUSE_S)
        return run(repeats) / interval

    return sample


def interleave(
    samplers: Mapping[Setting, Mapping[str, Sampler]],
    first: str | None,
    rounds: int,
    order: random.Random,
    on_round: Callable[[], None],
) -> dict[Setting, Times]:
    """Sample every setting in every round, in random order.

    Args:
        samplers: by setting, then by contender.
        first: the contender that is sampled anew beside each of the others, before or after it; None for no pairs.
        rounds: how often.
        order: source of the order of settings, and of who goes first in a pair.
        on_round: called after each round.
    """
    times = {setting: Times() for setting in samplers}
    for _ in range(rounds):
        for setting in order.sample(list(samplers), len(samplers)):
            others = [name for name in samplers[setting] if name != first]
            for name in order.sample(others, len(others)):
                _sample_pair(samplers[setting], first, name, times[setting], order)
        on_round()
    return times


def _sample_pair(
    samplers: Mapping[str, Sampler], first: str | None, other: str, times: Times, order: random.Random
) -> None:
    pair = [other] if first is None else order.sample([first, other], 2)
    found = {name: samplers[name]() for name in pair}
    for name, ns in found.items():
        times.ns[name].append(ns)
    if first is not None:
        times.ratios[other].append(found[first] / found[other])


def rows_of(times: Mapping[Setting, Times]) -> list[dict[str, Any]]:
    """One row for each setting and contender; `engine_over_it` is the first contender's time over this one's."""
    return [
        {
            "interval": setting.interval,
            "replay": setting.replay,
            "contender": name,
            "ns": spread(ns),
            "engine_over_it": spread(found.ratios[name]) if name in found.ratios else None,
        }
        for setting, found in times.items()
        for name, ns in found.ns.items()
    ]


def settings(intervals: Sequence[int]) -> list[Setting]:
    """All kinds of windows."""
    return [Setting(interval, replay) for replay in (False, True) for interval in intervals]
