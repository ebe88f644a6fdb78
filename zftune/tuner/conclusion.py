"""What a tuner says at its end: what was found, or why nothing was done."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from zftune.store.types import TrialState
from zftune.tuner import sentences
from zftune.tuner.scores import steps_of
from zftune.tuner.search import Search

_TRIED = (TrialState.MEASURED, TrialState.ABORTED, TrialState.CRASHED)


@dataclass(frozen=True, slots=True)
class Followed:
    """What a tuner has seen of the training."""

    steps: int
    """That were taken since it was attached."""
    begins: int
    """Steps before its search begins, at least."""
    over: bool
    """Whether the search came to its end, or was given up with a reason."""
    remembered: bool
    """Whether a later run can go on with it."""


def conclusion(search: Search | None, followed: Followed) -> tuple[int, str]:
    """The last words, and the level that they are logged with: a warning where no setting could be tried.

    Where some could be it is up to four lines: knobs kept, time spent, gain with its error, what the guard did.

    Args:
        search: that is over, or was ended; None: it had not begun.
        followed: the training.
    """
    took = f"zftune tuned nothing: the training took {followed.steps} step{'' if followed.steps == 1 else 's'}"
    if search is None:
        return logging.WARNING, f"{took}, the search begins after {followed.begins} and a moment to prepare it."
    book, start = search.book, search.book.trials[0].setting
    tried = sum(trial.number != 0 and trial.state in _TRIED for trial in book.trials)
    measured = book.trials[0].state is TrialState.MEASURED
    if not followed.over and not measured:
        needed = start.update_interval + steps_of(start.update_interval)
        why = f"ended before the first measurement did ({needed} steps, after some seconds of preparation)"
        return logging.WARNING, f"{took} and {why}."
    if not followed.over and not tried:
        later = "; the next run of this training goes on from here" if followed.remembered else ""
        return logging.WARNING, f"{took}, and nothing but the knobs that it began with was measured{later}."
    return logging.INFO, "\n".join(_lines(search, tried=tried, measured=measured))


def _lines(search: Search, *, tried: int, measured: bool) -> Iterator[str]:
    book, cost = search.book, search.cost
    guarded = [note.reason for note in search.notes if note.kind == "guard"]
    yield f"zftune keeps {book.incumbent.setting}."
    share = f", {100 * cost.spent_s / cost.elapsed_s:.1f}% of the {cost.elapsed_s:.1f} s" if cost.elapsed_s else ""
    yield f"Time spent: exploring took {cost.spent_s:.1f} s more than the knobs that were best so far{share}."
    reason = search.notes[-1].reason if search.notes and search.notes[-1].kind != "guard" else ""
    nothing = sentences.nothing_adopted(measured=measured, tried=tried)
    found = f"none. {nothing}" if book.gain is None else f"{book.gain} of the step time"
    yield f"Gain: {found}. {reason}".rstrip()
    if guarded:
        yield f"Guard: {' '.join(guarded)}"
