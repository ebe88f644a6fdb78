"""Rules about the file as a whole: its text, names that nobody knows, the word "auto", the "zftune" section."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from zftune.check.config import FILLED, at, leaves
from zftune.check.findings import MISSING, Change, Finding
from zftune.check.known import KNOWN, LAST_KNOWN, OWN_KNOBS
from zftune.check.subject import BOTH, OFFLOAD, OURS, UPSTREAM, ZENFLOW, ZERO, Rule, Subject, change, left_out

_NOT_A_NUMBER = re.compile(r"[+-]?(nan|inf(inity)?),?", re.IGNORECASE)
_NEEDS_WARM_UP = (0, 19, 6)
_MAY_BE_INFINITE = ("steps_per_print",)


def text(subject: Subject) -> Iterator[Finding]:
    """Comments, and names that stand twice: `json.load` of Hugging Face and DeepSpeed's own reader differ."""
    if not subject.is_json:
        reason = "DeepSpeed reads comments and unquoted names. The Trainer and Accelerate read plain JSON only."
        severity = subject.hugging_face
        yield Finding(
            rule="not-json",
            path=("the file",),
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


def unknown(subject: Subject) -> Iterator[Finding]:
    """Names in sections that DeepSpeed reads strictly."""
    for dotted, known in KNOWN.items():
        for name in subject.section(dotted):
            if name in known or (dotted == ZERO and name == "zftune"):
                continue
            yield _unknown(subject, dotted, str(name))


def _unknown(subject: Subject, dotted: str, name: str) -> Finding:
    path = (*dotted.split("."), name)
    mends: tuple[Change, ...] = (Change(path, MISSING),)
    reason = f'DeepSpeed has no such setting in "{dotted.rpartition(".")[2]}", and refuses the file.'
    backends = BOTH if dotted == ZENFLOW else UPSTREAM
    if dotted == ZENFLOW and name in OWN_KNOBS:
        reason = "It is a knob of the runtime of zftune run alone. DeepSpeed refuses the file."
        backends = UPSTREAM
        mends = subject.elsewhere() or mends
    newer = subject.release > LAST_KNOWN
    return Finding(
        rule="unknown-setting",
        path=path,
        value=at(subject.config, path),
        severity="note" if newer else "crashes",
        reason=reason if not newer else f"DeepSpeed 0.19.8 has no such setting; {subject.version} may.",
        backends=backends,
        changes=() if newer else mends,
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


def batch(subject: Subject) -> Iterator[Finding]:
    """Settings outside of ZeRO that end every run."""
    params = "optimizer.params.max_grad_norm"
    norm = subject.at(params)
    if norm is not MISSING and subject.optimizer is not None:
        mends = [left_out(params)]
        if subject.at("gradient_clipping") is MISSING:
            mends.append(change("gradient_clipping", norm))
        reason = "DeepSpeed refuses it among the optimizer's settings."
        yield subject.finding("max-grad-norm", params, "crashes", reason, *mends, backends=BOTH)
    steps = subject.at("scheduler.params.warmup_num_steps")
    if isinstance(steps, int) and not isinstance(steps, bool) and steps <= 0 and subject.release >= _NEEDS_WARM_UP:
        reason = "DeepSpeed 0.19.6 and newer refuse a warm-up of no steps."
        mend = change("scheduler.params.warmup_num_steps", 1)
        yield subject.finding(
            "no-warmup-steps", "scheduler.params.warmup_num_steps", "crashes", reason, mend, backends=BOTH
        )
    if subject.enabled("amp") and subject.stage:
        yield subject.finding(
            "amp",
            "amp.enabled",
            "crashes",
            "DeepSpeed refuses Apex amp with ZeRO.",
            backends=UPSTREAM,
            advice='"bf16": {"enabled": true} in its place',
        )


def deprecated(subject: Subject) -> Iterator[Finding]:
    """Older forms of the sections."""
    if subject.at(f"{ZERO}.cpu_offload") is True:
        offload = subject.at(OFFLOAD)
        there = isinstance(offload, Mapping)
        mends: list[Change] = [left_out(f"{ZERO}.cpu_offload")]
        if not there:
            mends.append(change(f"{OFFLOAD}.device", "cpu"))
        reason: Any = "The runtime of zftune run does not see this old form, and leaves the training to DeepSpeed."
        if there:
            reason = 'DeepSpeed refuses it beside "offload_optimizer".'
        yield subject.finding(
            "cpu-offload",
            f"{ZERO}.cpu_offload",
            "crashes" if there else "ignored",
            reason,
            *mends,
            backends=UPSTREAM if there else OURS,
        )


RULES: tuple[Rule, ...] = (text, unknown, zftune_section, auto, numbers, batch, deprecated)
