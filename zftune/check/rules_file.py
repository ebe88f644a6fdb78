"""Rules about the file as a whole: its text, names that nobody knows, the word "auto", the "zftune" section."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from zftune.check.findings import THE_FILE, Change, Finding
from zftune.check.subject import BOTH, UPSTREAM, ZENFLOW, ZERO, Rule, Subject, change, left_out
from zftune.integrations.deepspeed.ds_config import FILLED, MISSING, leaves

_NOT_A_NUMBER = re.compile(r"[+-]?(nan|inf(inity)?),?", re.IGNORECASE)
_MAY_BE_INFINITE = ("steps_per_print",)


def text(subject: Subject) -> Iterator[Finding]:
    """Comments, and names that stand twice: `json.load` of Hugging Face and DeepSpeed's own reader differ."""
    if subject.flaw is not None:
        reason = (
            f"It is not plain JSON ({subject.flaw}). DeepSpeed reads comments and unquoted names; the Trainer and "
            "Accelerate do not."
        )
        severity = subject.hugging_face
        yield Finding(
            rule="not-json",
            path=THE_FILE,
            value=MISSING,
            severity="crashes" if severity else "note",
            reason=reason,
            backends=BOTH,
            advice="plain JSON, as --fix writes it",
        )
    for name in dict.fromkeys(subject.duplicates):
        yield Finding(
            rule="duplicate-name",
            path=(name,),
            value=MISSING,
            severity="crashes",
            reason="It stands twice in one section. DeepSpeed refuses that; Hugging Face takes the last one.",
            backends=BOTH,
            advice="one of them; --fix keeps the last",
        )


def zftune_section(subject: Subject) -> Iterator[Finding]:
    """The section of this package: where it stands, and what it holds."""
    misplaced = subject.at(f"{ZERO}.zftune")
    if misplaced is not MISSING:
        mends = [left_out(f"{ZERO}.zftune")]
        if subject.at("zftune") is MISSING and isinstance(misplaced, Mapping):
            mends.append(change("zftune", dict(misplaced)))
        reason = "DeepSpeed refuses names that it does not know here. At the top level it lets them be."
        yield subject.finding("zftune-misplaced", f"{ZERO}.zftune", "crashes", reason, *mends, backends=BOTH)
    section = subject.at("zftune")
    autos = [path for path, value in leaves(section, ("zftune",)) if value == "auto"]
    for path in autos:
        yield subject.finding(
            "zftune-auto",
            ".".join(path),
            "crashes",
            'Hugging Face takes the word "auto" for its own wherever it stands, and ends where it has no value for it.',
            Change(path, MISSING),
            backends=BOTH,
        )
    yield from _bad_section(subject, {(ZERO, "zftune"), *autos})


def _bad_section(subject: Subject, told: set[tuple[str, ...]]) -> Iterator[Finding]:
    from zftune.integrations.deepspeed.section import BEST, refusals

    wrong = list(refusals(subject.config))
    for refusal in wrong:
        finding = subject.finding(
            "zftune-section",
            refusal.field,
            "crashes",
            f"zftune run refuses it: is {refusal.value}, allowed {refusal.allowed}.",
            left_out(refusal.field),
            backends=BOTH,
        )
        if finding.path not in told:
            yield finding
    preset = subject.at("zftune.preset")
    fault = None if wrong or preset is MISSING or not subject.fault_of_preset else subject.fault_of_preset(preset)
    if fault is not None:
        reason = f"zftune run refuses it: {fault}."
        advice = f'"{BEST}", a name that `zftune presets list` shows, or a preset\'s file'
        yield subject.finding("zftune-preset", "zftune.preset", "crashes", reason, backends=BOTH, advice=advice)


def auto(subject: Subject) -> Iterator[Finding]:
    """Places where Hugging Face has no value for "auto": Accelerate goes through all, and ends at the first."""
    for path, value in leaves(subject.config) if subject.hugging_face else ():
        dotted = ".".join(path)
        if value != "auto" or dotted in FILLED or path[0] == "zftune":
            continue
        interval = dotted == f"{ZENFLOW}.update_interval"
        yield Finding(
            rule="auto-not-filled",
            path=path,
            value=value,
            severity="crashes",
            reason='The Trainer and Accelerate end with a ValueError: they have no value for "auto" here.',
            backends=BOTH,
            changes=(Change(path, 4 if interval else MISSING),),
        )


def numbers(subject: Subject) -> Iterator[Finding]:
    """NaN and Infinity. JSON has neither, and DeepSpeed's reader takes them for words."""
    for path, value in leaves(subject.config):
        odd = isinstance(value, float) and not math.isfinite(value)
        odd = odd or (isinstance(value, str) and _NOT_A_NUMBER.fullmatch(value.strip()) is not None)
        if odd and path[-1] not in _MAY_BE_INFINITE:
            yield Finding(
                rule="not-a-number",
                path=path,
                value=value,
                severity="crashes",
                reason="JSON has no such number. DeepSpeed reads a word, or trains with NaN.",
                backends=BOTH,
                advice="a finite number",
            )


def amp(subject: Subject) -> Iterator[Finding]:
    """Found where the engine is made, not where the file is read."""
    if subject.enabled("amp") and subject.stage:
        yield subject.finding(
            "amp",
            "amp.enabled",
            "crashes",
            "DeepSpeed refuses Apex amp with ZeRO.",
            backends=UPSTREAM,
            advice='"bf16": {"enabled": true} in its place',
        )


RULES: tuple[Rule, ...] = (text, zftune_section, auto, numbers, amp)
