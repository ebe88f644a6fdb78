"""Rules about offloading, and about the schedule of upstream's ZenFlow: update_interval, select_interval, warm-up."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from zenflow.config import is_number
from zftune.ds_config.facts import RARE_SELECTION_STEPS, SAFE_UPDATE_INTERVAL
from zftune.ds_config.reading import MISSING, path_of
from zftune.integrations.deepspeed.check.findings import Change, Finding
from zftune.integrations.deepspeed.check.subject import (
    BOTH,
    OFFLOAD,
    OURS,
    UPSTREAM,
    ZENFLOW,
    ZERO,
    Rule,
    Subject,
    change,
    is_whole,
    left_out,
    of_zenflow,
)
from zftune.store.types import Backend

SAFE_SUB_GROUP = 100_000_000
_RATIO = f"{OFFLOAD}.ratio"
_DEVICE = f"{OFFLOAD}.device"


def ratio(subject: Subject) -> Iterator[Finding]:
    """Where upstream takes a ratio at all."""
    value = subject.at(_RATIO)
    if value in (MISSING, "auto"):
        return
    whole = change(_RATIO, 1.0)
    if not is_number(value) or not 0 <= value <= 1:
        return
    if value < 1 and subject.stage != 3:
        reason = "DeepSpeed refuses it below stage 3. The runtime of zftune run takes it at any stage."
        yield subject.finding("ratio-stage", _RATIO, "crashes", reason, *(subject.elsewhere() or (whole,)))
    elif value < 1 and subject.device != "none":
        yield from _twin_flow(subject, whole)


def _twin_flow(subject: Subject, whole: Change) -> Iterator[Finding]:
    """At stage 3.

    With NVMe, see upstream's issue 4872; reading from a file system needs libaio, which is not everywhere.
    """
    other = subject.optimizer not in ("adam", "adamw", None) or subject.at("optimizer.params.torch_adam") is True
    if subject.has_zenflow:
        reason = "DeepSpeed refuses it with ZenFlow."
        yield subject.finding("ratio-zenflow", _RATIO, "crashes", reason, left_out(ZENFLOW))
    elif subject.device == "nvme":
        reason = "DeepSpeed fails with a ratio and NVMe."
        yield subject.finding("ratio-nvme", _RATIO, "crashes", reason, whole)
    elif other:
        reason = "DeepSpeed refuses it with another optimizer than its own Adam and AdamW."
        yield subject.finding("ratio-optimizer", _RATIO, "crashes", reason, whole)
    else:
        yield from _two_optimizers(subject, whole)


def _two_optimizers(subject: Subject, whole: Change) -> Iterator[Finding]:
    """Study 002 `twinflow_scheduler`, `twinflow_granularity`."""
    size = subject.at(f"{ZERO}.sub_group_size")
    size = 1_000_000_000 if size in (MISSING, "auto") else size
    if is_number(size) and size > SAFE_SUB_GROUP and subject.at(_RATIO) != 0:
        reason = (
            f"It splits whole sub-groups, of {size:.0e} elements here: with few of them most ratios do the same, or "
            "nothing."
        )
        mend = change(f"{ZERO}.sub_group_size", SAFE_SUB_GROUP)
        yield subject.finding("ratio-inert", _RATIO, "ignored", reason, mend)
    reason = "The share on the GPU has an optimizer of its own, which no learning rate scheduler reaches."
    if subject.at("scheduler") is not MISSING or subject.hugging_face:
        advice = "or a constant learning rate" if not subject.hugging_face else ""
        yield subject.finding("ratio-scheduler", _RATIO, "wrong", reason, whole, advice=advice)
    else:
        reason += " Its moments are in no checkpoint."
        yield subject.finding("ratio-second-optimizer", _RATIO, "note", reason)


def nvme(subject: Subject) -> Iterator[Finding]:
    """Below stage 3 the file system is not used."""
    if subject.at(_DEVICE) == "nvme" and subject.stage in (1, 2):
        reason = "Below stage 3 DeepSpeed keeps the state in memory all the same."
        path = f"{OFFLOAD}.nvme_path"
        more = (left_out(path),) if subject.at(path) is not MISSING else ()
        yield subject.finding("nvme-stage", _DEVICE, "ignored", reason, change(_DEVICE, "cpu"), *more, backends=BOTH)


def no_path(subject: Subject) -> Iterator[Finding]:
    """DeepSpeed ends without one; `accelerate launch` hands none on, and its plugin takes the word "none" for one."""
    for name in ("optimizer", "param") if subject.stage == 3 else ():
        section = f"{ZERO}.offload_{name}"
        path = f"{section}.nvme_path"
        if subject.at(f"{section}.device") != "nvme":
            continue
        reason = "DeepSpeed compiles its async_io op for that, and ends where libaio or its headers are not there."
        yield subject.finding("nvme-op", f"{section}.device", "note", reason, advice="ds_report tells whether it can")
        if subject.at(path) in (MISSING, None):
            reason = "DeepSpeed makes a folder there, and ends where it is not told where."
            yield subject.finding("nvme-folder", path, "crashes", reason, advice="a folder on the NVMe disk")
        elif subject.at(path) == "none":
            yield subject.finding(
                "nvme-path",
                path,
                "wrong",
                'DeepSpeed is given the path "none", a folder where the training is started: `accelerate launch` '
                "does not hand on what its configuration says.",
                advice=f"ACCELERATE_DEEPSPEED_OFFLOAD_{name.upper()}_NVME_PATH in the environment, "
                "or a ds_config that deepspeed_config_file names",
            )


def parameters(subject: Subject) -> Iterator[Finding]:
    """Parameters are offloaded at stage 3 alone; by the backend zenflow, where they do not fit, which no file tells."""
    section = f"{ZERO}.offload_param"
    device = subject.at(f"{section}.device")
    if device in ("cpu", "nvme") and subject.stage != 3:
        reason = "DeepSpeed offloads parameters at stage 3 only."
        yield subject.finding("offload-param-stage", section, "note", reason, advice="left out", backends=BOTH)
    share = subject.at(f"{ZENFLOW}.topk_ratio")
    if device == "cpu" and subject.stage == 3 and is_number(share) and share:
        reason = "Where the weights do not fit on the devices, and so are on the host, zftune run refuses it."
        advice = "0 there, or left out"
        backends: tuple[Backend, ...] = ("zenflow",)
        yield subject.finding(
            "offload-param-topk", f"{ZENFLOW}.topk_ratio", "note", reason, advice=advice, backends=backends
        )


def without_zero(subject: Subject) -> Iterator[Finding]:
    """DeepSpeed's host Adam then meets weights on the GPU, which it refuses; on a CPU it works."""
    if any(fault.path == path_of(f"{ZERO}.stage") for fault in subject.faults):
        return
    if subject.stage == 0 and subject.device != "none" and not subject.has_zenflow:
        reason = "Without a ZeRO stage nothing moves to the host, and the host's Adam refuses weights on a GPU."
        yield subject.finding("offload-stage-0", f"{ZERO}.stage", "crashes", reason, change(f"{ZERO}.stage", 2))


def speed(subject: Subject) -> Iterator[Finding]:
    """What keeps copies from running beside the backward pass, from reading upstream's code."""
    if subject.device != "cpu":
        return
    if subject.at(f"{OFFLOAD}.pin_memory") is False:
        reason = "Copies to and from memory that is not pinned stop the GPU."
        yield subject.finding("not-pinned", f"{OFFLOAD}.pin_memory", "slow", reason, advice="true, where memory allows")
    if subject.stage in (1, 2) and subject.at(f"{ZERO}.overlap_comm") in (MISSING, False):
        reason = "Without it, the default at this stage, gradients do not move to the host beside the backward pass."
        yield subject.finding("no-overlap", f"{ZERO}.overlap_comm", "slow", reason, advice="true")


def client_optimizer(subject: Subject) -> Iterator[Finding]:
    """Loud, and often met: an optimizer of the script's."""
    ready = subject.at("zero_force_ds_cpu_optimizer") is False
    if (
        subject.device != "none"
        and subject.stage
        and not subject.has_zenflow
        and subject.optimizer is None
        and not ready
        and not subject.hugging_face  # Accelerate makes its CPU Adam of it
    ):
        reason = "DeepSpeed refuses an optimizer from the script that is not its own CPU Adam."
        advice = 'an optimizer here, or "zero_force_ds_cpu_optimizer": false'
        yield subject.finding("client-optimizer", "optimizer", "note", reason, advice=advice)


OFFLOAD_RULES: tuple[Rule, ...] = (ratio, nvme, no_path, parameters, without_zero, speed, client_optimizer)


_UPDATE = f"{ZENFLOW}.update_interval"
_SELECT = f"{ZENFLOW}.select_interval"
_STRATEGY = f"{ZENFLOW}.select_strategy"
_WARM_UP = f"{ZENFLOW}.full_warm_up_rounds"


def windows(steps: float, update: int | None) -> int:
    """Steps, in whole windows."""
    whole = update or SAFE_UPDATE_INTERVAL
    return whole * max(1, math.ceil(steps / whole))


def update_interval(subject: Subject) -> Iterator[Finding]:
    """The default divides by zero accumulation steps, study 002 `auto_interval`."""
    value, given = subject.zenflow["update_interval"], subject.at(_UPDATE)
    safe = change(_UPDATE, SAFE_UPDATE_INTERVAL)
    if value == "auto":
        if given == "auto" and subject.hugging_face:  # ends before, as a rule of its own says
            return
        reason = (
            '"auto", the default, makes all selected weights NaN in the first step.'
            if given != "auto"
            else "All selected weights are NaN after the first step."
            + (" Accelerate refuses the word." if subject.script is None else "")
        )
        yield subject.finding("update-interval-auto", _UPDATE, "wrong", reason, safe)


def strategy(subject: Subject) -> Iterator[Finding]:
    """Which strategy goes with which interval; the others raise at `initialize()`."""
    kind, select = subject.zenflow["select_strategy"], subject.zenflow["select_interval"]
    if kind == "auto" and is_whole(select):
        reason = 'With "auto", the default, DeepSpeed raises where select_interval is a number.'
        yield subject.finding("auto-with-interval", _STRATEGY, "crashes", reason, change(_STRATEGY, "step"))
    elif kind in ("step", "epoch") and select == "auto":
        safe = 1 if kind == "epoch" else windows(RARE_SELECTION_STEPS, subject.update_interval)
        reason = f'DeepSpeed needs a number with select_strategy "{kind}"; "auto" is the default.'
        yield subject.finding("strategy-without-interval", _SELECT, "crashes", reason, change(_SELECT, safe))


def select_interval(subject: Subject) -> Iterator[Finding]:
    """Too small a number. 0 is never, to upstream."""
    select, update = subject.zenflow["select_interval"], subject.update_interval
    rare = windows(RARE_SELECTION_STEPS, update)
    if not is_whole(select):
        return
    if select == 0:
        reason = "The runtime of zftune run takes 1 and more."
        yield subject.finding("select-interval-zero", _SELECT, "crashes", reason, change(_SELECT, rare), backends=OURS)
        yield _selects_once(subject, "To DeepSpeed 0 is never:")
    elif subject.zenflow["select_strategy"] == "step" and select < (update or 1):
        reason = "DeepSpeed refuses less than update_interval."
        backends = BOTH if select < 1 else UPSTREAM
        yield subject.finding(
            "select-below-update", _SELECT, "crashes", reason, change(_SELECT, rare), backends=backends
        )


def reselection(subject: Subject) -> Iterator[Finding]:
    """Every selection harms the state, study 002 `moments_restart`, `reselection_truncates`, `reselection_reverts`."""
    kind, select = subject.zenflow["select_strategy"], subject.zenflow["select_interval"]
    if kind == "epoch" or (kind == "auto" and select == "auto"):
        yield _selects_once(subject, "Unless initialize() is given training_data,")
    if kind != "step" or not is_whole(select) or select < (subject.update_interval or 1):
        return
    overlapped = subject.zenflow["overlap_step"] is True
    reason = (
        "Each selection zeroes the selected columns' moments but not their step count, so they step up to 4 times too "
        "far, and cuts 16-bit models' masters down to the weights' precision."
        + (" The overlapped update in flight is lost." if overlapped else "")
    )
    if select < RARE_SELECTION_STEPS:
        rare = windows(RARE_SELECTION_STEPS, subject.update_interval)
        yield subject.finding("selects-often", _SELECT, "wrong", reason, change(_SELECT, rare))
    else:
        yield subject.finding("selects-rarely", _SELECT, "note", reason)


def _selects_once(subject: Subject, when: str) -> Finding:
    reason = f"{when} columns are selected once and never again."
    return subject.finding(
        "never-selects-again", _SELECT, "note", reason, advice='select_strategy "step" selects again'
    )


def whole_windows(subject: Subject) -> Iterator[Finding]:
    """A selection that cuts a window short: two updates in flight share a buffer, study 002 `same_buffer`."""
    update = subject.update_interval
    if update is None:
        return
    select, warm_up = subject.zenflow["select_interval"], subject.zenflow["full_warm_up_rounds"]
    reselects = subject.zenflow["select_strategy"] == "step" and is_whole(select) and select >= update
    if not reselects or not is_whole(warm_up):
        return
    overlapped = subject.zenflow["overlap_step"] is True
    mends = {_SELECT: (select, windows(select, update)), _WARM_UP: (warm_up, update * math.ceil(warm_up / update))}
    for dotted, (value, safe) in mends.items():
        if value == safe:
            continue
        if overlapped:
            reason = (
                "It is no multiple of update_interval: two overlapped updates then share a gradient buffer, a race."
            )
            yield subject.finding("broken-windows", dotted, "wrong", reason, change(dotted, safe))
        else:
            reason = "It is no multiple of update_interval: a selection cuts a window short, whose mean is too small."
            yield subject.finding("broken-windows", dotted, "note", reason, advice=f"{safe}")


def warm_up(subject: Subject) -> Iterator[Finding]:
    """Overlap without it leaves out the first wait, study 002 `late_pipeline`."""
    rounds: Any = subject.zenflow["full_warm_up_rounds"]
    safe: Change = change(_WARM_UP, subject.update_interval or SAFE_UPDATE_INTERVAL)
    if not is_whole(rounds):
        return
    if rounds < 0:
        reason = "The runtime of zftune run takes 0 and more."
        yield subject.finding("warm-up-negative", _WARM_UP, "crashes", reason, safe, backends=OURS)
    if subject.zenflow["overlap_step"] is True and rounds < 1:
        reason = (
            "Overlapped without warm-up, the default, the first wait is left out: the second boundary applies nothing, "
            "and updates come two windows late."
        )
        yield subject.finding("overlap-without-warm-up", _WARM_UP, "wrong", reason, safe)


INTERVAL_RULES = of_zenflow(update_interval, strategy, select_interval, reselection, whole_windows, warm_up)
