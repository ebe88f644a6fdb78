"""Rules about any setting: what DeepSpeed and `zftune run` refuse, and words and names that nobody reads."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from zftune.ds_config.facts import BATCH, NAMES, OWN_KNOBS, SAFE_UPDATE_INTERVAL
from zftune.ds_config.reading import FILLED, MISSING, SettingPath, at, leaves, offload_device, path_of, truth
from zftune.integrations.deepspeed.asking import UNTESTED, Fault
from zftune.integrations.deepspeed.check.findings import AUTO, THE_FILE, Change, Finding, Severity
from zftune.integrations.deepspeed.check.rules import BOTH, OURS, UPSTREAM
from zftune.integrations.deepspeed.check.subject import ZENFLOW, ZERO, Subject, changes
from zftune.integrations.deepspeed.outcome import TAKEN_OVER, divided_by
from zftune.integrations.deepspeed.precision import SWITCHED
from zftune.integrations.deepspeed.section import BEST, NO_PRESET, Refusal, meant, mistyped
from zftune.integrations.deepspeed.section import refusals as refusals_of_section
from zftune.store.types import Backend

REFUSED, UNKNOWN, OWN, ASKED = GENERAL = (
    "refused-by-deepspeed",
    "unknown-setting",
    "backend-zenflow",
    "backend-deepspeed",
)
"""Rules that tell of everything which is refused. Others know a better value for some of it, or a better reason."""
_NOT_A_NUMBER = re.compile(r"[+-]?(nan|inf(inity)?),?", re.IGNORECASE)
_DEFAULTS_WORK = ("steps_per_print", "fp16.loss_scale_window")
# What both optimizers of ZenFlow take: the host's, and torch's AdamW for the selected columns.
_ADAM_PARAMS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "max_grad_norm")
_WANTED = (
    "gradient_clipping",
    "optimizer.type",
    *(f"optimizer.params.{name}" for name in ("lr", "betas", "eps", "weight_decay", "momentum")),
    "scheduler.type",
    *(f"scheduler.params.{name}" for name in ("warmup_min_lr", "warmup_max_lr", "cycle_min_lr", "cycle_max_lr")),
    f"{ZERO}.stage",
    f"{ZERO}.offload_optimizer.device",
    f"{ZERO}.offload_param.device",
)
"""Without them it trains, but otherwise: nobody writes a learning rate to have the default."""
_IN_ZERO = ("zenflow", "offload_optimizer", "offload_param", "stage")

General: TypeAlias = Callable[[Subject], Iterator[Finding]]


def _finding(
    subject: Subject,
    rule: str,
    where: str | SettingPath,
    severity: Severity,
    reason: str | Refusal,
    *mends: Change,
    backends: tuple[Backend, ...] = BOTH,
    advice: str = "",
) -> Finding:
    path = path_of(where) if isinstance(where, str) else where
    return Finding(
        rule=rule,
        path=path,
        value=at(subject.config, path),
        severity=severity,
        reason=reason.reason if isinstance(reason, Refusal) else reason,
        refusal=reason if isinstance(reason, Refusal) else None,
        backends=backends,
        changes=mends,
        advice=advice,
    )


def duplicates(subject: Subject) -> Iterator[Finding]:
    """Names that stand twice: DeepSpeed refuses them, `json.load` takes the last one."""
    for name in dict.fromkeys(subject.duplicates):
        reason = "It stands twice in one section. DeepSpeed refuses that; Hugging Face takes the last one."
        found = _finding(
            subject, "duplicate-name", (name,), "crashes", reason, advice="one of them; --fix keeps the last"
        )
        yield found.without_value()


def zftune_section(subject: Subject) -> Iterator[Finding]:
    """The section of this package: what it holds."""
    autos = [path for path, value in leaves(subject.at("zftune"), ("zftune",)) if value == "auto"]
    for path in autos:
        reason = (
            'Hugging Face takes the word "auto" for its own wherever it stands, and ends where it has no value for it.'
        )
        yield _finding(subject, "zftune-auto", path, "crashes", reason, Change(path, MISSING))
    wrong = [one for one in refusals_of_section(subject.config) if one.field != f"{ZERO}.zftune"]
    for refusal in wrong:
        mends = () if "did you mean" in refusal.wanted else changes({refusal.field: MISSING})
        if path_of(refusal.field) not in autos:
            yield _finding(subject, "zftune-section", refusal.field, "crashes", refusal, *mends)
    preset = subject.at("zftune.preset")
    fault = None if wrong or preset is MISSING or not subject.fault_of_preset else subject.fault_of_preset(preset)
    if fault is not None:
        advice = f'"{BEST}", "{NO_PRESET}", a name that `zftune presets list` shows, or a preset\'s file'
        yield _finding(
            subject, "zftune-preset", "zftune.preset", "crashes", f"zftune run refuses it: {fault}.", advice=advice
        )


def auto(subject: Subject) -> Iterator[Finding]:
    """The word "auto", for which Hugging Face has a value in some places alone: Accelerate ends at others."""
    autos = [path for path, value in leaves(subject.config) if value == "auto"] if subject.hugging_face else []
    for path in autos:
        if ".".join(path) not in FILLED and path[0] != "zftune":
            reason = 'The Trainer and Accelerate end with a ValueError: they have no value for "auto" here.'
            interval = ".".join(path) == f"{ZENFLOW}.update_interval"
            mend = Change(path, SAFE_UPDATE_INTERVAL if interval else MISSING)
            yield _finding(subject, "auto-not-filled", path, "crashes", reason, mend)
    filled = [".".join(path) for path in autos if ".".join(path) in FILLED]
    if filled and not subject.through_hugging_face:
        reason = f'Only Hugging Face\'s Trainer and Accelerate put a value in for "auto": {", ".join(filled)}.'
        advice = "A script that calls deepspeed.initialize() itself needs values of its own"
        yield _finding(subject, AUTO, filled[0], "note", reason, advice=advice)


def numbers(subject: Subject) -> Iterator[Finding]:
    """NaN and Infinity. JSON has neither, and DeepSpeed's reader takes them for words."""
    for path, value in leaves(subject.config):
        odd = isinstance(value, float) and not math.isfinite(value)
        odd = odd or (isinstance(value, str) and _NOT_A_NUMBER.fullmatch(value.strip()) is not None)
        if odd and path[-1] != "steps_per_print":  # Accelerate's is infinite
            reason = "JSON has no such number. DeepSpeed reads a word, or trains with NaN."
            yield _finding(subject, "not-a-number", path, "crashes", reason, advice="a finite number")


def divisors(subject: Subject) -> Iterator[Finding]:
    """Found in a step: 0 ends it with a ZeroDivisionError, a word with a TypeError."""
    for refusal in divided_by(subject.given):
        path = path_of(refusal.field)
        if any(fault.path == path for fault in subject.faults):
            continue  # this version looks at it
        reason = f"DeepSpeed ends while it trains: it divides by it, and takes {refusal.allowed}."
        mend = subject.number_in(path) or (Change(path, MISSING) if refusal.field in _DEFAULTS_WORK else None)
        mends, advice = ((), refusal.allowed) if mend is None else ((mend,), "")
        yield _finding(subject, "divided-by", path, "crashes", reason, *mends, advice=advice)


def zenflow_optimizer(subject: Subject) -> Iterator[Finding]:
    """Settings that one of ZenFlow's two optimizers does not have."""
    params = subject.at("optimizer.params")
    if not (subject.flattens and subject.optimizer in ("adam", "adamw") and isinstance(params, Mapping)):
        return
    for name in params:
        if name in _ADAM_PARAMS:
            continue
        path = ("optimizer", "params", name)
        mends: tuple[Change, ...] = (Change(path, MISSING),)
        if name == "adam_w_mode" and params[name] is False and subject.optimizer == "adam":
            mends = subject.elsewhere() or mends  # without it DeepSpeed's Adam is AdamW
        near = meant(path)
        reason = "ZenFlow gives it to two optimizers, of which one does not know it: TypeError."
        yield _finding(
            subject, "zenflow-optimizer-setting", path, "crashes", reason, *(() if near else mends),
            backends=UPSTREAM, advice=near,
        )  # fmt: skip


def refused(subject: Subject) -> Iterator[Finding]:
    """Each setting with which DeepSpeed ends before the first step, by its own word."""
    for fault in subject.faults:
        path = fault.path or THE_FILE
        if path[0] in BATCH and subject.hugging_face and subject.at(path[0]) == "auto":
            continue  # its value is the Trainer's
        reason = f"DeepSpeed refuses it: {fault.error.rstrip('.')}."
        if fault.unknown and len(path) > 1:
            reason = f'DeepSpeed refuses it: there is no such setting in "{".".join(path[:-1])}".'
        own = path[:-1] == path_of(ZENFLOW) and path[-1] in OWN_KNOBS
        if own:
            reason = "It is a setting of the runtime of zftune run alone. DeepSpeed refuses the file."
        near = "" if own or not fault.unknown else fault.near or meant(path)
        mends = () if near else _mends(subject, fault)
        both = near or path[0] not in TAKEN_OVER or offload_device(subject.given) == "none"
        yield _finding(
            subject,
            UNKNOWN if fault.unknown else REFUSED,
            path,
            "crashes",
            reason,
            *mends,
            backends=BOTH if both else UPSTREAM,
            advice=near or ("" if mends else fault.near),
        )


def _mends(subject: Subject, fault: Fault) -> tuple[Change, ...]:
    dotted, value = ".".join(fault.path), at(subject.config, fault.path)
    if not fault.path:
        return ()
    if number := subject.number_in(fault.path):
        return (number,)
    if word := mistyped(value, fault.near):
        return (Change(fault.path, word),)
    if UNTESTED in fault.error:
        return (Change((UNTESTED,), True),)
    if fault.path[0] in BATCH:
        return tuple(changes(_batch(subject, fault.path[0])))
    remedy = _REMEDIES.get(dotted)
    if remedy is not None and (remedies := remedy(subject, value)):
        return tuple(changes(remedies))
    if dotted.startswith(ZENFLOW) and fault.path[-1] in (*OWN_KNOBS, "topk_ratio") and subject.elsewhere():
        return subject.elsewhere()
    if value == 0 and subject.is_taken(Change(fault.path, 1)) and "integer" in fault.error:
        return (Change(fault.path, 1),)
    return (Change(fault.path, MISSING),) if value is not MISSING and dotted not in _WANTED else ()


def _offloaded(dotted: str) -> Callable[[Subject, Any], dict[str, Any]]:
    return lambda _, value: {dotted: {"device": value}} if value in ("cpu", "nvme") else {}


def _switched(dotted: str) -> Callable[[Subject, Any], dict[str, Any]]:
    """A section for a truth value in its place, where it switches a dtype on."""
    return lambda _, value: {} if truth(value) is None else {dotted: {"enabled": truth(value)}}


def _ratio(subject: Subject, _: Any) -> dict[str, Any]:
    elsewhere = {".".join(one.path): one.value for one in subject.elsewhere()}
    return elsewhere or {f"{ZERO}.offload_optimizer.ratio": 1.0}


def _topk_ratio(subject: Subject, value: Any) -> dict[str, Any]:
    if subject.elsewhere():
        return {".".join(one.path): one.value for one in subject.elsewhere()}
    return {ZENFLOW: MISSING} if value == 0 else {f"{ZENFLOW}.topk_ratio": 0.5} if value == 1 else {}


def _clipping(subject: Subject, value: Any) -> dict[str, Any]:
    moved = {} if subject.has("gradient_clipping") else {"gradient_clipping": value}
    return {"optimizer.params.max_grad_norm": MISSING, **moved}


_REMEDIES: dict[str, Callable[[Subject, Any], dict[str, Any]]] = {
    "optimizer.params.max_grad_norm": _clipping,
    f"{ZERO}.stage": lambda *_: {f"{ZERO}.stage": 2},
    f"{ZERO}.offload_optimizer": _offloaded(f"{ZERO}.offload_optimizer"),
    f"{ZERO}.offload_param": _offloaded(f"{ZERO}.offload_param"),
    f"{ZERO}.offload_optimizer.ratio": _ratio,
    f"{ZENFLOW}.topk_ratio": _topk_ratio,
    "scheduler.params": lambda *_: {"scheduler.params": {}},
    **{name: _switched(name) for name in SWITCHED},
}
"""What to set in the place of what DeepSpeed refuses; without an entry it is left out, if nothing is lost by that."""


def _batch(subject: Subject, name: str) -> dict[str, Any]:
    whole, micro, passes = BATCH
    if name != whole or not subject.has(whole):
        return {name: 1}
    if subject.at(micro) not in (MISSING, None):
        return {whole: MISSING}
    return {micro: 1, whole: MISSING, passes: MISSING}


def misspelled(subject: Subject) -> Iterator[Finding]:
    """DeepSpeed ignores unknown names at the top level, and so does the runtime of `zftune run`."""
    for section in [one for one in NAMES if len(one) < 2]:
        found = at(subject.config, section)
        for name in found if isinstance(found, Mapping) else ():
            near = meant((*section, name))
            if near and name not in _IN_ZERO:
                reason = "No setting has this name."
                yield _finding(subject, "misspelled-name", (*section, name), "ignored", reason, advice=near)


def zenflow(subject: Subject) -> Iterator[Finding]:
    """What `zftune run` refuses with its own runtime, unless the other backend is asked for."""
    for refusal in subject.own_refusals if subject.backend != "deepspeed" else ():
        mends = _own_mends(subject, refusal)
        yield _finding(subject, OWN, refusal.field, "crashes", refusal, *mends, backends=OURS)


def _own_mends(subject: Subject, refusal: Refusal) -> tuple[Change, ...]:
    path, value = path_of(refusal.field), subject.at(refusal.field)
    if number := subject.number_in(path):
        return (number,)
    if word := mistyped(value, refusal.wanted):
        return (Change(path, word),)
    remedies = _REMEDIES[refusal.field](subject, value) if refusal.field in (*SWITCHED, f"{ZERO}.stage") else {}
    if remedies:
        return tuple(changes(remedies))
    if refusal.instead and not refusal.near:
        return () if subject.forced else (Change(("zftune", "backend"), "deepspeed"),)
    lost = value is MISSING or refusal.field in _WANTED or "did you mean" in refusal.wanted
    return () if lost else (Change(path, MISSING),)


def deepspeed(subject: Subject) -> Iterator[Finding]:
    """What `zftune run` refuses with DeepSpeed's runtime, where that is asked for."""
    for refusal in subject.upstream_refusals if subject.backend == "deepspeed" else ():
        yield _finding(subject, ASKED, refusal.field, "crashes", refusal, backends=UPSTREAM)


GENERAL_RULES: tuple[General, ...] = (
    duplicates,
    zftune_section,
    auto,
    numbers,
    divisors,
    zenflow_optimizer,
    refused,
    misspelled,
    zenflow,
    deepspeed,
)
