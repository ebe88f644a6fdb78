"""Reasons of a search's decisions, each a sentence with its figures, and a tuner's last words."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from zftune.store.account import Count, saved_with_error
from zftune.store.types import TrialState
from zftune.tuner.scores import ERRORS, LEAST_GAIN, ExplorationCost, Gain, steps_of
from zftune.tuner.space import Setting
from zftune.tuner.states import REFERENCES, Outcome, Trial

if TYPE_CHECKING:
    from zftune.tuner.search import Search
    from zftune.tuner.trials import TrialTable


_TRIED = (TrialState.MEASURED, TrialState.ABORTED, TrialState.CRASHED)
BARRED: Mapping[str, str] = {
    "crash": "it crashed before",
    "rollback": "somebody has rolled it back",
}
"""Why a setting is not tried again, by kind; without a full stop."""
LONG_WAIT_S = 5.0
"""That waiting for a core has to take to be worth a word."""
_TOO_NOISY = "took times that are too noisy to tell"


def commanded(kind: str, details: Mapping[str, Any]) -> str:
    """A command given by a person."""
    by = details["by"]
    if kind == "rollback":
        return f"Rolled back {by}: {details['barred']} is not tried again, the setting before it stays."
    return {
        "pause": f"Paused {by}: the best settings so far stay.",
        "unpause": f"Resumed {by}.",
        "stop": f"Stopped {by}.",
    }[kind]


def start(trial: Trial, step_ms: float) -> str:
    """The incumbent was measured."""
    return f"The search begins from {trial.setting}, which takes {step_ms:.1f} ms a step."


def resumed(measurements: int) -> str:
    """Training was ended and goes on."""
    made = f" after {measurements} measurement{'' if measurements == 1 else 's'}" if measurements else ""
    return f"Goes on{made}: the best settings so far are measured once more."


def back_to_best(changes: str) -> str:
    """A saved state was loaded whose knobs belong to a setting that another search tried."""
    return f"Back to the best settings so far ({changes}): the checkpoint was saved while others were tried."


def not_back(why: str) -> str:
    """The best settings so far could not be set; `why` has no full stop."""
    return f"The settings stay that were tried when the checkpoint was saved: the best so far are refused ({why})."


def other_rate(rate: float, before: float, *, is_another: bool = False) -> str:
    """A training continues the run of one with another learning rate; both are the highest of their schedules."""
    rates = f"The learning rate is {rate:.3g} from here on, it was {before:.3g}".replace("e-0", "e-")
    has = "the account of both is in this run" if is_another else "the account and losses of both are in this run"
    return f"{rates}: {has} (--fresh begins another one)."


def parted(steps: int) -> str:
    """The tuning ended, and the training did not."""
    taken = f"{steps} step{'' if steps == 1 else 's'}"
    return f"Tuning ended {taken} after the training's last start; it went on, and what it did then is not known."


def other_times(found: Gain) -> str:
    """The incumbent does not take what it took before."""
    how = "shorter" if found.share > 0 else "longer"
    return f"Steps are {100 * abs(found.share):.1f}% {how} than before: the search begins again."


def unsteady(restarts: int, *, waits: bool) -> str:
    """Times changed repeatedly: `restarts` of the search since it last ended."""
    then = "From here on it waits ever longer before it begins again" if waits else "It ends"
    return (
        f"Step times changed {restarts} times before the search came to its end. {then}; the best settings so far "
        "stay. Look for other programs on this machine, and for clocks or a link that change; where steps differ in "
        "size, say so with zftune.log_tokens."
    )


def waits(steps: int) -> str:
    """It does not begin again at once."""
    return f"Step times keep changing: the search begins again once they stay as they are for {steps} steps."


def other_tokens(tokens: int, before: int) -> str:
    """The user says that steps are of another size."""
    return f"A step has {tokens} tokens now instead of {before}: the search begins again."


def made_room(trial: Trial, tight: Trial, outcome: Outcome, limit_bytes: int | None) -> str:
    """The peak has come too near to the end of the memory."""
    return (
        f"Adopted for GPU memory: {_what(trial, tight)}: the peak was {_mib(outcome.device_bytes)} of at most "
        f"{_mib(limit_bytes)}."
    )


def made_earlier(trial: Trial, late: Trial, why: str) -> str:
    """The weights move too far for updates that come as late as they did."""
    return f"Adopted for the quality: {_what(trial, late)}: under {late.setting.differences(trial.setting)} {why}."


_WORTH = f"{100 * LEAST_GAIN:.0f}%"


def none_left(fixed_because: str) -> str:
    """Every allowed setting was tried; `fixed_because` "": settings that change the trajectory are free."""
    if fixed_because:
        return f"No setting is left to be tried: those that change the trajectory stay, since {fixed_because}."
    return "No setting is left to be tried that the quality allows."


def slower(trial: Trial, incumbent: Trial, seen: Gain) -> str:
    """A look was not promising."""
    error = f" +/- {200 * seen.error:.1f}%"
    if not seen.tells:
        how = f"{_TOO_NOISY} whether it is faster than the best so far"
    elif seen.share < 0:
        how = f"is {-100 * seen.share:.1f}{error} slower than the best so far when that was measured"
    else:
        worth = f"less than the {_WORTH} that a change has to be worth"
        how = f"saves {100 * seen.share:.1f}{error} of what the best so far took when that was measured, {worth}"
    return f"Not adopted after one look: {_what(trial, incumbent)} {how}."


def compared(trial: Trial, incumbent: Trial, found: Gain, *, adopted: bool, hidden: bool = False) -> str:
    """A comparison for speed; `hidden`: it would have won, had measurements of the same setting agreed."""
    what, needed = _what(trial, incumbent), f"{100 * found.needed:.1f}%"
    if adopted:
        noise = found.needed > LEAST_GAIN
        least = f"the {needed} that noise could explain" if noise else f"the {_WORTH} that a change has to be worth"
        return f"Adopted: {what} saves {found} of the step time, more than {least}."
    if found.holds:
        return (
            f"Not adopted: {what} saves {found}, but step times changed meanwhile: it was not faster than both "
            "measurements beside it."
        )
    if not found.tells:
        return f"Not adopted: {what} {_TOO_NOISY} whether it is faster than the best so far."
    if trial.source in REFERENCES:
        with_what = "the starting point" if trial.source == "start" else required(str(trial.setting))
        return f"Compared with {with_what} again: the best so far {_gains(found.reverse)}."
    why = ", since measurements of the same setting differ by more than their steps explain" if hidden else ""
    return (
        f"Not adopted: {what} {_gains(found)} against the best so far, measured before and after it; a change must "
        f"gain more than {needed}{why}."
    )


def other_best(
    incumbent: Setting,
    before: Setting,
    gain: Gain | None,
    had: Gain | None,
    *,
    is_first: bool,
    is_start: bool,
    was_before: bool,
) -> str:
    """The step when other settings are the best so far, without a full stop.

    `gain` and `had` are the gains of the new and the old best. `is_first`: nothing was known of the search, which began
    elsewhere than the training; `is_start`: the search began from the new best; `was_before`: it was the best earlier.
    """
    what, why = "adopts", ""
    if gain is not None and gain.share > 0:
        by_itself = f", which {'saved' if is_first else 'saves'} {gain} of the step time"
        why = by_itself if had is None else f"; all in all {gain} of the step time is saved"
    if is_first:
        what = "begins with" if is_start else "goes on with the best settings so far"
    elif is_start or was_before:
        what = f"goes back to{' the settings that it began with' if is_start else ''}"
    elif gain is None or gain.share < (0.0 if had is None else had.share):
        is_earlier = incumbent.mean_staleness_steps < before.mean_staleness_steps
        better = "earlier updates" if is_earlier else "" if gain is None else "less memory"
        what, why = "changes to", (f", for {better}" if better else "") + why
    return f"{what}: {incumbent.differences(before)}{why}"


def reference(book: TrialTable) -> str:
    """What the best settings gain over, in words."""
    start = book.trials[0].setting
    return "the starting point" if book.reference == start else required(str(book.reference))


def required(setting: str) -> str:
    """A setting that became the incumbent for the quality or for GPU memory, and that others gain over."""
    return f"what quality or GPU memory required ({setting})"


def _gains(found: Gain) -> str:
    if not found.tells:
        return f"{_TOO_NOISY} what it saves"
    return f"gains {found}" if found.share >= 0 else f"costs {Gain(-found.share, found.error)}"


def tied(trial: Trial, incumbent: Trial, found: Gain, *, adopted: bool) -> str:
    """A comparison for staleness and memory."""
    before, after = incumbent.setting.mean_staleness_steps, trial.setting.mean_staleness_steps
    why = f"a mean staleness of {after:.1f} steps instead of {before:.1f}" if after < before else "less memory"
    what = f"{_what(trial, incumbent)} {_gains(found)} of the step time"
    if adopted:
        return f"Adopted for {why}: {what}, and is not likely to cost more than {_WORTH}."
    return f"Not adopted for {why}: {what}, and may cost more than {_WORTH}."


def failed(trial: Trial, incumbent: Trial, outcome: Outcome) -> str:
    """A trial was aborted or crashed."""
    if outcome.status == "aborted":
        return f"Cut short: {_what(trial, incumbent)}: {outcome.reason}."
    return f"Crashed, and not tried again: {trial.setting}: {outcome.reason}."


def incumbent_failed(trial: Trial, reason: str) -> str:
    """The incumbent itself could not be measured."""
    return f"The search ends: the best settings so far ({trial.setting}) could not go on: {reason}."


def void(trial: Trial, challenger: Trial, times: int, reason: str) -> str:
    """Measurements did not count, one after the other; also those that a challenger was to be compared with."""
    why = f"{times} measurements of {trial.setting} did not count, the last because {reason}"
    if trial is challenger:
        return f"Given up: {why}."
    return f"Given up: {challenger.setting} could not be compared, since {why}."


def nothing_adopted(*, measured: bool, tried: int, kinds: Collection[str] = (), uncompared: int = 0) -> str:
    """The result when the first setting is the best; without a full stop.

    `tried` counts settings that were measured, aborted or crashed, without the first; `uncompared` those of them that
    were measured without a decision.
    """
    if "adopt" in kinds and "rollback" in kinds:
        return "What had been adopted was rolled back"
    if "adopt" in kinds and "guard" in kinds:
        return "What had been adopted was taken back, since training went wrong"
    if not measured:
        return "Nothing was measured, so that nothing is known of any setting"
    if moved := {"movement", "memory"} & set(kinds):
        why = "the quality" if "movement" in moved else "GPU memory"
        if "adopt" in kinds:
            return f"What had been adopted was given up for {why}"
        return f"Settings were changed for {why}, none for speed"
    if tried == 0:
        return "No other setting was measured, so that nothing is known of them"
    what = f"{'was' if uncompared == 1 else 'were'} measured, but not compared with those that it began with"
    if tried == 1:
        return f"The one other setting that was tried {what if uncompared else 'was not adopted'}"
    said = f"None of the {tried} other settings that were tried was adopted"
    return f"{said}; {'one' if uncompared == 1 else uncompared} of them {what}" if uncompared else said


def patience(misses: int) -> str:
    """Nothing faster was found for a while: `misses` settings in a row were not adopted for their speed."""
    return f"The last {misses} settings that were tried were not adopted for their speed."


def enough(made: int, most: int, needed: int) -> str:
    """The limit on measurements is reached."""
    count, left = f"{made} of {most} measurements {'was' if made == 1 else 'were'} made", most - made
    if left <= 0:
        return f"{count}."
    verb = "is" if left == 1 else "are"
    return f"{count}: another setting may take {needed} with its comparison, and {left} {verb} left."


def spent(cost: ExplorationCost, kept: float) -> str:
    """The cost of exploring has reached its limit, or the next setting might exceed it.

    `kept` is the share of the limit reserved for settings that no search proposes.
    """
    keeps = f", since {kept:.0%} is kept for the planner's settings once step times change" if kept else ""
    return (
        f"Exploring has cost {cost.spent_s:.1f} s more than the best settings so far would have taken, of at most "
        f"{cost.allowed_s:.1f} s ({100 * cost.share:g}% of the time so far, and an allowance to begin with): the next "
        f"setting may need more than is left{keeps}."
    )


NOT_KNOWN_YET = (
    "it is not known yet how far the weights of this training would move before late updates arrive, they were adopted "
    "in another one"
)
NOT_PREDICTED = (
    "The planner predicts no step times here, for which it needs a GPU that could be measured, or a rig: settings are "
    "compared by measurements alone."
)
ENDED_EARLY = "The training ended before the search did."


def _mib(size: int | None) -> str:
    return f"{(size or 0) / 2**20:.1f} MiB"


def _what(trial: Trial, incumbent: Trial) -> str:
    return trial.setting.differences(incumbent.setting) or str(trial.setting)


def waits_for_others(waited_s: float) -> str:
    """Why choosing takes long where runs share a sampler; without a full stop."""
    what = f"choosing the next setting has waited {waited_s:.0f} s for its turn"
    return f"{what}: those of other runs of this daemon come first"


def planner_alone(why: str) -> str:
    """The sampler has failed; `why` has no full stop."""
    return f"The planner alone proposes settings from here on: {why}."


def waits_for_core(waited_s: float, since: Literal["so far", "in all", "now"]) -> str:
    """Why choosing takes long: the sampler has waited `waited_s` for a core; without a full stop."""
    what, when = ("the next setting", "") if since == "now" else ("settings", f" {since}")
    return f"choosing {what} has waited {waited_s:.0f} s for a core{when}: the training and other programs take them"


def conclusion(
    search: Search | None,
    count: Count,
    *,
    steps: int,
    begins: int,
    over: bool,
    waited_s: float = 0.0,
) -> tuple[int, str]:
    """The last words, and the level that they are logged with: a warning where no setting could be tried.

    Where some could be it is up to four lines: knobs kept, time spent, gain with its error, what the guard did. `steps`
    are counted since the tuner was attached, `begins` is the least number before the search; `over` is False where the
    search was given up with a reason; `search` is None if it had not begun.
    """
    took = f"zftune tuned nothing: the training took {steps} step{'' if steps == 1 else 's'}"
    early = f"{took} and ended before a first measurement, which begins after {begins} steps and some seconds"
    waited = f" ({waits_for_core(waited_s, 'in all')})" if waited_s >= LONG_WAIT_S else ""
    if waited and not over and (search is None or search.book.trials[0].state is not TrialState.MEASURED):
        return logging.WARNING, f"{took} and ended before a first measurement{waited}."
    if search is None:
        return logging.WARNING, f"{early} of preparation."
    book, start = search.book, search.book.trials[0].setting
    tried = len({trial.setting for trial in book.trials if trial.state in _TRIED} - {start})
    measured = book.trials[0].state is TrialState.MEASURED
    if not over and not measured:
        needed = start.update_interval + steps_of(start.update_interval)
        return logging.WARNING, f"{early} of preparation and takes {needed} more steps."
    if not over and not tried:
        return logging.WARNING, f"{took}, and only the settings that it began with were measured{waited}."
    return logging.INFO, "\n".join(_lines(search, count, tried=tried, measured=measured))


def _lines(search: Search, count: Count, *, tried: int, measured: bool) -> Iterator[str]:
    book = search.book
    guarded = [note.reason for note in search.notes if note.kind == "guard"]
    reason = search.notes[-1].reason if search.notes and search.notes[-1].kind != "guard" else ""
    decided = {note.trial for note in search.notes if note.kind in ("adopt", "keep", "abort")}
    measured_only = {trial.setting for trial in book.trials if trial.state is TrialState.MEASURED}
    measured_only -= {trial.setting for trial in book.trials if trial.number in decided} | {book.trials[0].setting}
    kinds = {note.kind for note in search.notes}
    nothing = nothing_adopted(measured=measured, tried=tried, kinds=kinds, uncompared=len(measured_only))
    yield from _kept(book.incumbent.setting, book.gain, count)
    over = "" if book.reference == book.trials[0].setting else f" of {reference(book)}"
    yield f"{_gained(book.gain, nothing, since=book.gain_age, over=over)} {reason}".rstrip()
    if guarded:
        yield f"Guard: {' '.join(guarded)}"


def _kept(incumbent: Setting, gain: Gain | None, count: Count) -> Iterator[str]:
    yield f"zftune keeps {incumbent}."
    share = f", {100 * count.spent_s / count.seconds:.1f}% of the {count.seconds:.1f} s" if count.seconds else ""
    known = None if gain is None else {"share": gain.share, "error": ERRORS * gain.error}
    saved = f"; {saved_with_error(count.saved_s, known)} were saved" if count.saved_s >= 0.05 else ""
    more = f"{count.spent_s:.1f} s more than the settings that were best so far{share}{saved}"
    yield f"Time spent: exploring took {more}."


def _gained(gain: Gain | None, nothing: str, since: int = 0, over: str = "") -> str:
    if gain is None:
        return f"Gain: none. {nothing}."
    often = "" if since == 1 else f", {since} times since"
    return f"Gain: {gain} of the step time{over}{f', measured before the search began again{often}' if since else ''}."


def counted_alone(incumbent: Setting | None, gain: Gain | None, count: Count, record: str | None) -> str:
    """The last words of a training whose daemon is gone, from what its own process counted."""
    gone = "The daemon does not answer any more"
    if incumbent is None:
        return f"zftune tuned nothing: no search had begun. {gone}."
    kept = (
        "nothing is known to be written down"
        if record is None
        else f"what it has written down: zftune explain {record[:8]}"
    )
    lines = (*_kept(incumbent, gain, count), _gained(gain, "Nothing was adopted that this training heard of"))
    return "\n".join((*lines, f"{gone}, so that this is what the training counted itself; {kept}."))
