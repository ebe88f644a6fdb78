"""The store's searches as an Optuna storage, which optuna-dashboard and Optuna's own plots open.

Written from our tables, which are the truth; nothing is ever read back.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zftune.errors import BadInputError, ZftuneError
from zftune.store.types import Key, Measurement, RunRecord, TrialRecord, TrialState

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

    from zftune.store.store import Store


_OPTUNA_STATES = {TrialState.PLANNED: "WAITING", TrialState.IN_FLIGHT: "RUNNING"}
"""The others are complete where they have a value, and failed else."""


def export_studies(store: Store, path: str, *, key: Key | None = None) -> int:
    """Write a study for each run (of `key`, if given) to a new SQLite file, and return how many there are.

    Parameters are the knobs that vary, the value is the median step time, ms. Raises BadInputError if the file exists,
    ZftuneError if it cannot be written, or the store cannot be read.
    """
    target = Path(path)
    if target.exists():
        raise BadInputError(f"--optuna '{path}': exists already; give a new file")
    wanted = None if key is None else (key.model_id, key.hw_id)
    runs = [run for run in store.runs() if wanted in (None, (run.key.model_id, run.key.hw_id))]
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        _write(store, partial, runs)
        partial.replace(target)
    except OSError as error:
        raise ZftuneError(f"--optuna '{path}': cannot be written ({error.strerror})") from error
    finally:
        partial.unlink(missing_ok=True)
    return len(runs)


def _write(store: Store, path: Path, runs: Iterable[RunRecord]) -> None:
    import optuna
    from optuna.exceptions import StorageInternalError

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = None
    try:
        storage = optuna.storages.RDBStorage(f"sqlite:///{path.absolute()}")
        for run in runs:
            key, trials = run.key, store.trials(run.run_id)
            name = f"{key.model_id[:8]}-{key.hw_id[:8]}-{key.quality}-{run.run_id[:8]}"
            study = optuna.create_study(storage=storage, study_name=name, direction="minimize")
            about = {"value": "step_ms", "run_id": run.run_id, "state": run.state.value}
            for attribute, value in {**about, "model_id": key.model_id, "hw_id": key.hw_id}.items():
                study.set_user_attr(attribute, value)
            kinds = distributions([trial.knobs for trial in trials])
            study.add_trials(_frozen(trial, store.measurements(trial.trial_id), kinds) for trial in trials)
    except StorageInternalError as error:
        raise ZftuneError(f"--optuna: cannot be written ({str(error).splitlines()[0][:200]})") from error
    finally:
        optuna.logging.set_verbosity(before)
        if storage is not None:
            storage.remove_session()
            storage.engine.dispose()


def distributions(settings: Sequence[Mapping[str, Any]]) -> dict[str, BaseDistribution]:
    """Distributions of the knobs that vary, over the settings tried."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    found: dict[str, BaseDistribution] = {}
    for name in dict.fromkeys(name for setting in settings for name in setting):
        values: list[Any] = list(dict.fromkeys(setting.get(name) for setting in settings))
        kinds = {type(value) for value in values}
        if len(values) > 1 and kinds <= {int, float}:
            numbers = IntDistribution if kinds == {int} else FloatDistribution
            found[name] = numbers(min(values), max(values))
        elif len(values) > 1:
            found[name] = CategoricalDistribution(values)
    return found


def _frozen(
    trial: TrialRecord, measurements: Sequence[Measurement], distributions: Mapping[str, BaseDistribution]
) -> FrozenTrial:
    from optuna.trial import TrialState as OptunaState
    from optuna.trial import create_trial

    value, counted = None, [one.step_ms for one in measurements if one.void_reason is None]
    if trial.state is TrialState.REJECTED:
        value = trial.predicted_step_ms
    elif trial.state is TrialState.MEASURED and counted:
        value = statistics.median(counted)
    state = OptunaState[_OPTUNA_STATES.get(trial.state, "FAIL" if value is None else "COMPLETE")]
    frozen = create_trial(
        state=state,
        value=value,
        params={name: trial.knobs.get(name) for name in distributions},
        distributions=dict(distributions),
        user_attrs={"state": trial.state.value, "source": trial.source, "reason": trial.reason, "number": trial.number},
        constraints=None if trial.constraint is None else {"planner": trial.constraint},
    )
    frozen.datetime_start = datetime.fromtimestamp(trial.created_unix_s)
    if state.is_finished():
        frozen.datetime_complete = datetime.fromtimestamp(trial.ended_unix_s or trial.created_unix_s)
    return frozen
