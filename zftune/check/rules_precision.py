"""Rules about dtypes."""

from __future__ import annotations

from collections.abc import Iterator

from zftune.check.findings import Finding
from zftune.check.subject import BOTH, UPSTREAM, ZERO, Rule, Subject, change, is_number, left_out
from zftune.integrations.deepspeed.ds_config import MISSING

_WORDS = {"bf16": ("bf16", "bfloat16"), "fp16": ("fp16", "float16", "half"), "fp32": ("fp32", "float32", "float")}
_LEAVES_LOSS = (0, 19)
_WINDOW = "fp16.loss_scale_window"
_DEFAULT_WINDOW = 1000
_NO_MASTER = 'zftune run\'s runtime has masters for them; or no "zenflow" section'


def bf16(subject: Subject) -> Iterator[Finding]:
    """Selected columns have no fp32 master, and count steps in bf16: study 002 `no_master`, `step_count_stuck`."""
    if subject.zenflow is None:
        return
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
    if subject.zenflow is not None and subject.enabled("fp16"):
        reason = "Selected columns get gradients with the loss scale in them, infinite ones too."
        advice = "" if subject.elsewhere() else 'no "zenflow" section'
        yield subject.finding("zenflow-fp16", "fp16.enabled", "wrong", reason, *subject.elsewhere(), advice=advice)


def without_zero(subject: Subject) -> Iterator[Finding]:
    """`engine.backward()` scales the loss for ZeRO's optimizers alone; those of stage 0 unscale all the same."""
    if not subject.enabled("fp16") or subject.stage or subject.at("fp16.loss_scale") == 1:
        return
    if subject.release < _LEAVES_LOSS or subject.zenflow is not None:
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
    for name in ("bf16", "fp16") if subject.zenflow is not None else ():
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
    if subject.zenflow is None or subject.stage != 1 or not isinstance(value, str):
        return
    model = "bf16" if subject.enabled("bf16", "bfloat16") else "fp16" if subject.enabled("fp16") else "fp32"
    if value.lower() not in _WORDS[model]:
        reason = f"With ZeRO-1 and ZenFlow the first step ends where it is not the model's dtype, {model}: TypeError."
        yield subject.finding("zenflow-accumulation-dtype", dotted, "crashes", reason, left_out(dotted))


RULES: tuple[Rule, ...] = (bf16, fp16, without_zero, doubling, masters, accumulation_dtype)
