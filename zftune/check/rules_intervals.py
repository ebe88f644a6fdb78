"""Rules about the schedule of upstream's ZenFlow: update_interval U, select_interval S, warm-up."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from zftune.check.findings import Change, Finding
from zftune.check.subject import BOTH, OURS, UPSTREAM, ZENFLOW, Rule, Subject, change, is_whole
from zftune.store.apply import RARE_SELECTION_STEPS

SAFE_UPDATE = 4
_UPDATE = f"{ZENFLOW}.update_interval"
_SELECT = f"{ZENFLOW}.select_interval"
_STRATEGY = f"{ZENFLOW}.select_strategy"
_WARM_UP = f"{ZENFLOW}.full_warm_up_rounds"


def windows(steps: float, update: int | None) -> int:
    """Steps, in whole windows."""
    whole = update or SAFE_UPDATE
    return whole * max(1, math.ceil(steps / whole))


def update_interval(subject: Subject) -> Iterator[Finding]:
    """The default divides by zero accumulation steps, study 002 `auto_interval`."""
    if subject.zenflow is None:
        return
    value, given = subject.zenflow["update_interval"], subject.at(_UPDATE)
    safe = change(_UPDATE, SAFE_UPDATE)
    if value == "auto":
        if given == "auto" and subject.hugging_face:  # ends before, as a rule of its own says
            return
        reason = (
            '"auto", the default, makes all selected weights NaN in the first step.'
            if given != "auto"
            else "All selected weights are NaN after the first step. Accelerate refuses the word."
        )
        yield subject.finding("update-interval-auto", _UPDATE, "wrong", reason, safe)


def strategy(subject: Subject) -> Iterator[Finding]:
    """Which strategy goes with which interval; the others raise at `initialize()`."""
    if subject.zenflow is None:
        return
    kind, select = subject.zenflow["select_strategy"], subject.zenflow["select_interval"]
    if kind == "auto" and is_whole(select):
        reason = 'With "auto", the default, DeepSpeed raises where select_interval is a number.'
        yield subject.finding("auto-with-interval", _STRATEGY, "crashes", reason, change(_STRATEGY, "step"))
    elif kind in ("step", "epoch") and select == "auto":
        safe = 1 if kind == "epoch" else windows(RARE_SELECTION_STEPS, subject.update_interval)
        reason = f'DeepSpeed needs a number with select_strategy "{kind}"; "auto" is the default.'
        yield subject.finding("strategy-without-interval", _SELECT, "crashes", reason, change(_SELECT, safe))


def select_interval(subject: Subject) -> Iterator[Finding]:
    """Too small a number. 0 is never, to upstream."""
    if subject.zenflow is None:
        return
    select, update = subject.zenflow["select_interval"], subject.update_interval
    rare = windows(RARE_SELECTION_STEPS, update)
    if not is_whole(select):
        return
    if select == 0:
        reason = "The runtime of zftune run takes 1 and more."
        yield subject.finding("select-interval-zero", _SELECT, "crashes", reason, change(_SELECT, rare), backends=OURS)
        yield _selects_once(subject, "To DeepSpeed 0 is never:")
    elif subject.zenflow["select_strategy"] == "step" and select < (update or 1):
        reason = "DeepSpeed refuses less than update_interval."
        backends = BOTH if select < 1 else UPSTREAM
        yield subject.finding(
            "select-below-update", _SELECT, "crashes", reason, change(_SELECT, rare), backends=backends
        )


def reselection(subject: Subject) -> Iterator[Finding]:
    """Every selection harms the state, study 002 `moments_restart`, `reselection_truncates`, `reselection_reverts`."""
    if subject.zenflow is None:
        return
    kind, select = subject.zenflow["select_strategy"], subject.zenflow["select_interval"]
    if kind == "epoch" or (kind == "auto" and select == "auto"):
        yield _selects_once(subject, "Unless initialize() is given training_data,")
    if kind != "step" or not is_whole(select) or select < (subject.update_interval or 1):
        return
    overlapped = subject.zenflow["overlap_step"] is True
    reason = (
        "Each selection zeroes the selected columns' moments but not their step count, so they step up to 4 times too "
        "far, and cuts 16-bit models' masters down to the weights' precision."
        + (" The overlapped update in flight is lost." if overlapped else "")
    )
    if select < RARE_SELECTION_STEPS:
        rare = windows(RARE_SELECTION_STEPS, subject.update_interval)
        yield subject.finding("selects-often", _SELECT, "wrong", reason, change(_SELECT, rare))
    else:
        yield subject.finding("selects-rarely", _SELECT, "note", reason)


def _selects_once(subject: Subject, when: str) -> Finding:
    reason = f"{when} columns are selected once and never again."
    return subject.finding(
        "never-selects-again", _SELECT, "note", reason, advice='select_strategy "step" selects again'
    )


def whole_windows(subject: Subject) -> Iterator[Finding]:
    """A selection that cuts a window short: two updates in flight share a buffer, study 002 `same_buffer`."""
    update = subject.update_interval
    if subject.zenflow is None or update is None:
        return
    select, warm_up = subject.zenflow["select_interval"], subject.zenflow["full_warm_up_rounds"]
    reselects = subject.zenflow["select_strategy"] == "step" and is_whole(select) and select >= update
    if not reselects or not is_whole(warm_up):
        return
    overlapped = subject.zenflow["overlap_step"] is True
    mends = {_SELECT: (select, windows(select, update)), _WARM_UP: (warm_up, update * math.ceil(warm_up / update))}
    for dotted, (value, safe) in mends.items():
        if value == safe:
            continue
        if overlapped:
            reason = (
                "It is no multiple of update_interval: two overlapped updates then share a gradient buffer, a race."
            )
            yield subject.finding("broken-windows", dotted, "wrong", reason, change(dotted, safe))
        else:
            reason = "It is no multiple of update_interval: a selection cuts a window short, whose mean is too small."
            yield subject.finding("broken-windows", dotted, "note", reason, advice=f"{safe}")


def warm_up(subject: Subject) -> Iterator[Finding]:
    """Overlap without it leaves out the first wait, study 002 `late_pipeline`."""
    if subject.zenflow is None:
        return
    rounds: Any = subject.zenflow["full_warm_up_rounds"]
    safe: Change = change(_WARM_UP, subject.update_interval or SAFE_UPDATE)
    if not is_whole(rounds):
        return
    if rounds < 0:
        reason = "The runtime of zftune run takes 0 and more."
        yield subject.finding("warm-up-negative", _WARM_UP, "crashes", reason, safe, backends=OURS)
    if subject.zenflow["overlap_step"] is True and rounds < 1:
        reason = (
            "Overlapped without warm-up, the default, the first wait is left out: the second boundary applies nothing, "
            "and updates come two windows late."
        )
        yield subject.finding("overlap-without-warm-up", _WARM_UP, "wrong", reason, safe)


RULES: tuple[Rule, ...] = (update_interval, strategy, select_interval, reselection, whole_windows, warm_up)
