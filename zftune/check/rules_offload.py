"""Rules about offloading without ZenFlow: Twin-Flow's ratio, NVMe, parameters, pinned memory."""

from __future__ import annotations

from collections.abc import Iterator

from zftune.check.findings import Change, Finding
from zftune.check.subject import BOTH, OFFLOAD, ZENFLOW, ZERO, Rule, Subject, change, is_number, left_out
from zftune.integrations.deepspeed.ds_config import MISSING, path_of
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
    if subject.zenflow is not None:
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
    """`accelerate launch` hands no path on, and its plugin takes the word "none" for one."""
    for name in ("optimizer", "param"):
        section = f"{ZERO}.offload_{name}"
        if (
            subject.stage == 3
            and subject.at(f"{section}.device") == "nvme"
            and subject.at(f"{section}.nvme_path") == "none"
        ):
            yield subject.finding(
                "nvme-path",
                f"{section}.nvme_path",
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
    if subject.stage == 0 and subject.device != "none" and subject.zenflow is None:
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
        and subject.zenflow is None
        and subject.optimizer is None
        and not ready
        and not subject.hugging_face  # Accelerate makes its CPU Adam of it
    ):
        reason = "DeepSpeed refuses an optimizer from the script that is not its own CPU Adam."
        yield subject.finding(
            "client-optimizer",
            "optimizer",
            "note",
            reason,
            advice='an optimizer here, or "zero_force_ds_cpu_optimizer": false',
        )


RULES: tuple[Rule, ...] = (ratio, nvme, no_path, parameters, without_zero, speed, client_optimizer)
