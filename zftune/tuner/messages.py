"""Decisions in words, one template for each kind, and what a tuner prints at its end.

A decision is data: its kind, its trial and its figures (`zftune.store.types.Decision`). Nothing is read out of a
sentence, and a sentence is made from its figures alone.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from zftune.store.account import Count, saved_with_error
from zftune.store.types import Decision, TrialState
from zftune.tuner.evidence import ERRORS, Gain, block_steps
from zftune.tuner.space import Setting

if TYPE_CHECKING:
    from zftune.tuner.search import Search

OPENING_BLOCKS = 4
"""Of the incumbent, before the first comparison."""
BECAUSE = "because"
"""In a decision's details: its template, where its kind has several."""
TEMPLATES: Mapping[str, str] = {
    "start": "The search begins from {what}, which takes {step_ms:.1f} ms a step.",
    "resume": "Resumed with {measurements} measurements: the best settings so far are measured once more "
    "(--fresh begins a new search).",
    "adopt": "Adopted: {what} {gain} of the step time, by {units}.",
    "keep": "Not adopted: {what} {gain} of the step time, by {units}.",
    "crash": "Crashed, and not tried again: {what}: {why}.",
    "died": "Crashed, and not tried again: the run ended without goodbye while this setting was tried.",
    "survived": "The run ended without goodbye during a setting that had been measured before; once is no crash of it.",
    "incumbent": "The search ends: the best settings so far ({what}) failed: {why}.",
    "void": "Given up: {times} measurements of {what} did not count, the last because {why}.",
    "limit": "{made} of at most {most} measurements were made; a comparison takes two more.",
    "idle": "No setting is worth another comparison: none is expected to be faster.",
    "fixed": "No setting is worth another comparison: those that change the trajectory stay, since {why}.",
    "budget": "Exploring has cost {spent_s:.1f} s of at most {allowed_s:.1f} s; the next comparison may need more.",
    "memory": "Adopted for GPU memory: {what}: the peak was {peak_mib:.1f} MiB of at most {limit_mib:.1f} MiB.",
    "movement": "Adopted for the quality: {what}: under {late} {why}.",
    "tokens": "A step has {tokens} tokens now instead of {before}: earlier measurements count for less.",
    "pace": "The machine changed, from {what}: the planner is asked again, and earlier measurements count for less.",
    "surprise": "Two comparisons contradict earlier ones, which count for less from here on.",
    "rollback": "Rolled back {by}: {barred} is not tried again, the setting before it stays.",
    "pause": "Paused {by}: the best settings so far stay.",
    "unpause": "Resumed {by}.",
    "command": "Stopped {by}.",
    "rate": "The learning rate is {learning_rate:.3g} from here on, it was {before:.3g}: {shared} of both "
    "in this run (--fresh begins another one).",
    "trained_on": "Tuning ended {taken} after the training's last start; the training went on without it.",
    "text": "{text}",
}
"""By the kind of a decision, or by `BECAUSE`; "text" is a sentence of another part, such as the guard's."""
BARRED: Mapping[str, str] = {"crash": "it crashed before", "rollback": "somebody has rolled it back"}
"""Why a setting is not tried again; without a full stop."""
NOT_KNOWN_YET = (
    "it is not known yet how far the weights of this training would move before late updates arrive, they were adopted "
    "in another one"
)
NOT_PREDICTED = (
    "The planner predicts no step times here, for which it needs a GPU that could be measured, or a rig: settings are "
    "compared by measurements alone."
)
ENDED_EARLY = "The training ended before the search did."
_TRIED = (TrialState.MEASURED, TrialState.CRASHED)


def sentence(decision: Decision) -> str:
    """A decision in words; its kind alone, where another version has written other figures."""
    details = dict(decision.details)
    if "gain" in details and "error" in details:
        gain = Gain(abs(details["gain"]), details["error"])
        details["gain"] = f"{'saves' if details['gain'] >= 0 else 'costs'} {gain}"
    for name, noun in (("units", "comparison"), ("taken", "step")):
        if name in details:
            details[name] = count(details[name], noun)
    name = details.get(BECAUSE) or ("text" if "text" in details else decision.kind)
    try:
        return TEMPLATES[name].format_map(details)
    except (KeyError, ValueError, TypeError):
        return f"{decision.kind}."


def count(number: int, noun: str) -> str:
    """A number of things."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def reference(setting: str | None) -> str:
    """What a gain is over, in words; None: the starting point."""
    return "the settings at the start" if setting is None else f"what quality or GPU memory required ({setting})"


def nothing_adopted(*, measured: bool, tried: int, kinds: Collection[str] = ()) -> str:
    """The result when nothing was adopted for its speed; without a full stop. `tried` counts other settings."""
    if "adopt" in kinds and (taken := {"rollback", "guard", "movement", "memory"} & set(kinds)):
        return f"What had been adopted was taken back ({', '.join(sorted(taken))})"
    if not measured:
        return "Nothing was measured"
    if tried == 0:
        return "No other setting was measured"
    return f"None of {tried} other settings was adopted" if tried > 1 else "The one other setting was not adopted"


def conclusion(search: Search | None, total: Count, *, steps: int, begins: int, over: bool) -> tuple[int, str]:
    """What a tuner prints at its end, and the level to log it with: a warning if no setting could be tried.

    `steps` and `begins`: as of `Ended`; `over` is False if the search was given up with a reason.
    """
    took = f"zftune tuned nothing: the training took {count(steps, 'step')}"
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
    guard = next((sentence(note) for note in search.notes if note.kind == "guard"), "")
    last = sentence(search.notes[-1]) if search.notes and search.notes[-1].kind != "guard" else ""
    nothing = nothing_adopted(measured=measured, tried=tried, kinds={note.kind for note in search.notes})
    over_what = "" if book.reference == start else f" over {reference(str(book.reference))}"
    gained = f"none. {nothing}." if book.gain is None else f"{book.gain} of the step time{over_what}."
    lines = [*_kept(book.incumbent.setting, book.gain, total), f"Gain: {gained} {last}".rstrip()]
    lines += [f"Guard: {guard}"] if guard else []
    return logging.WARNING if guard else logging.INFO, "\n".join(lines)


def counted_alone(incumbent: Setting | None, gain: Gain | None, total: Count, record: str | None) -> str:
    """What a training prints at its end whose daemon is gone, from the counts of its own process."""
    if incumbent is None:
        return "zftune tuned nothing: no search had begun. The daemon does not answer any more."
    kept = "nothing is known to be written down" if record is None else f"its record: zftune explain {record[:8]}"
    gained = "none. Nothing was adopted that this training heard of." if gain is None else f"{gain} of the step time."
    gone = f"The daemon does not answer any more; {kept}."
    return "\n".join((*_kept(incumbent, gain, total), f"Gain: {gained}", gone))


def _kept(incumbent: Setting, gain: Gain | None, total: Count) -> tuple[str, str]:
    share = f", {100 * total.spent_s / total.seconds:.1f}% of the {total.seconds:.1f} s" if total.seconds else ""
    known: Mapping[str, Any] | None = None if gain is None else {"share": gain.share, "error": ERRORS * gain.error}
    saved = f"; {saved_with_error(total.saved_s, known)} were saved" if total.saved_s >= 0.05 else ""
    more = f"{total.spent_s:.1f} s more than the settings that were best so far{share}{saved}"
    return f"zftune keeps {incumbent}.", f"Time spent: exploring took {more}."
