"""The search as an Optuna study: ask and tell, with a sampler and a pruner of our own.

Imported where a search begins, since Optuna takes half a second to load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial
from optuna.trial import TrialState as OptunaState

from zftune.store.types import TrialState
from zftune.tuner.space import Setting, Space
from zftune.tuner.states import Sampler, Trial

MOST_ASKED = 20
"""Proposals that may not run, in one question."""
Params = dict[str, int]
"""Which choice of each dimension."""
_CONSTRAINT = "allowed"
_OWN: tuple[Sampler, ...] = ("belief", "none")


class BeliefSampler(BaseSampler):
    """Proposes what `best` returns: the largest expected improvement by what is believed of all settings."""

    def __init__(self, space: Space, best: Callable[[], Setting | None]) -> None:
        self._space, self._best = space, best
        self.chosen: Setting | None = None
        """The last proposal itself, which may lie between the choices of the study's parameters."""

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return distributions(self._space)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        self.chosen = self._best()
        return {} if self.chosen is None else dict(self._space.indices(self.chosen))

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._space.indices(self._space.base)[param_name]


class RacePruner(BasePruner):
    """Ends the visit of a setting once another one is worth more; `outdone` decides."""

    def __init__(self, outdone: Callable[[], bool]) -> None:
        self._outdone = outdone

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        return self._outdone()


class SearchStudy:
    """One search's study, in memory; for `best` and `outdone` see its sampler and its pruner."""

    def __init__(
        self,
        space: Space,
        sampler: Sampler,
        seed: int,
        *,
        best: Callable[[], Setting | None],
        outdone: Callable[[], bool],
        may_run: Callable[[Setting], bool],
    ) -> None:
        self._space, self._name, self._seed, self._may_run = space, sampler, seed, may_run
        self._belief = BeliefSampler(space, best)
        before = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.ERROR)  # its line about a new study is not for the user
        try:
            self.study = optuna.create_study(direction="minimize", pruner=RacePruner(outdone), sampler=self._belief)
        finally:
            optuna.logging.set_verbosity(before)
        self._open: optuna.Trial | None = None
        self._units = 0  # of the open visit

    def propose(
        self, number: int, incumbent: Setting, value: Callable[[Setting], float], rejected: list[tuple[Setting, Params]]
    ) -> tuple[Setting, Params] | None:
        """The setting to visit next, whose visit is open then; None: nothing is left.

        `number` counts the search's trials before; `rejected` takes proposals that may not run, whose `value` is by
        prediction.
        """
        self._units = 0
        for question in range(MOST_ASKED if self._space.dimensions else 0):
            self.study.sampler = self._sampler(number + question)
            trial = self.study.ask(distributions(self._space))
            setting = self._belief.chosen if self._name in _OWN else self._space.setting(trial.params)
            if setting is None or setting == incumbent:
                self.study.tell(trial, state=OptunaState.FAIL)
            elif self._may_run(setting):
                self._open = trial
                return setting, dict(trial.params)
            else:
                trial.set_constraint(_CONSTRAINT, 1.0)
                self.study.tell(trial, value(setting))
                rejected.append((setting, dict(trial.params)))
            if setting is None:
                return None
        return None

    def visit(self, params: Params, gains: Sequence[float] = ()) -> None:
        """Open a visit that was proposed elsewhere, or has begun before with these gains."""
        self.study.enqueue_trial(dict(params))
        self._open, self._units = self.study.ask(distributions(self._space)), 0
        for gain in gains:
            self.report(gain)

    def report(self, gain: float) -> bool:
        """Take a unit's gain; whether the pruner ends the visit."""
        assert self._open is not None
        self._open.report(gain, self._units)
        self._units += 1
        return self._open.should_prune()

    def end(self, value: float | None, setting: Setting, *, adopted: bool = False) -> None:
        """Close the visit; `value` is the logarithm of its time relative to the start's, None: it is not known."""
        trial, self._open = self._open, None
        if trial is not None:
            trial.set_user_attr("knobs", setting.knobs())
            trial.set_user_attr("adopted", adopted)
            trial.set_constraint(_CONSTRAINT, 0.0)
            self.study.tell(trial, value, OptunaState.FAIL if value is None else None)

    def refill(self, trials: Sequence[Trial]) -> None:
        for one in trials:
            if one.value is not None:
                frozen = optuna.trial.create_trial(
                    state=OptunaState.COMPLETE,
                    value=one.value,
                    params=dict(one.params or self._space.indices(one.setting)),
                    distributions=distributions(self._space),
                    intermediate_values=dict(enumerate(one.gains)),
                    user_attrs={"knobs": one.setting.knobs()},
                    constraints={_CONSTRAINT: 1.0 if one.state is TrialState.REJECTED else 0.0},
                )
                self.study.add_trial(frozen)

    def _sampler(self, number: int) -> BaseSampler:
        """Made anew for each question, so that what it proposes follows from the run's seed and the trial's number."""
        seed = int(np.random.SeedSequence([self._seed, number]).generate_state(1)[0])
        if self._name in _OWN:
            return self._belief
        if self._name == "random":
            return RandomSampler(seed=seed)
        return (TPESampler if self._name == "tpe" else GPSampler)(n_startup_trials=0, seed=seed)


def distributions(space: Space) -> dict[str, BaseDistribution]:
    """The parameters of a space: which choice of each dimension."""
    return {one.name: IntDistribution(0, len(one.choices) - 1) for one in space.dimensions}
