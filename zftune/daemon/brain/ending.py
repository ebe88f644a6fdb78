"""What is said and written down at a search's end, while nobody thinks about it."""

from __future__ import annotations

import logging

from zftune.daemon.wire import PROTOCOL, Farewell, Goodbye
from zftune.tuner.conclusion import Followed, conclusion
from zftune.tuner.preparing import Prepared
from zftune.tuner.states import Between, Stopped


def went_wrong(prepared: Prepared, reason: str) -> None:
    """End a search because training goes wrong; said twice, it is once.

    What it adopted was kept as a preset at once, and is proposed to nobody any more.

    Args:
        prepared: the search.
        reason: a sentence.

    Raises:
        ZftuneError: it could not be written down.
    """
    search, recording = prepared.search, prepared.recording
    if not any(note.kind == "guard" for note in search.notes):
        search.guard(reason)
    if prepared.recorder is not None:
        prepared.recorder.write(search)
    adopted = {note.trial for note in search.notes if note.kind == "adopt"}
    for trial in search.book.trials[1:]:  # the first is what training goes back to
        if trial.number in adopted and recording is not None:
            recording.withdraw_preset(trial.setting)


def farewell(prepared: Prepared | None, message: Goodbye, between: Between | None) -> Farewell:
    """End a search that nobody thinks about any more.

    Args:
        prepared: the search; None: it had not begun.
        message: of the agent.
        between: its steps that belong to no measurement.
    """
    search = None if prepared is None else prepared.search
    over = search is not None and isinstance(search.state, Stopped)
    if search is not None:
        if between is not None:
            search.idle(between)
        if not over:
            ended = f"Tuning ended after {message.steps} steps, before the search was over."
            search.stop(message.reason or ended)
    remembered = prepared is not None and prepared.recorder is not None
    followed = Followed(message.steps, message.begins, over=over or message.over, remembered=remembered)
    level, sentence = conclusion(search, followed)
    if prepared is not None and search is not None:
        for remark in message.remarks:
            search.remark(remark)
        if prepared.recording is not None:
            prepared.recording.finish(search, unfinished=not over)
    return Farewell(protocol=PROTOCOL, sentence=sentence, warning=level >= logging.WARNING)
