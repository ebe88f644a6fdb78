"""How much each knob matters for the step time, by what a search was told."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from zftune.tuner.optuna_export import distributions

LEAST = 4
"""Settings whose step time is known, below which nothing can be said."""
_BEST = 5  # settings at least that are compared with all


def importances(settings: Sequence[Mapping[str, Any]], step_ms: Sequence[float]) -> dict[str, float] | None:
    """PED-ANOVA: how much the fastest settings differ from all that are known, by knob.

    Args:
        settings: knobs.
        step_ms: of each, measured or predicted.

    Returns:
        Shares of 1, the largest first, of the knobs that vary; None: too few settings, or none of them matters.
    """
    kinds = distributions(settings)
    if len(settings) < LEAST or not kinds:
        return None
    import optuna
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
    from optuna.trial import create_trial

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.create_study(direction="minimize")
        for knobs, value in zip(settings, step_ms, strict=True):
            params = {name: knobs.get(name) for name in kinds}
            study.add_trial(create_trial(value=value, params=params, distributions=dict(kinds)))
        evaluator = PedAnovaImportanceEvaluator(target_quantile=min(0.5, max(0.1, _BEST / len(settings))))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that so few trials say little is for the reader to know
            found = get_param_importances(study, evaluator=evaluator)
    finally:
        optuna.logging.set_verbosity(before)
    total = sum(found.values())
    return {name: share / total for name, share in found.items()} if total > 0 else None
