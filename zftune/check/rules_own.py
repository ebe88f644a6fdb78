"""What `zftune run` refuses, in its own words: whatever it raises the first of is found here."""

from __future__ import annotations

from collections.abc import Iterator

from zftune.check.findings import Change, Finding
from zftune.check.subject import OURS, UPSTREAM, Rule, Subject, change
from zftune.integrations.deepspeed.refusal import INSTEAD

ZENFLOW, DEEPSPEED = NAMES = ("backend-zenflow", "backend-deepspeed")


def zenflow(subject: Subject) -> Iterator[Finding]:
    """A fault where that backend is asked for; else a note, since `zftune run` says so before anything is trained."""
    asked = subject.backend == "zenflow"
    mends: tuple[Change, ...] = (change("zftune.backend", "deepspeed"),) if asked and not subject.forced else ()
    for refusal in subject.own_refusals if subject.backend != "deepspeed" else ():
        reason = f"zftune run refuses it: allowed {refusal.allowed}."
        mend = mends if refusal.allowed.endswith(INSTEAD) else ()
        yield subject.finding(ZENFLOW, refusal.field, "crashes" if asked else "note", reason, *mend, backends=OURS)


def deepspeed(subject: Subject) -> Iterator[Finding]:
    """Where that backend is asked for."""
    for refusal in subject.upstream_refusals if subject.backend == "deepspeed" else ():
        reason = f"zftune run refuses it: allowed {refusal.allowed}."
        yield subject.finding(DEEPSPEED, refusal.field, "crashes", reason, backends=UPSTREAM)


RULES: tuple[Rule, ...] = (zenflow, deepspeed)
