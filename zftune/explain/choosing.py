"""Which search is meant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from zftune.errors import BadInputError
from zftune.store.document import escaped
from zftune.store.presets import near_names
from zftune.store.types import RunRecord

if TYPE_CHECKING:
    from zftune.store.store import Store

LAST = "last"
_SHOWN = 8  # digits of an id
_MOST = 3


def chosen_run(store: Store, name: str) -> tuple[RunRecord, str | None]:
    """The run of an id or its beginning, or the newest one that measured something.

    Args:
        store: open.
        name: an id, a prefix of one run's alone, or "last".

    Returns:
        The run, and a sentence where it is not the newest one, although that was asked for.

    Raises:
        BadInputError: there is no such run, or there are several; names those that are near.
        StoreError: the store could not be read.
    """
    runs = store.runs()
    if not runs:
        raise BadInputError(f"RUN '{_cut(name)}': the store has no runs yet, `zftune tune` makes one")
    if name == LAST:
        return _last(store, runs)
    found = [run for run in runs if name and run.run_id.startswith(name)]
    if len(found) == 1:
        return found[0], None
    if found:
        raise BadInputError(f"RUN '{_cut(name)}': {len(found)} runs begin with that, allowed is one of {_ids(found)}")
    near = near_names(name[:_SHOWN], [run.run_id[:_SHOWN] for run in runs]) or [run.run_id[:_SHOWN] for run in runs]
    raise BadInputError(
        f"RUN '{_cut(name)}': is not in the store, allowed is an id, its beginning or 'last'; "
        f"near {'is' if len(near) == 1 else 'are'} {', '.join(near[:_MOST])}"
    )


def _last(store: Store, runs: Sequence[RunRecord]) -> tuple[RunRecord, str | None]:
    """The newest one of which there is something to be told; where there is none, the newest."""
    told = next((run for run in runs if _has_measured(store, run)), runs[0])
    before = runs.index(told)
    if before == 0:
        return told, None
    newer = f"run {_ids(runs[:1])}" if before == 1 else f"{before} runs"
    return told, f"This is the newest run with a measurement; {newer} after it measured nothing."


def _has_measured(store: Store, run: RunRecord) -> bool:
    return any(store.measurements(trial.trial_id) for trial in store.trials(run.run_id))


def _ids(runs: Sequence[RunRecord]) -> str:
    """Beginnings that tell the runs apart."""
    length = next(n for n in range(_SHOWN, 65) if len({run.run_id[:n] for run in runs}) == len(runs))
    ids = [run.run_id[:length] for run in runs]
    return ", ".join(ids[:_MOST]) + ("" if len(ids) <= _MOST else f" and {len(ids) - _MOST} more")


def _cut(name: str) -> str:
    return escaped(name)[:80]
