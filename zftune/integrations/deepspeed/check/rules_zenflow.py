"""Rules about what upstream's ZenFlow needs around it: stage, offloading, optimizer, clipping, accumulation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zenflow.config import is_number
from zftune.ds_config.facts import CLIPS_SINCE, GOOD, ZENFLOW_OPTIMIZERS, scrambles
from zftune.ds_config.reading import MISSING, path_of
from zftune.integrations.deepspeed import spawning
from zftune.integrations.deepspeed.check.findings import Change, Finding
from zftune.integrations.deepspeed.check.subject import (
    BOTH,
    OFFLOAD,
    OURS,
    ZENFLOW,
    ZERO,
    Subject,
    change,
    left_out,
    of_zenflow,
)
from zftune.integrations.deepspeed.verdict import meant

_COUNTS_IN_FLOATS = (0, 19, 6)  # the last one


def checkpoints(subject: Subject) -> Iterator[Finding]:
    """Study 002 `resume`, `resume_reverts`, `export_transposed`; stage 3 from reading upstream's code."""
    reason = (
        "Checkpoints lack the selected columns' state: a resumed run is another run. zero_to_fp32 writes "
        "transposed weights."
    )
    yield subject.finding("zenflow-checkpoints", ZENFLOW, "note", reason)


def model(subject: Subject) -> Iterator[Finding]:
    """Study 002 `convolution`, `unused_parameter`, `group_settings`."""
    reason = (
        "The run ends at a weight of more than two dimensions and at a parameter without gradient. Settings of "
        "parameter groups, but for the learning rate, do not reach selected columns."
    )
    yield subject.finding("zenflow-model", ZENFLOW, "note", reason)


def selection(subject: Subject) -> Iterator[Finding]:
    """Its walk through a bucket leaves out weights of one dimension, their gradients do not."""
    if subject.flattens:
        reason = (
            "Weights of one dimension, biases and norms, shift the sums that columns are selected by: behind them in a "
            "bucket other columns are selected than those with the largest gradients."
        )
        yield subject.finding("zenflow-selection", ZENFLOW, "note", reason)


def ranks(subject: Subject) -> Iterator[Finding]:
    """The border is `len(flat) / ranks`, a float, and so is the part of a weight before it."""
    if subject.flattens and subject.release <= _COUNTS_IN_FLOATS:
        reason = (
            "On two ranks or more the run may end with a TypeError in the first step: it does where the border between "
            "two ranks' shares lies within a weight of one dimension."
        )
        yield subject.finding("zenflow-ranks", ZENFLOW, "note", reason)


def mean(subject: Subject) -> Iterator[Finding]:
    """Study 002 `window_mean`, which is the paper's design, and `micro_step_correction`."""
    if (subject.update_interval or 0) > 1:
        reason = (
            "The host makes one update a window, of the mean gradient, and its bias correction counts backward passes: "
            "the first updates are shorter."
        )
        yield subject.finding("zenflow-mean", f"{ZENFLOW}.update_interval", "note", reason)


def overlap(subject: Subject) -> Iterator[Finding]:
    """Study 002 `two_momenta`, `worker_death`, `destroy_leaks`; cores from reading upstream's code."""
    if subject.zenflow["overlap_step"] is True:
        reason = (
            "Overlapped, there are two sets of moments, each of every other window. A dead worker is noticed after "
            "60 s, and destroy() leaves worker and cores behind. On several nodes cores are split wrongly."
        )
        yield subject.finding("zenflow-overlap", f"{ZENFLOW}.overlap_step", "note", reason)


def offload(subject: Subject) -> Iterator[Finding]:
    """The runtime of `zftune run` keeps that state on the GPU."""
    if subject.zenflow["offload"] is True:
        reason = "The runtime of zftune run does without it: the selected columns' state stays on the GPU."
        yield subject.finding("own-offload", f"{ZENFLOW}.offload", "note", reason, backends=OURS)


ZENFLOW_NOTES = of_zenflow(checkpoints, model, selection, ranks, mean, overlap, offload)


_TOPK = f"{ZENFLOW}.topk_ratio"
# What both of its optimizers take: the host's, and torch's AdamW for the selected columns.
_ADAM_PARAMS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "max_grad_norm")
_ASKED = "with --backend deepspeed"
_INSTEAD = 'the runtime of zftune run ("zftune": {"backend": "zenflow"}), or no "zenflow" section'


def topk_ratio(subject: Subject) -> Iterator[Finding]:
    """The word "auto" is dropped; 0 and 1 are refused, though the runtime of `zftune run` takes them."""
    value, given = subject.zenflow["topk_ratio"], subject.at(_TOPK)
    if given == "auto" and not subject.hugging_face:
        reason = "DeepSpeed drops the word and takes 0.1."
        yield subject.finding("topk-auto", _TOPK, "ignored", reason, change(_TOPK, 0.1), backends=BOTH)
    elif is_number(value) and value in (0, 1):
        reason = "DeepSpeed takes a number above 0 and below 1; the runtime of zftune run takes 0 and 1 too."
        mend = left_out(ZENFLOW) if value == 0 else change(_TOPK, 0.5)
        yield subject.finding("topk-limit", _TOPK, "crashes", reason, *(subject.elsewhere() or (mend,)))


def stage(subject: Subject) -> Iterator[Finding]:
    """Where there is no ZeRO it ends in the first step; at stage 3 it needs CUDA, and one rank.

    Stage 3: its code names CUDA and ends on any other device. With several ranks the first selection that changes a
    rank's share was seen to end on the shape of `exp_avg`, with CUDA's name patched out; there is no proof here.
    """
    if subject.stage == 0:
        reason = "ZenFlow works in ZeRO's optimizers; without a stage the first step ends with an AttributeError."
        yield subject.finding("zenflow-stage-0", f"{ZERO}.stage", "crashes", reason, change(f"{ZERO}.stage", 2))
    elif subject.stage == 3:
        reason = (
            "With several ranks the first selection that changes a rank's share of the columns ends the run; on other "
            "devices than CUDA the first step does."
        )
        advice = f"stage 3 with {_INSTEAD}"
        yield subject.finding("zenflow-stage-3", f"{ZERO}.stage", "crashes", reason, advice=advice)


def offloading(subject: Subject) -> Iterator[Finding]:
    """It is refused without; the runtime of `zftune run` then has nothing to do."""
    if subject.stage != 3 and _offloads_nothing(subject):
        reason = "DeepSpeed refuses ZenFlow without offload_optimizer; the runtime of zftune run then offloads nothing."
        mend = change(f"{OFFLOAD}.device", "cpu")
        yield subject.finding("zenflow-without-offload", f"{OFFLOAD}.device", "crashes", reason, mend, backends=BOTH)


def _offloads_nothing(subject: Subject) -> bool:
    filled_in = subject.hugging_face and subject.at(f"{OFFLOAD}.device") == "auto"
    return subject.device == "none" and not filled_in


def scrambled(subject: Subject) -> Iterator[Finding]:
    """By version: study 002 `scrambled_weights`."""
    if subject.flattens and scrambles(subject.version):
        reason = f"DeepSpeed {subject.version} scrambles every 2-D weight at initialize(): a pretrained model is noise."
        advice = f"DeepSpeed {GOOD}, or zftune run" if not subject.elsewhere() else ""
        yield subject.finding("scrambled-weights", ZENFLOW, "wrong", reason, *subject.elsewhere(), advice=advice)


def optimizer(subject: Subject) -> Iterator[Finding]:
    """Selected columns are AdamW's, made from the ds_config's settings and torch's defaults."""
    if not subject.flattens:
        return
    if subject.optimizer is None:
        reason = "ZenFlow takes its optimizer from the ds_config. One that the script passes ends in a TypeError."
        yield subject.finding(
            "zenflow-client-optimizer", "optimizer", "crashes", reason, *subject.elsewhere(), advice="an optimizer here"
        )
        return
    if subject.optimizer not in ZENFLOW_OPTIMIZERS:
        reason = "ZenFlow updates the selected columns with AdamW, whatever stands here; the others by this."
        mends, advice = subject.elsewhere(), _otherwise(subject)
        yield subject.finding("zenflow-not-adam", "optimizer.type", "wrong", reason, *mends, advice=advice)
        return
    params = subject.at("optimizer.params")
    if not isinstance(params, Mapping):
        reason = "ZenFlow fails where there are none."
        mend = change("optimizer.params", {"weight_decay": 0.0})
        yield subject.finding("zenflow-no-params", "optimizer.params", "crashes", reason, mend)
        return
    yield from _params(subject, params)


def _params(subject: Subject, params: Mapping[str, Any]) -> Iterator[Finding]:
    for name in params:
        dotted = f"optimizer.params.{name}"
        if name in _ADAM_PARAMS:
            continue
        mends: tuple[Change, ...] = (left_out(dotted),)
        if name == "adam_w_mode" and params[name] is False and subject.optimizer == "adam":
            mends = subject.elsewhere() or mends  # without it DeepSpeed's Adam is AdamW
        near = meant(path_of(dotted))
        reason = "ZenFlow gives it to two optimizers, of which one does not know it: TypeError."
        yield subject.finding(
            "zenflow-optimizer-setting", dotted, "crashes", reason, *(() if near else mends), advice=near
        )
    decay = "optimizer.params.weight_decay"
    if "weight_decay" not in params:
        reason = "Left out, the selected columns decay by 0.01, torch's default, and the others by 0."
        yield subject.finding("weight-decay-default", decay, "wrong", reason, change(decay, 0.0))
    elif subject.hugging_face and is_number(params["weight_decay"]) and params["weight_decay"] != 0:
        reason = "The Trainer decays biases and norms by 0. ZenFlow drops the groups' own values, and decays them too."
        yield subject.finding(
            "group-settings", decay, "wrong", reason, *subject.elsewhere(), advice=_otherwise(subject)
        )


def guard(subject: Subject) -> Iterator[Finding]:
    """Its process is spawned, and reads the script again: what trains there runs twice, and waits for itself."""
    if spawning.overlaps(subject.config):
        reason = (
            f"The update's own process reads the training's script again: what trains there has to stand under "
            f"`{spawning.GUARD}`, or it waits for ten minutes."
        )
        yield subject.finding("zenflow-guard", spawning.OVERLAP, "note", reason)


def communication(subject: Subject) -> Iterator[Finding]:
    """How gradients are reduced, and across what."""
    if subject.flattens and subject.at(f"{ZERO}.reduce_scatter") is False:
        reason = "ZenFlow's other path lacks an argument: TypeError in the first backward pass."
        mend = change(f"{ZERO}.reduce_scatter", True)
        yield subject.finding("zenflow-reduce-scatter", f"{ZERO}.reduce_scatter", "crashes", reason, mend)
    overlap = subject.at(f"{ZERO}.overlap_comm")
    if subject.zenflow["offload"] is True and overlap is not True and not (subject.stage == 3 and overlap is MISSING):
        reason = "DeepSpeed refuses it without zero_optimization.overlap_comm."
        mend = change(f"{ZERO}.overlap_comm", True)
        yield subject.finding("zenflow-offload", f"{ZENFLOW}.offload", "crashes", reason, mend)
    parallel = subject.at("tensor_parallel.autotp_size")
    if is_number(parallel) and parallel > 1:  # from reading upstream's code
        reason = "ZenFlow sends selected columns from the rank with the group's number, which is another rank's here."
        yield subject.finding("zenflow-parallel", "tensor_parallel.autotp_size", "wrong", reason, advice='no "zenflow"')


def clipping(subject: Subject) -> Iterator[Finding]:
    """The selected columns are not clipped: study 002 `clipping`. Since 0.19 the default is 1.0."""
    value = subject.at("gradient_clipping")
    if value in (0, None):
        return
    misspelt = any("gradient_clipping" in meant((name,)) for name in subject.given)  # another rule tells of it
    if value is MISSING and (subject.release < CLIPS_SINCE or misspelt):
        return
    default = "Left out, DeepSpeed clips to 1.0. " if value is MISSING else ""
    reason = f"{default}Clipping leaves the selected columns out, which have the largest gradients."
    off = () if isinstance(value, bool) else subject.where_asked(change("gradient_clipping", 0.0))  # true is no number
    mends = subject.elsewhere() or off
    advice = "" if mends else f"zftune run, which clips all columns; or 0.0, {_ASKED}"
    yield subject.finding("zenflow-clipping", "gradient_clipping", "wrong", reason, *mends, advice=advice)


def accumulation(subject: Subject) -> Iterator[Finding]:
    """Overwritten with update_interval: study 002 `user_accumulation`."""
    passes = subject.at("gradient_accumulation_steps")
    if not is_number(passes) or passes <= 1:
        return
    reason = (
        "ZenFlow overwrites it with update_interval: every backward pass is a step of its own, on a batch of "
        f"1/{passes:g}."
    )
    fitting = (change("gradient_accumulation_steps", 1), *_same_batch(subject, int(passes)))
    mends = subject.elsewhere() or subject.where_asked(*fitting)
    advice = "" if mends else f"zftune run, which accumulates; or 1, {_ASKED}"
    yield subject.finding(
        "zenflow-accumulation", "gradient_accumulation_steps", "ignored", reason, *mends, advice=advice
    )


def _same_batch(subject: Subject, passes: int) -> Iterator[Change]:
    """DeepSpeed refuses batch sizes that do not fit together."""
    whole = subject.at("train_batch_size")
    if whole in (MISSING, "auto"):
        return
    if subject.at("train_micro_batch_size_per_gpu") is not MISSING:
        yield left_out("train_batch_size")
    elif isinstance(whole, int):
        yield change("train_batch_size", max(1, whole // passes))


def hugging_face(subject: Subject) -> Iterator[Finding]:
    """Accelerate says itself what a boundary is: study 002 `accelerate_boundary`."""
    if subject.hugging_face:
        reason = (
            "The Trainer and Accelerate make every step a boundary: the host updates in each of them, whatever "
            "update_interval is."
        )
        yield subject.finding(
            "accelerate-boundary", ZENFLOW, "wrong", reason, *subject.elsewhere(), advice=_otherwise(subject)
        )


def _otherwise(subject: Subject) -> str:
    return "" if subject.elsewhere() else _INSTEAD


ZENFLOW_RULES = of_zenflow(
    topk_ratio,
    stage,
    offloading,
    scrambled,
    optimizer,
    guard,
    communication,
    clipping,
    accumulation,
    hugging_face,
)
