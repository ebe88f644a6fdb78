"""Reasons of a search's decisions, each a sentence with its figures."""

from __future__ import annotations

from zftune.tuner.scores import LEAST_GAIN, ExplorationCost, Gain
from zftune.tuner.states import Outcome, Trial


def start(trial: Trial, step_ms: float) -> str:
    """The incumbent was measured."""
    return f"The search begins from {trial.setting}, which takes {step_ms:.1f} ms a step."


def resumed(measurements: int) -> str:
    """Training was ended and goes on."""
    return f"Resumed after {measurements} measurements: the incumbent is measured once more."


def other_times(found: Gain) -> str:
    """The incumbent does not take what it took before."""
    how = "shorter" if found.share > 0 else "longer"
    return f"Steps are {100 * abs(found.share):.1f}% {how} than before: the search begins again."


def other_tokens(tokens: int, before: int) -> str:
    """The user says that steps are of another size."""
    return f"A step has {tokens} tokens now instead of {before}: the search begins again."


def made_room(trial: Trial, tight: Trial, outcome: Outcome, limit_bytes: int | None) -> str:
    """The peak has come too near to the end of the memory."""
    return (
        f"Adopted for GPU memory: {_what(trial, tight)}: the peak was {_mib(outcome.device_bytes)}, allowed are "
        f"{_mib(limit_bytes)}."
    )


def slower(trial: Trial, incumbent: Trial, seen: Gain) -> str:
    """A look was not promising."""
    how = f"is {-100 * seen.share:.1f}% slower" if seen.share < 0 else f"saves {100 * seen.share:.1f}%"
    more = "" if seen.share < 0 else f", less than the {100 * LEAST_GAIN:.0f}% that a change has to be worth"
    return f"Not adopted: {_what(trial, incumbent)} {how}{more}."


def compared(trial: Trial, incumbent: Trial, found: Gain, *, adopted: bool) -> str:
    """A comparison for speed."""
    what, needed = _what(trial, incumbent), f"{100 * found.needed:.1f}%"
    if adopted:
        return f"Adopted: {what} saves {found} of the step time, more than the {needed} that noise could explain."
    if found.holds:
        return f"Not adopted: {what} saves {found}, but step times drifted: it was not faster than both its neighbours."
    return f"Not adopted: {what} gains {found} against the incumbent before and after it, needed are {needed}."


def tied(trial: Trial, incumbent: Trial, found: Gain, *, adopted: bool) -> str:
    """A comparison for staleness and memory."""
    before, after = incumbent.setting.mean_staleness_steps, trial.setting.mean_staleness_steps
    why = f"a mean staleness of {after:.1f} steps instead of {before:.1f}" if after < before else "less memory"
    how = f"gains {found}" if found.share >= 0 else f"costs {Gain(-found.share, found.error)}"
    if adopted:
        return f"Adopted for {why}: {_what(trial, incumbent)} {how}, which is within {100 * LEAST_GAIN:.0f}%."
    return f"Not adopted for {why}: {_what(trial, incumbent)} {how}, not surely within {100 * LEAST_GAIN:.0f}%."


def failed(trial: Trial, outcome: Outcome) -> str:
    """A trial was aborted or crashed."""
    if outcome.status == "aborted":
        return f"Aborted: {trial.setting}: {outcome.reason}."
    return f"Never again: {trial.setting}: {outcome.reason}."


def incumbent_failed(trial: Trial, reason: str) -> str:
    """The incumbent itself could not be measured."""
    return f"The search ends: the incumbent, {trial.setting}, could not go on: {reason}."


def void(trial: Trial, challenger: Trial, times: int, reason: str) -> str:
    """Measurements did not count, one after the other; also those that a challenger was to be compared with."""
    why = f"{times} measurements of {trial.setting} did not count, the last because {reason}"
    if trial is challenger:
        return f"Given up: {why}."
    return f"Given up: {challenger.setting} could not be compared, since {why}."


def nothing_adopted(*, measured: bool, tried: int) -> str:
    """What may be said of the settings where none was adopted; without a full stop.

    Args:
        measured: whether anything was.
        tried: how many settings were measured, aborted or crashed, beside the one that the search began with.
    """
    if not measured:
        return "Nothing was measured, so that nothing is known of any setting"
    if tried == 0:
        return "No other setting was measured, so that nothing is known of them"
    if tried == 1:
        return "The one other setting that was tried was not adopted"
    return f"None of the {tried} other settings that were tried was adopted"


def patience(misses: int) -> str:
    """Nothing better was found for a while."""
    return f"The last {misses} settings were not adopted."


def enough(measurements: int) -> str:
    """As many measurements as there may be."""
    return f"{measurements} measurements were made, another setting and its comparison would be too many."


def enough_runs(runs: int) -> str:
    """The command was run as often as it may be."""
    return f"The command was run {runs} times, more are not allowed."


def spent(cost: ExplorationCost) -> str:
    """Exploring has cost what it may."""
    return (
        f"Exploring has cost {cost.spent_s:.1f} s more than the incumbent would have taken, allowed are "
        f"{cost.allowed_s:.1f} s ({100 * cost.share:g}% of the time so far and a grant)."
    )


def _mib(size: int | None) -> str:
    return f"{(size or 0) / 2**20:.1f} MiB"


def _what(trial: Trial, incumbent: Trial) -> str:
    return trial.setting.differences(incumbent.setting) or str(trial.setting)
