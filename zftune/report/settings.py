"""What two profiles were made of and with: knobs, workload, machine, versions, and where these differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zftune.report.values import Document

_FIELDS = ("knobs", "workload", "command", "device", "rig", "hardware", "software", "fingerprint", "seed", "steps")
_OF_THE_RUN = (
    "rig.segments",
    "rig.late_segments",
    "rig.attempts",
    "rig.real_work_s",
    "rig.slack",
    "command.exit_code",
    "command.stopped",
)
_FEW_STEPS = 8


@dataclass(frozen=True, slots=True)
class Setting:
    """Something that differs between the profiles, in words."""

    name: str
    """Dotted, as in the document."""
    a: str
    b: str


def changed_settings(a: Document, b: Document) -> list[Setting]:
    """Everything that differs between two profiles but for their figures."""
    sides = [dict(_leaves(document)) for document in (a, b)]
    names = dict.fromkeys([*sides[0], *sides[1]])
    pairs = ((name, sides[0].get(name, "none"), sides[1].get(name, "none")) for name in names)
    return [Setting(name, first, second) for name, first, second in pairs if first != second]


def warnings_about(a: Document, b: Document, settings: Sequence[Setting]) -> list[str]:
    """Why the figures of two profiles may not be comparable, in sentences."""
    return [*_different(settings), *_emulated(a, b), *_few(a, b)]


def _different(settings: Sequence[Setting]) -> Iterator[str]:
    workload = [one for one in settings if one.name.startswith("workload.") or one.name == "fingerprint.model_id"]
    if workload:
        yield f"The workloads differ ({_listed(workload)}): their times cannot be compared step by step."
    machine = [one for one in settings if one.name.startswith("hardware.") or one.name == "device"]
    if machine or any(one.name == "fingerprint.hw_id" for one in settings):
        yield f"The machines differ ({_listed(machine)})." if machine else "The machines differ."
    ranks = [one for one in settings if one.name == "command.ranks"]
    if ranks:
        yield f"The numbers of ranks differ ({_listed(ranks)})."


def _emulated(a: Document, b: Document) -> Iterator[str]:
    rigs = [document["rig"] and document["rig"]["name"] for document in (a, b)]
    if (rigs[0] is None) != (rigs[1] is None):
        yield f"Only {'A' if rigs[1] is None else 'B'} was measured on an emulated accelerator."
    elif rigs[0] != rigs[1]:
        yield f"The rigs differ ({rigs[0]} → {rigs[1]})."


def _few(a: Document, b: Document) -> Iterator[str]:
    for name, document in (("A", a), ("B", b)):
        steps = document["steps"]["measured"]
        if steps < _FEW_STEPS:
            yield f"{name} has {steps} measured steps: its noise is a guess below {_FEW_STEPS}."


def _listed(settings: Sequence[Setting]) -> str:
    shown = ", ".join(f"{one.name.rpartition('.')[2]} {one.a} → {one.b}" for one in settings[:3])
    return shown if len(settings) <= 3 else f"{shown} and {len(settings) - 3} more"


def _leaves(document: Document) -> Iterator[tuple[str, str]]:
    for field in _FIELDS:
        for name, value in _flat(document[field], field):
            if ".missing" not in name and not name.startswith(_OF_THE_RUN):
                yield name, value


def _flat(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from _flat(child, f"{path}.{key}")
    elif isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
        for index, child in enumerate(value):
            yield from _flat(child, f"{path}.{index}")
    elif isinstance(value, (list, tuple)):
        yield path, ", ".join(str(item) for item in value) or "none"
    elif not (value is None and path in _FIELDS):  # of a profile without knobs every knob is missing
        yield path, _word(value)


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "none"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
