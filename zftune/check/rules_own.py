"""Rules about the backend zenflow, the runtime of `zftune run`: what it refuses, in its own words."""

from __future__ import annotations

from collections.abc import Iterator

from zftune.check.findings import Change, Finding
from zftune.check.subject import OURS, Rule, Subject, change

NAME = "backend-zenflow"


def refused(subject: Subject) -> Iterator[Finding]:
    """A fault where that backend is asked for; else a note, since `zftune run` says so before anything is trained."""
    asked = subject.backend == "zenflow"
    mends: tuple[Change, ...] = (change("zftune.backend", "deepspeed"),) if asked and not subject.forced else ()
    for sentence in subject.own_refusals if subject.backend != "deepspeed" else ():
        name, allowed = sentence.partition(" ")[0], sentence.rpartition(", allowed ")[2]
        reason = f"zftune run refuses it: allowed {allowed}."
        yield subject.finding(NAME, name, "crashes" if asked else "note", reason, *mends, backends=OURS)


RULES: tuple[Rule, ...] = (refused,)
