"""What DeepSpeed itself refuses, by its own reading of the file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zftune.check.findings import Change, Finding
from zftune.check.subject import BOTH, UPSTREAM, Rule, Subject, change, left_out
from zftune.integrations.deepspeed.ds_config import MISSING, at, is_hugging_face, offload_device, path_of
from zftune.integrations.deepspeed.facts import OWN_KNOBS
from zftune.integrations.deepspeed.support import TAKEN_OVER
from zftune.integrations.deepspeed.tables import newest
from zftune.integrations.deepspeed.verdict import BATCH, NONE, Fault

REFUSED, UNKNOWN = NAMES = ("refused-by-deepspeed", "unknown-setting")
"""Names of the rule; other rules that tell of the same setting come first."""
_USELESS = ("zenflow", "offload_optimizer", "offload_param", "stage")


def refused(subject: Subject) -> Iterator[Finding]:
    """Each setting with which DeepSpeed ends before the first step."""
    for fault in subject.faults:
        dotted = ".".join(fault.path)
        if fault.path[0] in BATCH and is_hugging_face(subject.config) and subject.at(dotted) == "auto":
            continue  # its value is the Trainer's
        reason = f"DeepSpeed refuses it: it takes {fault.allowed}."
        if fault.unknown and len(fault.path) > 1:
            named = "" if fault.allowed == NONE else f" It takes {fault.allowed}."
            reason = f'DeepSpeed refuses it: there is no such setting in "{fault.path[-2]}".{named}'
        if fault.path[:2] == ("zero_optimization", "zenflow") and fault.path[-1] in OWN_KNOBS:
            reason = "It is a knob of the runtime of zftune run alone. DeepSpeed refuses the file."
        mends = () if subject.is_guessed else tuple(_mends(subject, fault))
        if subject.is_guessed:
            reason = f"DeepSpeed {newest().version} refuses it; {subject.version} may take it."
        yield Finding(
            rule=UNKNOWN if fault.unknown else REFUSED,
            path=fault.path,
            value=at(subject.config, fault.path),
            severity="note" if subject.is_guessed else "crashes",
            reason=reason,
            backends=_whom(subject, fault),
            changes=mends,
            advice="" if mends else fault.allowed,
        )


def _whom(subject: Subject, fault: Fault) -> tuple[Any, ...]:
    """Sections that the backend zenflow takes over it reads itself, where it trains."""
    return UPSTREAM if fault.path[0] in TAKEN_OVER and offload_device(subject.given) != "none" else BOTH


def _mends(subject: Subject, fault: Fault) -> Iterator[Change]:
    dotted, value = ".".join(fault.path), at(subject.config, fault.path)
    if fault.path[:2] == ("zero_optimization", "zenflow") and fault.path[-1] in OWN_KNOBS and subject.elsewhere():
        yield from subject.elsewhere()
    elif dotted == "optimizer.params.max_grad_norm":
        yield left_out(dotted)
        if subject.at("gradient_clipping") is MISSING:
            yield change("gradient_clipping", value)
    elif dotted == "zero_optimization.stage":
        yield change(dotted, 2)
    elif dotted in ("zero_optimization.offload_optimizer", "zero_optimization.offload_param") and value in (
        "cpu",
        "nvme",
    ):
        yield change(dotted, {"device": value})
    elif dotted == "optimizer.type" and "zero_allow_untested_optimizer" in fault.allowed:
        yield change("zero_allow_untested_optimizer", True)
    elif fault.path[0] in BATCH:
        yield from _batch(subject, fault)
    elif value is not MISSING and dotted not in ("optimizer.type", "scheduler.type"):
        yield left_out(dotted)
    elif dotted == "scheduler.params":
        yield change(dotted, {})


def _batch(subject: Subject, fault: Fault) -> Iterator[Change]:
    """Sizes that do not fit together: what a rank takes stays as it is."""
    name = fault.path[0]
    if subject.at(name) is MISSING:
        yield change(name, 1)
    elif name == BATCH[0] and subject.at(BATCH[1]) not in (MISSING, None):
        yield left_out(name)
    elif name == BATCH[0]:
        yield change(BATCH[1], 1)
        yield left_out(name)
        yield left_out(BATCH[2])
    else:
        yield change(name, 1)


def misplaced(subject: Subject) -> Iterator[Finding]:
    """Sections of ZeRO at the top level, where DeepSpeed never looks."""
    for name in _USELESS:
        value = subject.at(name)
        if value is MISSING:
            continue
        there = subject.at(f"zero_optimization.{name}")
        mends = [left_out(name)]
        if there is MISSING:
            mends.append(change(f"zero_optimization.{name}", value))
        reason = 'DeepSpeed reads it in "zero_optimization" only: here it has no effect.'
        yield subject.finding("misplaced-section", name, "ignored", reason, *mends, backends=BOTH)
    allow = "zero_optimization.zero_allow_untested_optimizer"
    if subject.at(allow) is not MISSING:
        mends = [left_out(allow)]
        if subject.at("zero_allow_untested_optimizer") is MISSING:
            mends.append(change("zero_allow_untested_optimizer", subject.at(allow)))
        reason = "DeepSpeed reads it at the top level, and refuses it here."
        whom = _whom(subject, Fault(path_of(allow), ""))
        yield subject.finding("misplaced-section", allow, "crashes", reason, *mends, backends=whom)


def undecided(subject: Subject) -> Iterator[Finding]:
    """Sections that nobody could be asked about."""
    for name in subject.undecided:
        reason = "No table is about this section, and there is no DeepSpeed of this version to be asked."
        yield subject.finding("not-judged", name, "note", reason, backends=BOTH)


RULES: tuple[Rule, ...] = (refused, misplaced, undecided)
