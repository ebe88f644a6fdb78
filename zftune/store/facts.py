"""What a store knows of a run beside its rows: its model, its machine, and whether it goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zftune.store.rows import hardware_of, model_of
from zftune.store.tables import HardwareRow, ModelRow
from zftune.store.types import Hardware, Key, Model, RunRecord, RunState

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from zftune.store.store import Store


def facts_of(store: Store, key: Key) -> tuple[Model, Hardware]:
    """The model and the machine of a key; only their ids where nothing else is known.

    Raises:
        StoreError: the store could not be read.
    """

    def work(session: Session) -> tuple[Model, Hardware]:
        model, hardware = session.get(ModelRow, key.model_id), session.get(HardwareRow, key.hw_id)
        return (
            Model(model_id=key.model_id) if model is None else model_of(model),
            Hardware(hw_id=key.hw_id) if hardware is None else hardware_of(hardware),
        )

    return store._database.read(work)


def goes_on(store: Store, run: RunRecord, now: float) -> bool:
    """Whether the process of a run lives; nothing is closed where it does not.

    Args:
        store: of the run.
        run: as it was read.
        now: wall clock, seconds.
    """
    if run.state is not RunState.RUNNING:
        return False
    lives = store._living.lives(run.run_id)
    return run.lease_until_unix_s >= now if lives is None else lives
