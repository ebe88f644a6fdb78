"""The presets of a store, and how one that was proven elsewhere is looked up."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from zftune.store.opening import Database
from zftune.store.preset_file import check_preset, model_name
from zftune.store.tables import Base, HardwareRow, ModelRow, PresetRow, preset_of, preset_row
from zftune.store.types import Hardware, Key, Match, Model, Preset, PresetState, Query, Ratios, Withdrawal

MAX_DISTANCE = math.log(2.0)
"""Of the ratios: as when one of them differs by a factor of 2."""

_SAME_EXACTLY = tuple(field.name for field in fields(Key) if field.name != "sequence")
_SAME_ALWAYS = ("backend", "stage", "quality")  # another of these is another algorithm, or another promise
_MAX_THREADS = 4096


def find(query: Query, presets: Iterable[Preset]) -> Match | None:
    """The preset to begin with, or None; withdrawn ones are skipped."""
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
    same = all(getattr(wanted, name) == getattr(key, name) for name in _compared(_SAME_EXACTLY, wanted))
    return same and wanted.sequence <= key.sequence


def _compared(names: tuple[str, ...], wanted: Key) -> tuple[str, ...]:
    """What has to agree. With zenflow DeepSpeed's stage decides no more than how ranks share weights: see `shards`."""
    return tuple(name for name in names if name != "stage" or wanted.backend != "zenflow")


def differences(wanted: Key, key: Key) -> list[str]:
    """In what a preset of `key` differs from what is `wanted`, in words."""
    words = {"model_id": "model", "hw_id": "hardware", "world_size": "ranks", "shards": "ranks that share each weight"}
    found = [
        f"{words.get(name, name)} {_known(name, key)} instead of {_known(name, wanted)}"
        for name in _compared(_SAME_EXACTLY, wanted)
        if getattr(wanted, name) != getattr(key, name)
    ]
    if wanted.sequence > key.sequence:
        found.append(f"sequence up to {_known('sequence', key)} instead of {wanted.sequence}")
    return found


def _known(name: str, key: Key) -> Any:
    value = getattr(key, name)
    return "unknown" if value == 0 and name in ("micro_batch", "sequence") else value


def distance(query: Query, preset: Preset) -> float | None:
    """How far the ratios of a preset are from those asked for; None where it must not serve at all."""
    if query.ratios is None or preset.ratios is None:
        return None
    if any(getattr(query.key, name) != getattr(preset.key, name) for name in _compared(_SAME_ALWAYS, query.key)):
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


LOST_COMPARISONS = 2
"""After so many a preset is withdrawn."""

_MAX_NAME = 64


class Presets:
    """The part of a store that keeps presets."""

    _database: Database
    _clock: Callable[[], float]

    def save_preset(self, preset: Preset) -> Preset:
        """Keep a preset: a taken name gets a number; "" makes one from the model, the machine and the quality. Returns
        it as it was kept: with its name and the time. Raises StoreError: it could not be kept, or says what no preset
        may say.
        """
        wanted = preset.name or _name_for(preset)
        check_preset(replace(preset, name=wanted))

        def work(session: Session) -> Preset:
            save_facts(session, preset.model, preset.hardware, imported=preset.imported)
            taken = set(session.scalars(select(PresetRow.name)))
            kept = replace(preset, name=_free(wanted, taken), created_unix_s=self._clock())
            session.add(preset_row(kept))
            session.flush()
            return kept

        return self._database.write(work)

    def find_preset(self, query: Query) -> Match | None:
        """The preset to begin with: of the same key, else the nearest by measured ratios, else None."""
        return find(query, self.presets())

    def presets(self) -> list[Preset]:
        """All, withdrawn ones too, the newest first."""

        def work(session: Session) -> list[Preset]:
            rows = session.execute(
                select(PresetRow, ModelRow, HardwareRow)
                .join(ModelRow, ModelRow.model_id == PresetRow.model_id)
                .join(HardwareRow, HardwareRow.hw_id == PresetRow.hw_id)
                .order_by(PresetRow.created_unix_s.desc(), PresetRow.preset_id.desc())
            )
            return [preset_of(*row) for row in rows]

        return self._database.read(work)

    def preset(self, name: str) -> Preset | None:
        """The one of that name."""
        return next((one for one in self.presets() if one.name == name), None)

    def remove_preset(self, name: str) -> bool:
        """Forget a preset; whether there was one."""

        def work(session: Session) -> bool:
            found = session.scalar(select(PresetRow.preset_id).where(PresetRow.name == name))
            session.execute(delete(PresetRow).where(PresetRow.name == name))
            return found is not None

        return self._database.write(work)

    def record_comparison(self, name: str, *, won: bool) -> PresetState:
        """Record a later comparison of a preset with another setting. After two losses it is withdrawn. Returns its
        state from now on; withdrawn where there is no such preset any more.
        """

        def work(session: Session) -> PresetState:
            row = session.scalar(select(PresetRow).where(PresetRow.name == name).with_for_update())
            if row is None:
                return PresetState.WITHDRAWN
            row.lost_comparisons += not won
            if row.lost_comparisons >= LOST_COMPARISONS:
                row.state = PresetState.WITHDRAWN
            return row.state

        return self._database.write(work)

    def withdraw_preset(self, name: str, why: Withdrawal) -> None:
        """Withdraw a preset; one that is missing or was withdrawn before stays as it is."""

        def work(session: Session) -> None:
            row = session.scalar(select(PresetRow).where(PresetRow.name == name).with_for_update())
            if row is not None and row.state is PresetState.ACTIVE:
                row.state, row.withdrawn = PresetState.WITHDRAWN, asdict(why)

        self._database.write(work)


def save_facts(session: Session, model: Model, hardware: Hardware, *, imported: bool) -> None:
    """Keep what is known of a model and a machine. What was found out here is not replaced by what a file says."""
    model = replace(model, name=model_name(model.name))
    _save(session, ModelRow, session.get(ModelRow, model.model_id), asdict(model), imported)
    _save(session, HardwareRow, session.get(HardwareRow, hardware.hw_id), asdict(hardware), imported)
    session.flush()


def _save(
    session: Session, table: type[Base], row: ModelRow | HardwareRow | None, facts: dict[str, Any], imported: bool
) -> None:
    if row is None:
        session.add(table(**facts, imported=imported))
    elif not imported:
        for name, value in facts.items():
            if value is not None or row.imported:
                setattr(row, name, value)
        row.imported = False


def _name_for(preset: Preset) -> str:
    parts = (model_name(preset.model.name) or preset.key.model_id[:8], _machine(preset.hardware), preset.key.quality)
    longest = (16, 14, 9)  # so that a name fits into a table of 80 columns
    cut = zip((re.sub(r"[^a-z0-9]+", "-", part.lower()).strip("-") for part in parts), longest, strict=True)
    words = (word[:length].strip("-") for word, length in cut)
    return "-".join(word for word in words if word)


def _machine(hardware: Hardware) -> str:
    return hardware.rig or re.sub(r"^nvidia\s+", "", hardware.gpu or hardware.hw_id[:8], flags=re.IGNORECASE)


def _free(name: str, taken: set[str]) -> str:
    """The name, with a number if it is taken."""
    number, free = 1, name
    while free in taken:
        number += 1
        suffix = f"-{number}"
        free = name[: _MAX_NAME - len(suffix)] + suffix
    return free
