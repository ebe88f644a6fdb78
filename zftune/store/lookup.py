"""Which of the presets serves: the same key, else the nearest by measured ratios, else none."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from zftune.store.types import Key, Match, Preset, PresetState, Query, Ratios

MAX_DISTANCE = math.log(2.0)
"""Of the ratios: as when one of them differs by a factor of 2."""

_SAME_EXACTLY = tuple(field.name for field in fields(Key) if field.name != "sequence")
_SAME_ALWAYS = ("backend", "stage", "quality")  # another of these is another algorithm, or another promise
_MAX_THREADS = 4096


def find(query: Query, presets: Iterable[Preset]) -> Match | None:
    """The preset to begin with, or None.

    Args:
        query: what knobs are wanted for.
        presets: all there are; withdrawn ones do not serve.
    """
    active = [preset for preset in presets if preset.state is PresetState.ACTIVE]
    same = [preset for preset in active if is_exact(query.key, preset.key)]
    if same:
        # Own ones before imported ones, those of the least longer sequence, then the newest.
        best = min(same, key=lambda one: (one.imported, one.key.sequence, -one.created_unix_s))
        return _exact(query, best)
    near = [(distance(query, preset), preset) for preset in active]
    close = [(far, preset) for far, preset in near if far is not None and far <= MAX_DISTANCE]
    if not close:
        return None
    far, best = min(close, key=lambda one: (one[0], one[1].imported, -one[1].created_unix_s))
    return _nearest(query, best, far)


def is_exact(wanted: Key, key: Key) -> bool:
    """Whether a preset of `key` was proven for what is `wanted`."""
    same = all(getattr(wanted, name) == getattr(key, name) for name in _SAME_EXACTLY)
    return same and wanted.sequence <= key.sequence


def differences(wanted: Key, key: Key) -> list[str]:
    """In what a preset of `key` differs from what is `wanted`, in words."""
    words = {"model_id": "model", "hw_id": "hardware", "world_size": "ranks", "shards": "ranks that share each weight"}
    found = [
        f"{words.get(name, name)} {getattr(key, name)} instead of {getattr(wanted, name)}"
        for name in _SAME_EXACTLY
        if getattr(wanted, name) != getattr(key, name)
    ]
    if wanted.sequence > key.sequence:
        found.append(f"sequence up to {key.sequence} instead of {wanted.sequence}")
    return found


def distance(query: Query, preset: Preset) -> float | None:
    """How far the ratios of a preset are from those asked for; None where it must not serve at all."""
    if query.ratios is None or preset.ratios is None:
        return None
    if any(getattr(query.key, name) != getattr(preset.key, name) for name in _SAME_ALWAYS):
        return None
    if (query.rig is None) != (preset.hardware.rig is None):  # what an emulation showed proves nothing for a machine
        return None
    return math.hypot(*(_factor(query.ratios, preset.ratios, field.name) for field in fields(Ratios)))


def knobs_here(preset: Preset, usable_cores: float | None) -> tuple[dict[str, Any], str | None]:
    """A preset's knobs on a machine with so many usable cores, and a sentence if any was recomputed."""
    knobs = dict(preset.knobs)
    threads = knobs.get("host_threads")
    if threads is None or usable_cores == preset.usable_cores:
        return knobs, None
    if usable_cores is None or preset.usable_cores is None:
        knobs["host_threads"] = None
        return knobs, "host_threads is left to the runtime, since the usable cores are not known"
    scaled = round(threads * usable_cores / preset.usable_cores)
    knobs["host_threads"] = max(1, min(_MAX_THREADS, scaled, max(1, int(usable_cores))))
    return knobs, (
        f"host_threads is {knobs['host_threads']} instead of {threads}, since there are {usable_cores:g} usable cores "
        f"instead of {preset.usable_cores:g}"
    )


def _factor(one: Ratios, other: Ratios, name: str) -> float:
    a, b = getattr(one, name), getattr(other, name)
    if a == b:
        return 0.0
    return abs(math.log(a / b)) if min(a, b) > 0 else math.inf


def _exact(query: Query, preset: Preset) -> Match:
    knobs, about_cores = knobs_here(preset, query.usable_cores)
    reason = f"preset {preset.name} was measured for this model on this hardware"
    if preset.imported:
        reason = f"preset {preset.name} is for this model and hardware, but was imported and not measured here"
    return _match(preset, knobs, 0.0, preset.imported, reason, about_cores)


def _nearest(query: Query, preset: Preset, far: float) -> Match:
    knobs, about_cores = knobs_here(preset, query.usable_cores)
    assert query.ratios is not None
    assert preset.ratios is not None
    reason = (
        f"preset {preset.name} is the nearest, not the same ({'; '.join(differences(query.key, preset.key))}): "
        f"host over compute {preset.ratios.host_over_compute:.3g} against {query.ratios.host_over_compute:.3g}, "
        f"link over compute {preset.ratios.link_over_compute:.3g} against {query.ratios.link_over_compute:.3g}, "
        f"distance {far:.2f}"
    )
    return _match(preset, knobs, far, True, reason, about_cores)


def _match(
    preset: Preset, knobs: Mapping[str, Any], far: float, provisional: bool, reason: str, more: str | None
) -> Match:
    told = reason if more is None else f"{reason}; {more}"
    return Match(preset=preset, knobs=knobs, distance=far, provisional=provisional, reason=told)
