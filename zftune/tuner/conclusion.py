"""What a tuner says at its end: what was found, or why nothing was done."""

from __future__ import annotations

import logging
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
    """The last sentence, and the level that it is logged with: a warning where no setting could be tried.

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
    nothing = sentences.nothing_adopted(measured=measured, tried=tried)
    found = nothing[0].lower() + nothing[1:] if book.gain is None else f"they save {book.gain} of the step time"
    reason = search.notes[-1].reason if search.notes else ""
    return logging.INFO, f"zftune keeps {book.incumbent.setting}: {found}. {reason}".rstrip()
