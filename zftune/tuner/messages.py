"""Reasons of a search's decisions, each a sentence with its figures, and a tuner's last words."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from zftune.store.account import Count, saved_with_error
from zftune.store.types import TrialState
from zftune.tuner.blocks import block_steps
from zftune.tuner.cost import ExplorationCost
from zftune.tuner.evidence import ERRORS, Gain
from zftune.tuner.space import Setting
from zftune.tuner.states import Outcome, Trial

if TYPE_CHECKING:
    from zftune.tuner.search import Search
    from zftune.tuner.trials import TrialTable


OPENING_BLOCKS = 4
"""Of the incumbent, before the first comparison."""
_TRIED = (TrialState.MEASURED, TrialState.CRASHED)
BARRED: Mapping[str, str] = {
    "crash": "it crashed before",
    "rollback": "somebody has rolled it back",
}
"""Why a setting is not tried again, by kind; without a full stop."""


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


def made_room(trial: Trial, tight: Trial, outcome: Outcome, limit_bytes: int | None) -> str:
    """The peak has come too near to the end of the memory."""
    return (
        f"Adopted for GPU memory: {_what(trial, tight)}: the peak was {_mib(outcome.device_bytes)} of at most "
        f"{_mib(limit_bytes)}."
    )


def made_earlier(trial: Trial, late: Trial, why: str) -> str:
    """The weights move too far for updates that come as late as they did."""
    return f"Adopted for the quality: {_what(trial, late)}: under {late.setting.differences(trial.setting)} {why}."


def other_tokens(tokens: int, before: int) -> str:
    """The user reports steps of another size."""
    return f"A step has {tokens} tokens now instead of {before}: what is known counts for less from here on."


def other_pace(what: str) -> str:
    """The machine's rates changed, by the bytes and times that were counted; `what` names the figures."""
    return f"The machine changed, from {what}: the planner is asked again, and what is known counts for less."


SURPRISED = "Two comparisons contradict what was known: it counts for less from here on."


def nothing_worth(fixed_because: str) -> str:
    """No setting is worth a comparison; `fixed_because` "": settings that change the trajectory are free."""
    if fixed_because:
        return f"No setting is worth another comparison: those that change the trajectory stay, since {fixed_because}."
    return "No setting is worth another comparison: none is expected to be faster."


def adopted(trial: Trial, incumbent: Trial, found: Gain, units: int) -> str:
    """A challenger is faster, by its own units."""
    return f"Adopted: {_what(trial, incumbent)} saves {found} of the step time in {_units(units)}."


def kept(trial: Trial, incumbent: Trial, found: Gain, units: int) -> str:
    """The visit of a challenger ended, and it was not adopted."""
    how = f"saves {found}" if found.share >= 0 else f"costs {Gain(-found.share, found.error)}"
    return f"Not adopted: {_what(trial, incumbent)} {how} in {_units(units)}."


def crashed(trial: Trial, reason: str) -> str:
    """A challenger was refused, or a training did not survive it."""
    return f"Crashed, and not tried again: {trial.setting}: {reason}."


def void(trial: Trial, times: int, reason: str) -> str:
    """Measurements did not count, one after the other."""
    return f"Given up: {times} measurements of {trial.setting} did not count, the last because {reason}."


def enough(made: int, most: int) -> str:
    """The limit on measurements is reached."""
    return f"{made} of at most {most} measurements were made: a comparison takes two more."


def spent(cost: ExplorationCost) -> str:
    """The next comparison might cost more than exploring may."""
    return (
        f"Exploring has cost {cost.spent_s:.1f} s of at most {cost.allowed_s:.1f} s ({cost.floor_s:g} s, or "
        f"{100 * cost.share:g}% of the time so far): the next comparison may need more than is left."
    )


def _units(count: int) -> str:
    return f"{count} comparison{'' if count == 1 else 's'}"


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


def incumbent_failed(trial: Trial, reason: str) -> str:
    """The incumbent itself could not be measured."""
    return f"The search ends: the best settings so far ({trial.setting}) could not go on: {reason}."


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


def nothing_adopted(*, measured: bool, tried: int, kinds: Collection[str] = ()) -> str:
    """The result when nothing was adopted for its speed; without a full stop. `tried` counts other settings."""
    if "adopt" in kinds and (taken := {"rollback", "guard", "movement", "memory"} & set(kinds)):
        return f"What had been adopted was taken back ({', '.join(sorted(taken))})"
    if not measured:
        return "Nothing was measured"
    if tried == 0:
        return "No other setting was measured"
    return f"None of {tried} other settings was adopted" if tried > 1 else "The one other setting was not adopted"


def conclusion(search: Search | None, count: Count, *, steps: int, begins: int, over: bool) -> tuple[int, str]:
    """The last words, and the level that they are logged with: a warning where no setting could be tried.

    Where some could be it is up to four lines: knobs kept, time spent, gain with its error, what the guard did. `steps`
    are counted since the tuner was attached, `begins` is the least number before the search; `over` is False where the
    search was given up with a reason; `search` is None if it had not begun.
    """
    took = f"zftune tuned nothing: the training took {steps} step{'' if steps == 1 else 's'}"
    early = f"{took} and ended before a first measurement, which begins after {begins} steps and some seconds"
    if search is None:
        return logging.WARNING, f"{early} of preparation."
    book, start = search.book, search.book.trials[0].setting
    tried = len({trial.setting for trial in book.trials if trial.state in _TRIED} - {start})
    measured = book.trials[0].state is TrialState.MEASURED
    if not over and not measured:
        needed = start.update_interval + OPENING_BLOCKS * block_steps(start.update_interval)
        return logging.WARNING, f"{early} of preparation and takes {needed} more steps."
    if not over and not tried:
        return logging.WARNING, f"{took}, and only the settings that it began with were measured."
    return logging.INFO, "\n".join(_lines(search, count, tried=tried, measured=measured))


def _lines(search: Search, count: Count, *, tried: int, measured: bool) -> Iterator[str]:
    book = search.book
    guarded = [note.reason for note in search.notes if note.kind == "guard"]
    reason = search.notes[-1].reason if search.notes and search.notes[-1].kind != "guard" else ""
    nothing = nothing_adopted(measured=measured, tried=tried, kinds={note.kind for note in search.notes})
    yield from _kept(book.incumbent.setting, book.gain, count)
    over = "" if book.reference == book.trials[0].setting else f" of {reference(book)}"
    yield f"{_gained(book.gain, nothing, over=over)} {reason}".rstrip()
    if guarded:
        yield f"Guard: {' '.join(guarded)}"


def _kept(incumbent: Setting, gain: Gain | None, count: Count) -> Iterator[str]:
    yield f"zftune keeps {incumbent}."
    share = f", {100 * count.spent_s / count.seconds:.1f}% of the {count.seconds:.1f} s" if count.seconds else ""
    known = None if gain is None else {"share": gain.share, "error": ERRORS * gain.error}
    saved = f"; {saved_with_error(count.saved_s, known)} were saved" if count.saved_s >= 0.05 else ""
    more = f"{count.spent_s:.1f} s more than the settings that were best so far{share}{saved}"
    yield f"Time spent: exploring took {more}."


def _gained(gain: Gain | None, nothing: str, over: str = "") -> str:
    return f"Gain: none. {nothing}." if gain is None else f"Gain: {gain} of the step time{over}."


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
