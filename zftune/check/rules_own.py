"""What `zftune run` refuses, in its own words: whatever it raises the first of is found here."""

from __future__ import annotations

from collections.abc import Iterator

from zftune.check.findings import Change, Finding
from zftune.check.subject import OURS, UPSTREAM, Rule, Subject, change, left_out
from zftune.integrations.deepspeed.ds_config import MISSING
from zftune.integrations.deepspeed.refusal import INSTEAD

ZENFLOW, DEEPSPEED = NAMES = ("backend-zenflow", "backend-deepspeed")


def zenflow(subject: Subject) -> Iterator[Finding]:
    """Unless the other backend is asked for."""
    elsewhere = () if subject.forced else (change("zftune.backend", "deepspeed"),)
    for refusal in subject.own_refusals if subject.backend != "deepspeed" else ():
        reason = f"zftune run refuses it: allowed {refusal.allowed}."
        mends: tuple[Change, ...] = ()
        if refusal.allowed.endswith(INSTEAD):
            mends = elsewhere
        elif subject.at(refusal.field) is not MISSING:
            mends = (left_out(refusal.field),)
        yield subject.finding(ZENFLOW, refusal.field, "crashes", reason, *mends, backends=OURS)


def deepspeed(subject: Subject) -> Iterator[Finding]:
    """Where that backend is asked for."""
    for refusal in subject.upstream_refusals if subject.backend == "deepspeed" else ():
        reason = f"zftune run refuses it: allowed {refusal.allowed}."
        yield subject.finding(DEEPSPEED, refusal.field, "crashes", reason, backends=UPSTREAM)


RULES: tuple[Rule, ...] = (zenflow, deepspeed)
