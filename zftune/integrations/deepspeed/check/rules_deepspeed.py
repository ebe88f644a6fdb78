"""What DeepSpeed refuses by its own reading of a file, faults of the file itself, and of precision."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from zenflow.config import is_number
from zftune.ds_config.facts import OWN_KNOBS, SAFE_UPDATE_INTERVAL
from zftune.ds_config.reading import FILLED, MISSING, at, is_hugging_face, leaves, offload_device, path_of, truth
from zftune.ds_config.tables import newest
from zftune.integrations.deepspeed.check.findings import AUTO, THE_FILE, Change, Finding, Severity
from zftune.integrations.deepspeed.check.subject import (
    BOTH,
    UPSTREAM,
    ZENFLOW,
    ZERO,
    Rule,
    Subject,
    change,
    left_out,
    of_zenflow,
)
from zftune.integrations.deepspeed.outcome import A_NUMBER, TAKEN_OVER, divided_by
from zftune.integrations.deepspeed.precision import SWITCHED
from zftune.integrations.deepspeed.verdict import BATCH, NONE, Fault, meant, misspelt, mistyped

_WORDS = {"bf16": ("bf16", "bfloat16"), "fp16": ("fp16", "float16", "half"), "fp32": ("fp32", "float32", "float")}
_LEAVES_LOSS = (0, 19)
_WINDOW = "fp16.loss_scale_window"
_DEFAULT_WINDOW = 1000
_NO_MASTER = 'zftune run\'s runtime has masters for them; or no "zenflow" section'


def bf16(subject: Subject) -> Iterator[Finding]:
    """Selected columns have no fp32 master, and count steps in bf16: study 002 `no_master`, `step_count_stuck`."""
    name = "bfloat16" if subject.at("bf16") is MISSING else "bf16"
    reason = (
        "Selected columns have no fp32 masters: updates below bf16's resolution are lost, and their step count sticks "
        "at 256."
    )
    if subject.enabled(name):
        advice = "" if subject.elsewhere() else _NO_MASTER
        yield subject.finding("zenflow-bf16", f"{name}.enabled", "wrong", reason, *subject.elsewhere(), advice=advice)
    elif subject.at(f"{name}.enabled") == "auto":
        yield subject.finding("zenflow-bf16", f"{name}.enabled", "note", f"With --bf16: {reason}", advice=_NO_MASTER)
    check = f"{name}.check_grad_overflow"
    if subject.enabled(name) and subject.at(check) is True:
        reason = "Selected columns are updated before the check: an infinite gradient reaches their weights."
        mends = subject.elsewhere() or (change(check, False),)
        yield subject.finding("zenflow-overflow", check, "ignored", reason, *mends)


def fp16(subject: Subject) -> Iterator[Finding]:
    """Selected gradients are not unscaled, from reading upstream's code: DeepSpeed has no fp16 on a CPU."""
    if subject.enabled("fp16"):
        reason = "Selected columns get gradients with the loss scale in them, infinite ones too."
        advice = "" if subject.elsewhere() else 'no "zenflow" section'
        yield subject.finding("zenflow-fp16", "fp16.enabled", "wrong", reason, *subject.elsewhere(), advice=advice)


def without_zero(subject: Subject) -> Iterator[Finding]:
    """`engine.backward()` scales the loss for ZeRO's optimizers alone; those of stage 0 unscale all the same."""
    if not subject.enabled("fp16") or subject.stage or subject.at("fp16.loss_scale") == 1:
        return
    if subject.release < _LEAVES_LOSS or subject.has_zenflow:
        return
    reason = (
        "Without a ZeRO stage the loss is not scaled, but gradients are divided by the loss scale: clipping and the "
        "optimizer see a fraction of them, and small ones are lost."
    )
    mends = subject.elsewhere() if subject.device != "none" else ()
    backends = BOTH if subject.device == "none" else UPSTREAM  # zftune run leaves to DeepSpeed what does not offload
    mend = change(f"{ZERO}.stage", 1)
    yield subject.finding("fp16-stage-0", "fp16.enabled", "wrong", reason, *(mends or (mend,)), backends=backends)


def doubling(subject: Subject) -> Iterator[Finding]:
    """`step()` moves the scale before it unscales, at every stage of ZeRO."""
    dynamic = subject.at("fp16.loss_scale") in (MISSING, 0)
    if not (subject.enabled("fp16") and dynamic and subject.stage):
        return
    window = subject.at(_WINDOW)
    steps = f"{window:g}" if is_number(window) else str(_DEFAULT_WINDOW)
    reason = (
        f"Where the loss scale doubles, after {steps} steps without an overflow, that step's gradients are divided by "
        "the new scale: they are half of what they should be."
    )
    yield subject.finding("loss-scale-doubles", _WINDOW, "note", reason)


def masters(subject: Subject) -> Iterator[Finding]:
    """16-bit masters are refused: its optimizer's class is another one."""
    for name in ("bf16", "fp16"):
        dotted = f"{name}.{name}_master_weights_and_grads"
        if subject.at(dotted) is True:
            reason = "DeepSpeed refuses 16-bit masters with ZenFlow."
            states = f"{name}.{name}_optimizer_states"
            more = (left_out(states),) if subject.at(states) is not MISSING else ()
            yield subject.finding("zenflow-16-bit-masters", dotted, "crashes", reason, change(dotted, False), *more)


def accumulation_dtype(subject: Subject) -> Iterator[Finding]:
    """ZeRO-1 in another dtype: study 002 `zero1_accumulation`."""
    dotted = "data_types.grad_accum_dtype"
    value = subject.at(dotted)
    if subject.stage != 1 or not isinstance(value, str):
        return
    model = "bf16" if subject.enabled("bf16", "bfloat16") else "fp16" if subject.enabled("fp16") else "fp32"
    if value.lower() not in _WORDS[model]:
        reason = f"With ZeRO-1 and ZenFlow the first step ends where it is not the model's dtype, {model}: TypeError."
        yield subject.finding("zenflow-accumulation-dtype", dotted, "crashes", reason, left_out(dotted))


PRECISION_RULES: tuple[Rule, ...] = (
    of_zenflow(bf16, fp16),
    without_zero,
    doubling,
    of_zenflow(masters, accumulation_dtype),
)


_TOTAL = "scheduler.params.total_num_steps"
_DEFAULT_WARM_UP = 1000
_DECAYS = {"WarmupDecayLR": "0", "WarmupCosineLR": "cos_min_ratio of what it was"}
_NOT_A_NUMBER = re.compile(r"[+-]?(nan|inf(inity)?),?", re.IGNORECASE)
_DEFAULTS_WORK = ("steps_per_print", _WINDOW)
_MAY_BE_INFINITE = ("steps_per_print",)


def text(subject: Subject) -> Iterator[Finding]:
    """Comments, and names that stand twice: `json.load` of Hugging Face and DeepSpeed's own reader differ."""
    if subject.flaw is not None:
        reason = (
            f"It is not plain JSON ({subject.flaw}). DeepSpeed reads comments and unquoted names; the Trainer and "
            "Accelerate do not."
        )
        severity: Severity = "crashes" if subject.hugging_face else "note"
        advice = "plain JSON, as --fix writes it"
        yield subject.finding("not-json", THE_FILE, severity, reason, backends=BOTH, advice=advice)
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
        reason = (
            'Hugging Face takes the word "auto" for its own wherever it stands, and ends where it has no value for it.'
        )
        yield subject.finding("zftune-auto", path, "crashes", reason, Change(path, MISSING), backends=BOTH)
    yield from _bad_section(subject, {(ZERO, "zftune"), *autos})


def _bad_section(subject: Subject, told: set[tuple[str, ...]]) -> Iterator[Finding]:
    from zftune.integrations.deepspeed.section import BEST, NO_PRESET, refusals

    wrong = list(refusals(subject.config))
    for refusal in wrong:
        mends = () if meant(path_of(refusal.field)) else (left_out(refusal.field),)
        finding = subject.finding("zftune-section", refusal.field, "crashes", refusal, *mends, backends=BOTH)
        if finding.path not in told:
            yield finding
    preset = subject.at("zftune.preset")
    fault = None if wrong or preset is MISSING or not subject.fault_of_preset else subject.fault_of_preset(preset)
    if fault is not None:
        reason = f"zftune run refuses it: {fault}."
        advice = f'"{BEST}", "{NO_PRESET}", a name that `zftune presets list` shows, or a preset\'s file'
        yield subject.finding("zftune-preset", "zftune.preset", "crashes", reason, backends=BOTH, advice=advice)


def auto(subject: Subject) -> Iterator[Finding]:
    """Places where Hugging Face has no value for "auto": Accelerate goes through all, and ends at the first."""
    for path, value in leaves(subject.config) if subject.hugging_face else ():
        dotted = ".".join(path)
        if value != "auto" or dotted in FILLED or path[0] == "zftune":
            continue
        interval = dotted == f"{ZENFLOW}.update_interval"
        reason = 'The Trainer and Accelerate end with a ValueError: they have no value for "auto" here.'
        mend = Change(path, SAFE_UPDATE_INTERVAL if interval else MISSING)
        yield subject.finding("auto-not-filled", path, "crashes", reason, mend, backends=BOTH)


def auto_in_own_loop(subject: Subject) -> Iterator[Finding]:
    """Who fills in "auto" is not known from the file."""
    if subject.through_hugging_face:
        return
    autos = [".".join(path) for path, value in leaves(subject.config) if value == "auto" and ".".join(path) in FILLED]
    if subject.hugging_face:
        reason = f'Only Hugging Face\'s Trainer and Accelerate put a value in for "auto": {", ".join(autos)}.'
        yield subject.finding(AUTO, autos[0], "note", reason, backends=BOTH)


def numbers(subject: Subject) -> Iterator[Finding]:
    """NaN and Infinity. JSON has neither, and DeepSpeed's reader takes them for words."""
    for path, value in leaves(subject.config):
        odd = isinstance(value, float) and not math.isfinite(value)
        odd = odd or (isinstance(value, str) and _NOT_A_NUMBER.fullmatch(value.strip()) is not None)
        if odd and path[-1] not in _MAY_BE_INFINITE:
            reason = "JSON has no such number. DeepSpeed reads a word, or trains with NaN."
            yield subject.finding("not-a-number", path, "crashes", reason, backends=BOTH, advice="a finite number")


def amp(subject: Subject) -> Iterator[Finding]:
    """Found where the engine is made, not where the file is read."""
    if subject.enabled("amp") and subject.stage:
        reason, advice = "DeepSpeed refuses Apex amp with ZeRO.", '"bf16": {"enabled": true} in its place'
        yield subject.finding("amp", "amp.enabled", "crashes", reason, advice=advice)


def clipping(subject: Subject) -> Iterator[Finding]:
    """Compared with a number in the first step: what is none ends it there."""
    value = at(subject.given, ("gradient_clipping",))
    if value is not MISSING and not isinstance(value, (int, float)):
        reason = f"DeepSpeed ends in the first step: it takes {A_NUMBER}."
        mend = subject.number_in(("gradient_clipping",))
        yield subject.finding(
            "clipping-no-number",
            "gradient_clipping",
            "crashes",
            reason,
            *((mend,) if mend is not None else ()),
            backends=UPSTREAM if subject.device != "none" else BOTH,
            advice="" if mend is not None else A_NUMBER,
        )


def divisors(subject: Subject) -> Iterator[Finding]:
    """Found in a step: 0 ends it with a ZeroDivisionError, a word with a TypeError."""
    for refusal in divided_by(subject.given):
        path = path_of(refusal.field)
        if any(fault.path == path for fault in subject.faults):
            continue  # this version looks at it
        reason = f"DeepSpeed ends while it trains: it divides by it, and takes {refusal.allowed}."
        mend = subject.number_in(path) or (left_out(refusal.field) if refusal.field in _DEFAULTS_WORK else None)
        mends, advice = ((), refusal.allowed) if mend is None else ((mend,), "")
        yield subject.finding("divided-by", path, "crashes", reason, *mends, backends=BOTH, advice=advice)


def decay(subject: Subject) -> Iterator[Finding]:
    """A schedule that is over before its warm-up is: DeepSpeed logs a warning, and trains."""
    kind, total = subject.at("scheduler.type"), subject.at(_TOTAL)
    warm_up = subject.at("scheduler.params.warmup_num_steps")
    warm_up = _DEFAULT_WARM_UP if warm_up is MISSING else warm_up
    if isinstance(kind, str) and kind in _DECAYS and is_number(total) and is_number(warm_up) and total < warm_up:
        reason = f"It is below warmup_num_steps, {warm_up:g}: after the warm-up the learning rate is {_DECAYS[kind]}."
        advice = "all steps of the training, those of the warm-up included"
        yield subject.finding("decay-within-warm-up", _TOTAL, "wrong", reason, backends=BOTH, advice=advice)


FILE_RULES: tuple[Rule, ...] = (text, zftune_section, auto, auto_in_own_loop, numbers, amp, clipping, divisors, decay)


REFUSED, UNKNOWN = DEEPSPEED_NAMES = ("refused-by-deepspeed", "unknown-setting")
"""Names of the rule; other rules that tell of the same setting come first."""
STAGE = f"{ZERO}.stage"
_WANTED = (
    "gradient_clipping",
    "optimizer.type",
    *(f"optimizer.params.{name}" for name in ("lr", "betas", "eps", "weight_decay", "momentum")),
    "scheduler.type",
    *(f"scheduler.params.{name}" for name in ("warmup_min_lr", "warmup_max_lr", "cycle_min_lr", "cycle_max_lr")),
    STAGE,
    f"{ZERO}.offload_optimizer.device",
    f"{ZERO}.offload_param.device",
)
"""Without them it trains, but otherwise: nobody writes a learning rate to have the default."""
_USELESS = ("zenflow", "offload_optimizer", "offload_param", "stage")


def refused(subject: Subject) -> Iterator[Finding]:
    """Each setting with which DeepSpeed ends before the first step."""
    for fault in subject.faults:
        dotted = ".".join(fault.path)
        if fault.path[0] in BATCH and is_hugging_face(subject.config) and subject.at(dotted) == "auto":
            continue  # its value is the Trainer's
        it = "a file without it" if at(subject.config, fault.path) is MISSING else "it"
        reason = f"DeepSpeed refuses {it}: it takes {fault.allowed}{f'; {fault.near}' if fault.near else ''}."
        if fault.unknown and len(fault.path) > 1:
            named = "" if fault.allowed == NONE else f", which takes {fault.allowed}"
            reason = f'DeepSpeed refuses it: there is no such setting in "{".".join(fault.path[:-1])}"{named}.'
        if fault.path[:2] == ("zero_optimization", "zenflow") and fault.path[-1] in OWN_KNOBS:
            reason = "It is a setting of the runtime of zftune run alone. DeepSpeed refuses the file."
        near = (fault.near or meant(fault.path)) if fault.unknown else ""
        mends = () if subject.is_guessed or near else tuple(_mends(subject, fault))
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
            advice=near or ("" if mends else fault.near or fault.allowed),
        )


def _whom(subject: Subject, fault: Fault) -> tuple[Any, ...]:
    """Sections that the backend zenflow takes over it reads itself, where it trains; it refuses misspelt names."""
    if fault.unknown and meant(fault.path):
        return BOTH
    return UPSTREAM if fault.path[0] in TAKEN_OVER and offload_device(subject.given) != "none" else BOTH


def can_be_left_out(dotted: str) -> bool:
    """Whether a file is as good without a setting that is refused: a misspelt one is no sign that nothing is wanted.

    Args:
        dotted: where it stands.
    """
    return dotted not in _WANTED and not meant(path_of(dotted))


def switched(dotted: str, value: Any) -> Change | None:
    """A section for a truth value in its place, where it switches a dtype on; None: it is none."""
    meant_on = truth(value) if dotted in SWITCHED else None
    return None if meant_on is None else change(dotted, {"enabled": meant_on})


def _mends(subject: Subject, fault: Fault) -> Iterator[Change]:
    dotted, value = ".".join(fault.path), at(subject.config, fault.path)
    if number := subject.number_in(fault.path):
        yield number
    elif word := mistyped(value, fault.near):
        yield change(dotted, word)
    elif fault.path[:2] == ("zero_optimization", "zenflow") and fault.path[-1] in OWN_KNOBS and subject.elsewhere():
        yield from subject.elsewhere()
    elif dotted == "optimizer.params.max_grad_norm":
        yield left_out(dotted)
        if subject.at("gradient_clipping") is MISSING:
            yield change("gradient_clipping", value)
    elif dotted == STAGE:
        yield change(STAGE, 2)
    elif dotted in ("zero_optimization.offload_optimizer", "zero_optimization.offload_param") and value in (
        "cpu",
        "nvme",
    ):
        yield change(dotted, {"device": value})
    elif switch := switched(dotted, value):
        yield switch
    elif fault.needs:
        yield change(fault.needs, True)
    elif fault.path[0] in BATCH:
        yield from _batch(subject, fault)
    elif value == 0 and fault.allowed == "an integer >= 1":
        yield change(dotted, 1)
    elif value is not MISSING and can_be_left_out(dotted):
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


def misspelled(subject: Subject) -> Iterator[Finding]:
    """DeepSpeed lets every name be at the top level, and so does the runtime of `zftune run`."""
    for name, near in misspelt(subject.config):
        if name not in _USELESS:
            reason = "No setting has this name."
            yield subject.finding("misspelled-name", name, "ignored", reason, backends=BOTH, advice=near)


def undecided(subject: Subject) -> Iterator[Finding]:
    """Sections that nobody could be asked about."""
    for name in subject.undecided:
        reason = "No table is about this section, and there is no DeepSpeed of this version to be asked."
        yield subject.finding("not-judged", name, "note", reason, backends=BOTH)


DEEPSPEED_RULES: tuple[Rule, ...] = (refused, misplaced, misspelled, undecided)
