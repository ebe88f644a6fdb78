"""Comparing an optimizer with its reference while knobs change, groups join and windows have a length of their own."""

from __future__ import annotations

from typing import Any

from hypothesis import reject

from tests.support.oracle import ReferenceOptimizer
from tests.support.zenflow.cases import Case, Make, Session, assert_same
from tests.support.zenflow.family_cases import OURS, REFERENCE


def closing_steps(optimizer: Any) -> list[int]:
    """The steps in which a window closed; for ours, a flush before a step counts to it."""
    if isinstance(optimizer, ReferenceOptimizer):
        return optimizer.closing_steps
    return [stats.step for stats in optimizer.history(wait=True) if stats.closed]


def drive(case: Case, make: Make) -> tuple[Session, list[int]]:
    """The session after its last flush, and the steps in which windows closed."""
    session = Session(case, make)
    session.do_what_is_due()
    for _ in range(case.steps):
        session.make_step()
        session.do_what_is_due()
    closed = closing_steps(session.optimizer)
    session.end()
    return session, closed


def compare(case: Case, make: Make | None = None) -> list[int]:
    """The weights after everything that happens, and the closing steps, equal the reference's; returns these steps.

    A case in which the order of a sum decides on a window's end is rejected: hypothesis draws another one.
    """
    expected, expected_steps = drive(case, REFERENCE[case.rule])
    if expected.optimizer.events["decisions on an ulp"]:
        reject()
    actual, steps = drive(case, make or OURS[case.rule])
    assert_same(case, actual.trace, expected.trace)
    blurred = {s + 1 for s in range(case.steps) if any(kind != "knobs" for _, kind, _ in case.after(s))}
    assert [s for s in steps if s not in blurred] == [s for s in expected_steps if s not in blurred]
    return expected_steps
