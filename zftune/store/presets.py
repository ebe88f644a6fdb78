"""The presets of a store."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from zftune.store.document import check_preset, model_name
from zftune.store.engine import Database
from zftune.store.lookup import find
from zftune.store.rows import preset_of, preset_row
from zftune.store.tables import Base, HardwareRow, ModelRow, PresetRow
from zftune.store.types import Hardware, Match, Model, Preset, PresetState, Query

LOST_COMPARISONS = 2
"""After so many a preset is withdrawn."""

_MAX_NAME = 64


class Presets:
    """The part of a store that keeps presets."""

    _database: Database
    _clock: Callable[[], float]

    def save_preset(self, preset: Preset) -> Preset:
        """Keep a preset.

        Args:
            preset: a name that is taken gets a number; "" makes one from the model, the machine and the quality.

        Returns:
            It as it was kept: with its name and the time.

        Raises:
            StoreError: it could not be kept, or says what no preset may say.
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
        """The preset to begin with: of the same key, else the nearest by measured ratios, else None (ask the planner).

        Raises:
            StoreError: the store could not be read.
        """
        return find(query, self.presets())

    def presets(self) -> list[Preset]:
        """All, withdrawn ones too, the newest first.

        Raises:
            StoreError: the store could not be read.
        """

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
        """The one of that name.

        Raises:
            StoreError: the store could not be read.
        """
        return next((one for one in self.presets() if one.name == name), None)

    def remove_preset(self, name: str) -> bool:
        """Forget a preset; whether there was one.

        Raises:
            StoreError: it could not be removed.
        """

        def work(session: Session) -> bool:
            found = session.scalar(select(PresetRow.preset_id).where(PresetRow.name == name))
            session.execute(delete(PresetRow).where(PresetRow.name == name))
            return found is not None

        return self._database.write(work)

    def record_comparison(self, name: str, *, won: bool) -> PresetState:
        """Write down that a preset was compared with another setting later. After two losses it is withdrawn.

        Args:
            name: of the preset.
            won: whether it was at least as fast.

        Returns:
            Its state from now on; withdrawn where there is no such preset any more.

        Raises:
            StoreError: it could not be written.
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


def near_names(name: str, names: Sequence[str]) -> list[str]:
    """At most three names that may have been meant; all where there are no more than three."""
    return difflib.get_close_matches(name, names, n=3, cutoff=0.4) or (list(names) if len(names) <= 3 else [])


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
    words = (re.sub(r"[^a-z0-9]+", "-", part.lower()).strip("-")[:24].strip("-") for part in parts)
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
