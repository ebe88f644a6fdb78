"""Optuna's part of a search: which setting to look at next, given all that is known.

A study is made anew for every question, from our own trials. So nothing has to be kept beside them, and the same trials
with the same seed give the same answer.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from zftune.tuner.settings import Setting
from zftune.tuner.space import Forecast, Space
from zftune.tuner.states import Sampler

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

MOST_REJECTIONS = 20
"""Candidates that the planner rejects, in one question."""
_MOST_REPEATS = 3
"""Of a setting that was tried: then the sampler has nothing to say but that setting, and each time takes as long."""
_CONSTRAINT = "planner"
_POOL = 48


@dataclass(frozen=True, slots=True)
class Told:
    """What is known of a setting."""

    setting: Setting
    value: float
    """Logarithm of its time per token, measured or predicted."""
    constraint: float
    """Above 0: it is not allowed."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the planner says of a candidate."""

    told: Told
    taken: bool
    """Whether it was tried before."""
    reason: str = ""
    """Why it is not allowed."""
    forecast: Forecast | None = None
    """What it follows from."""

    @property
    def rejected(self) -> bool:
        """Whether it must not run."""
        return self.told.constraint > 0


@dataclass(frozen=True, slots=True)
class Proposal:
    """An answer."""

    chosen: Judgement | None
    """None: nothing is left that is allowed and was not tried."""
    rejected: tuple[Judgement, ...]
    """Candidates on the way to it."""


Judge = Callable[[Setting], Judgement]


class Proposer(Protocol):
    """`propose`, here or elsewhere."""

    def __call__(self, space: Space, told: Sequence[Told], judge: Judge, *, sampler: Sampler, seed: int) -> Proposal:
        """The setting to look at next."""


def propose(space: Space, told: Sequence[Told], judge: Judge, *, sampler: Sampler, seed: int) -> Proposal:
    """The setting to look at next.

    Args:
        space: of the search.
        told: what is known.
        judge: the planner.
        sampler: Optuna's; "random" looks at nothing.
        seed: of this question.
    """
    rejected: list[Judgement] = []
    found = _asked(space, told, judge, sampler, seed, rejected) if space.dimensions and sampler != "none" else None
    return Proposal(found or (None if sampler == "none" else likely(space, judge, seed)), tuple(rejected))


def _asked(
    space: Space, told: Sequence[Told], judge: Judge, sampler: Sampler, seed: int, rejected: list[Judgement]
) -> Judgement | None:
    import optuna
    from optuna.distributions import IntDistribution

    with _quiet():
        study = optuna.create_study(direction="minimize", sampler=_sampler(sampler, seed))
        choices: dict[str, optuna.distributions.BaseDistribution] = {
            one.name: IntDistribution(0, len(one.choices) - 1) for one in space.dimensions
        }
        study.add_trials(
            optuna.trial.create_trial(
                value=one.value,
                params=space.indices(one.setting),
                distributions=choices,
                constraints={_CONSTRAINT: one.constraint},
            )
            for one in told
        )
        repeats = Counter[Setting]()
        for _ in range(MOST_REJECTIONS):
            trial = study.ask(choices)
            judged = judge(space.setting(trial.params))
            if not judged.rejected and not judged.taken:
                return judged
            repeats[judged.told.setting] += judged.taken
            if repeats[judged.told.setting] > _MOST_REPEATS:
                return None
            trial.set_constraint(_CONSTRAINT, judged.told.constraint)
            study.tell(trial, judged.told.value)
            if judged.rejected and not judged.taken and judged not in rejected:
                rejected.append(judged)
    return None


def likely(space: Space, judge: Judge, seed: int) -> Judgement | None:
    """The best by prediction of some allowed settings that were not tried.

    Args:
        space: of the search.
        judge: the planner.
        seed: of this question.
    """
    allowed = list(space.settings())
    order = np.random.default_rng(seed).permutation(len(allowed))
    pool: list[Judgement] = []
    for index in order:
        judged = judge(allowed[index])
        if not judged.rejected and not judged.taken:
            pool.append(judged)
        if len(pool) == _POOL:
            break
    return min(pool, key=lambda one: one.told.value, default=None)


def _sampler(name: Sampler, seed: int) -> BaseSampler:
    import optuna

    if name == "tpe":
        return optuna.samplers.TPESampler(n_startup_trials=0, seed=seed)
    if name == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    return optuna.samplers.GPSampler(n_startup_trials=0, seed=seed)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Optuna's log lines and its warnings about new features off the user's screen."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        optuna.logging.set_verbosity(before)
