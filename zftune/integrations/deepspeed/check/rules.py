"""What no validator of DeepSpeed's says: settings with which it trains otherwise than they read, or not at all.

One record a rule: where `when` holds of a ds_config, its field does what the reason says, and `fix` has settings with
which it does not. Most were found by experiments of study 002, others by reading DeepSpeed's code; the tests in
`tests/system/zftune/check` show them on the installed version.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from zenflow.config import is_number
from zftune.ds_config.facts import GOOD, RARE_SELECTION_STEPS, SAFE_UPDATE_INTERVAL, SCRAMBLING, ZENFLOW_OPTIMIZERS
from zftune.ds_config.reading import MISSING, at, truth
from zftune.integrations.deepspeed.check.findings import THE_FILE, Severity
from zftune.integrations.deepspeed.check.subject import OFFLOAD, ZENFLOW, ZERO, Subject, is_whole
from zftune.integrations.deepspeed.outcome import A_NUMBER
from zftune.integrations.deepspeed.section import meant
from zftune.integrations.deepspeed.spawning import GUARD, OVERLAP, overlaps
from zftune.store.types import Backend

UPSTREAM: tuple[Backend, ...] = ("deepspeed",)
OURS: tuple[Backend, ...] = ("zenflow",)
BOTH: tuple[Backend, ...] = ("deepspeed", "zenflow")
Text: TypeAlias = str | Callable[[Subject], str]
Fix: TypeAlias = Mapping[str, Any] | Callable[[Subject], Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing that is known of a setting."""

    name: str
    """The same in every version; several records may have one."""
    field: str
    """With dots."""
    severity: Severity
    when: Callable[[Subject], object] = lambda _: True
    reason: Text
    """A sentence or two."""
    zenflow: bool = False
    """Whether it is about files with a "zenflow" section alone."""
    versions: Callable[[tuple[int, ...]], bool] = lambda _: True
    """Releases of DeepSpeed that it is about, as numbers."""
    backends: tuple[Backend, ...] | Callable[[Subject], tuple[Backend, ...]] = UPSTREAM
    """With which it matters."""
    elsewhere: bool = False
    """Whether the backend zenflow is the fix, where it can train the file; `fix` and `advice` are for where not."""
    fix: Fix = dataclasses.field(default_factory=dict)
    """Safe values, by name; none where no value is safe."""
    advice: Text = ""
    """What to do, in words, beside the fix or where there is none."""

    def applies(self, subject: Subject) -> bool:
        if self.zenflow and not subject.has_zenflow:
            return False
        return self.versions(subject.release) and bool(self.when(subject))


_UPDATE, _SELECT, _OFFLOADED = f"{ZENFLOW}.update_interval", f"{ZENFLOW}.select_interval", f"{ZENFLOW}.offload"
_STRATEGY, _WARM_UP, _TOPK = f"{ZENFLOW}.select_strategy", f"{ZENFLOW}.full_warm_up_rounds", f"{ZENFLOW}.topk_ratio"
_RATIO, _DEVICE, _PATH = f"{OFFLOAD}.ratio", f"{OFFLOAD}.device", f"{OFFLOAD}.nvme_path"
_STAGE = f"{ZERO}.stage"
_WINDOW, _TOTAL, _UNTESTED = (
    "fp16.loss_scale_window",
    "scheduler.params.total_num_steps",
    "zero_allow_untested_optimizer",
)
_DECAY, _CLIPPING, _PASSES = "optimizer.params.weight_decay", "gradient_clipping", "gradient_accumulation_steps"
_INSTEAD = 'the runtime of zftune run ("zftune": {"backend": "zenflow"}), or no "zenflow" section'
_ASKED = "with --backend deepspeed"
_SAFE_SUB_GROUP = 100_000_000  # elements; DeepSpeed's own is ten times that
_DECAYS = {"WarmupDecayLR": "0", "WarmupCosineLR": "cos_min_ratio of what it was"}
_WORDS = {"bf16": ("bf16", "bfloat16"), "fp16": ("fp16", "float16", "half"), "fp32": ("fp32", "float32", "float")}


# Conditions and values that take more than a line


def _moved(name: str, to: str) -> Callable[[Subject], Mapping[str, Any]]:
    return lambda s: {name: MISSING} if s.has(to) else {name: MISSING, to: s.at(name)}


def _twin_flow(s: Subject) -> bool:
    """Whether DeepSpeed updates a share of the weights on the GPU."""
    value = s.at(_RATIO)
    return is_number(value) and 0 <= value < 1 and s.stage == 3 and s.device != "none"


def _ratio_fault(s: Subject) -> str:
    """Why DeepSpeed does not start with Twin-Flow; see its issue 4872 about NVMe."""
    if not _twin_flow(s):
        return ""
    other = s.optimizer not in (*ZENFLOW_OPTIMIZERS, None) or s.at("optimizer.params.torch_adam") is True
    return "zenflow" if s.has_zenflow else "nvme" if s.device == "nvme" else "optimizer" if other else ""


def _two_optimizers(s: Subject) -> bool:
    return _twin_flow(s) and not _ratio_fault(s)


def _sub_group(s: Subject) -> float:
    size = s.at(f"{ZERO}.sub_group_size")
    return size if is_number(size) else 1e9 if size in (MISSING, "auto") else 0.0


def _warm_up(s: Subject) -> Any:
    return s.zenflow["full_warm_up_rounds"]


def _unfitting(s: Subject) -> dict[str, int]:
    """Settings that are no multiples of the window where columns are selected again, and near ones that are."""
    update, select, warm_up = s.update_interval, s.selects_every, _warm_up(s)
    if update is None or select is None or not is_whole(warm_up):
        return {}
    whole = {_SELECT: s.windows(select), _WARM_UP: update * math.ceil(warm_up / update)}
    return {name: safe for name, safe in whole.items() if safe != {_SELECT: select, _WARM_UP: warm_up}[name]}


def _accumulation_dtype(s: Subject) -> bool:
    value = s.at("data_types.grad_accum_dtype")
    return isinstance(value, str) and s.stage == 1 and value.lower() not in _WORDS[_model_dtype(s)]


def _model_dtype(s: Subject) -> str:
    return "bf16" if s.enabled("bf16", "bfloat16") else "fp16" if s.enabled("fp16") else "fp32"


def _ends_in_warm_up(s: Subject) -> bool:
    total, warm_up = s.at(_TOTAL), s.at("scheduler.params.warmup_num_steps")
    warm_up = 1000 if warm_up is MISSING else warm_up
    return s.at("scheduler.type") in list(_DECAYS) and is_number(total) and is_number(warm_up) and total < warm_up


def _clips(s: Subject) -> bool:
    value = s.at(_CLIPPING)
    if value is MISSING:  # then 1.0 since 0.19
        return s.release >= (0, 19) and not any(_CLIPPING in meant((name,)) for name in s.given)
    return value not in (0, None)


def _no_clipping(s: Subject) -> Mapping[str, Any]:
    return {_CLIPPING: 0.0} if s.upstream_asked and not isinstance(s.at(_CLIPPING), bool) else {}


def _no_accumulation(s: Subject) -> Mapping[str, Any]:
    """With batch sizes that still fit together, which DeepSpeed refuses else."""
    if not s.upstream_asked:
        return {}
    whole, fixed = s.at("train_batch_size"), {_PASSES: 1}
    if whole not in (MISSING, "auto") and s.has("train_micro_batch_size_per_gpu"):
        return {**fixed, "train_batch_size": MISSING}
    return {**fixed, "train_batch_size": max(1, whole // int(s.at(_PASSES)))} if isinstance(whole, int) else fixed


def _adam_without_params(s: Subject) -> bool:
    return s.flattens and s.optimizer in ZENFLOW_OPTIMIZERS and not isinstance(s.at("optimizer.params"), Mapping)


def _adam_with_params(s: Subject) -> bool:
    return s.flattens and s.optimizer in ZENFLOW_OPTIMIZERS and isinstance(s.at("optimizer.params"), Mapping)


def _offloads_nothing(s: Subject) -> bool:
    filled_in = s.hugging_face and s.at(_DEVICE) == "auto"
    return s.stage != 3 and s.device == "none" and not filled_in


def _zftunes_own(s: Subject) -> Mapping[str, Any]:
    moved = {f"{ZERO}.zftune": MISSING}
    section = s.at(f"{ZERO}.zftune")
    return {**moved, "zftune": dict(section)} if isinstance(section, Mapping) and not s.has("zftune") else moved


def _where_deepspeed_trains(s: Subject) -> tuple[Backend, ...]:
    """Both, where nothing is offloaded: zftune run then leaves the training to DeepSpeed."""
    return BOTH if s.device == "none" else UPSTREAM


_ANYWHERE = (
    Rule(name="not-json", field=THE_FILE[0], severity="crashes", backends=BOTH,
         when=lambda s: s.flaw is not None and s.hugging_face, advice="plain JSON, as --fix writes it",
         reason=lambda s: f"It is not plain JSON ({s.flaw}). DeepSpeed reads comments and unquoted names; the Trainer "
         "and Accelerate do not."),
    Rule(name="not-json", field=THE_FILE[0], severity="note", backends=BOTH,
         when=lambda s: s.flaw is not None and not s.hugging_face, advice="plain JSON, as --fix writes it",
         reason=lambda s: f"It is not plain JSON ({s.flaw}). DeepSpeed reads comments and unquoted names; the Trainer "
         "and Accelerate do not."),
    Rule(name="zftune-misplaced", field=f"{ZERO}.zftune", severity="crashes", backends=BOTH, fix=_zftunes_own,
         when=lambda s: s.has(f"{ZERO}.zftune"),
         reason="DeepSpeed refuses names that it does not know here. At the top level it ignores them."),
    Rule(name="autocast-quantized", field=f"{ZERO}.zero_quantized_weights", severity="crashes",
         when=lambda s: truth(s.at("torch_autocast.enabled")) and truth(s.at(f"{ZERO}.zero_quantized_weights")),
         reason="DeepSpeed refuses quantized weights with torch's autocast.",
         fix={f"{ZERO}.zero_quantized_weights": False}),
    *(Rule(name="misplaced-section", field=name, severity="ignored", backends=BOTH, fix=_moved(name, f"{ZERO}.{name}"),
           when=lambda s, name=name: s.has(name),  # type: ignore[misc]
           reason='DeepSpeed reads it in "zero_optimization" only: here it has no effect.')
      for name in ("zenflow", "offload_optimizer", "offload_param", "stage")),
    Rule(name="misplaced-section", field=f"{ZERO}.{_UNTESTED}", severity="crashes", backends=_where_deepspeed_trains,
         when=lambda s: s.has(f"{ZERO}.{_UNTESTED}"), fix=_moved(f"{ZERO}.{_UNTESTED}", _UNTESTED),
         reason="DeepSpeed reads it at the top level, and refuses it here."),
    Rule(name="amp", field="amp.enabled", severity="crashes",
         when=lambda s: s.has("amp.enabled") and s.at("amp.enabled") and s.stage,
         reason="DeepSpeed refuses Apex amp with ZeRO.", advice='"bf16": {"enabled": true} in its place'),
    Rule(name="clipping-no-number", field=_CLIPPING, severity="crashes", backends=_where_deepspeed_trains,
         when=lambda s: not isinstance(at(s.given, (_CLIPPING,)), (int, float, type(MISSING))),
         fix=lambda s: {_CLIPPING: one.value} if (one := s.number_in((_CLIPPING,))) else {},
         advice=lambda s: "" if s.number_in((_CLIPPING,)) else A_NUMBER,
         reason=f"DeepSpeed ends in the first step: it takes {A_NUMBER}."),
    Rule(name="decay-within-warm-up", field=_TOTAL, severity="wrong", backends=BOTH, when=_ends_in_warm_up,
         reason=lambda s: "It is below warmup_num_steps: after the warm-up the learning rate is "
         f"{_DECAYS[s.at('scheduler.type')]}.",
         advice="all steps of the training, those of the warm-up included"),
    Rule(name="fp16-stage-0", field="fp16.enabled", severity="wrong", backends=_where_deepspeed_trains, elsewhere=True,
         versions=lambda v: v >= (0, 19), fix={_STAGE: 1},
         when=lambda s: s.enabled("fp16") and not s.stage and s.at("fp16.loss_scale") != 1 and not s.has_zenflow,
         reason="Without a ZeRO stage the loss is not scaled, but gradients are divided by the loss scale: clipping "
         "and the optimizer see a fraction of them, and small ones are lost."),
    Rule(name="loss-scale-doubles", field=_WINDOW, severity="note",
         when=lambda s: s.enabled("fp16") and s.at("fp16.loss_scale") in (MISSING, 0) and s.stage,
         reason="In the step in which the loss scale doubles, gradients are divided by the new scale: they are half of "
         "what they should be."),
)  # fmt: skip

_OFFLOADING = (
    Rule(name="ratio-zenflow", field=_RATIO, severity="crashes", when=lambda s: _ratio_fault(s) == "zenflow",
         reason="DeepSpeed refuses it with ZenFlow.", fix={ZENFLOW: MISSING}),
    Rule(name="ratio-nvme", field=_RATIO, severity="crashes", when=lambda s: _ratio_fault(s) == "nvme",
         reason="DeepSpeed fails with a ratio and NVMe.", fix={_RATIO: 1.0}),
    Rule(name="ratio-optimizer", field=_RATIO, severity="crashes", when=lambda s: _ratio_fault(s) == "optimizer",
         reason="DeepSpeed refuses it with another optimizer than its own Adam and AdamW.", fix={_RATIO: 1.0}),
    Rule(name="ratio-inert", field=_RATIO, severity="ignored", fix={f"{ZERO}.sub_group_size": _SAFE_SUB_GROUP},
         when=lambda s: _two_optimizers(s) and _sub_group(s) > _SAFE_SUB_GROUP and s.at(_RATIO) != 0,
         reason=lambda s: f"It splits whole sub-groups, of {_sub_group(s):.0e} elements here: with few of them most "
         "ratios do the same, or nothing."),
    Rule(name="ratio-scheduler", field=_RATIO, severity="wrong", fix={_RATIO: 1.0},
         when=lambda s: _two_optimizers(s) and (s.has("scheduler") or s.hugging_face),
         reason="The share on the GPU has an optimizer of its own, which no learning rate scheduler reaches.",
         advice=lambda s: "" if s.hugging_face else "or a constant learning rate"),
    Rule(name="ratio-second-optimizer", field=_RATIO, severity="note",
         when=lambda s: _two_optimizers(s) and not (s.has("scheduler") or s.hugging_face),
         reason="The share on the GPU has an optimizer of its own, which no learning rate scheduler reaches. Its "
         "moments are in no checkpoint."),
    Rule(name="nvme-stage", field=_DEVICE, severity="ignored", backends=BOTH,
         when=lambda s: s.at(_DEVICE) == "nvme" and s.stage in (1, 2),
         reason="Below stage 3 DeepSpeed keeps the state in memory all the same.",
         fix=lambda s: {_DEVICE: "cpu"} | ({_PATH: MISSING} if s.has(_PATH) else {})),
    *(rule for section, word in ((OFFLOAD, "OPTIMIZER"), (f"{ZERO}.offload_param", "PARAM")) for rule in (
        Rule(name="nvme-op", field=f"{section}.device", severity="note",
             when=lambda s, section=section: s.stage == 3 and s.at(f"{section}.device") == "nvme",  # type: ignore[misc]
             reason="DeepSpeed compiles its async_io op for that, and ends where libaio or its headers are not there.",
             advice="ds_report tells whether it can"),
        Rule(name="nvme-folder", field=f"{section}.nvme_path", severity="crashes",
             when=lambda s, section=section: s.stage == 3 and s.at(f"{section}.device") == "nvme"  # type: ignore[misc]
             and s.at(f"{section}.nvme_path") in (MISSING, None),
             reason="DeepSpeed makes a folder there, and ends where it is not told where.",
             advice="a folder on the NVMe disk"),
        Rule(name="nvme-path", field=f"{section}.nvme_path", severity="wrong",
             when=lambda s, section=section: s.stage == 3 and s.at(f"{section}.device") == "nvme"  # type: ignore[misc]
             and s.at(f"{section}.nvme_path") == "none",
             reason='DeepSpeed is given the path "none", a folder where the training is started: `accelerate launch` '
             "does not hand on what its configuration says.",
             advice=f"ACCELERATE_DEEPSPEED_OFFLOAD_{word}_NVME_PATH in the environment, or a ds_config that "
             "deepspeed_config_file names"))),
    Rule(name="offload-param-stage", field=f"{ZERO}.offload_param", severity="note", backends=BOTH, advice="left out",
         when=lambda s: s.at(f"{ZERO}.offload_param.device") in ("cpu", "nvme") and s.stage != 3,
         reason="DeepSpeed offloads parameters at stage 3 only."),
    Rule(name="offload-param-topk", field=_TOPK, severity="note", backends=OURS, advice="0 there, or left out",
         when=lambda s: s.at(f"{ZERO}.offload_param.device") == "cpu" and s.stage == 3 and is_number(s.at(_TOPK))
         and s.at(_TOPK),
         reason="Where the weights do not fit on the devices, and so are on the host, zftune run refuses it."),
    Rule(name="offload-stage-0", field=_STAGE, severity="crashes", fix={_STAGE: 2},
         when=lambda s: s.stage == 0 and s.at(_STAGE) in (MISSING, 0) and s.device != "none" and not s.has_zenflow,
         reason="Without a ZeRO stage nothing moves to the host, and the host's Adam refuses weights on a GPU."),
    Rule(name="not-pinned", field=f"{OFFLOAD}.pin_memory", severity="slow", advice="true, where memory allows",
         when=lambda s: s.device == "cpu" and s.at(f"{OFFLOAD}.pin_memory") is False,
         reason="Copies to and from memory that is not pinned stop the GPU."),
    Rule(name="no-overlap", field=f"{ZERO}.overlap_comm", severity="slow", advice="true",
         when=lambda s: s.device == "cpu" and s.stage in (1, 2) and s.at(f"{ZERO}.overlap_comm") in (MISSING, False),
         reason="Without it, the default at this stage, gradients do not move to the host beside the backward pass."),
    Rule(name="client-optimizer", field="optimizer", severity="note",  # Accelerate makes its CPU Adam of it
         when=lambda s: s.device != "none" and s.stage and not s.has_zenflow and s.optimizer is None
         and s.at("zero_force_ds_cpu_optimizer") is not False and not s.hugging_face,
         reason="DeepSpeed refuses an optimizer from the script that is not its own CPU Adam.",
         advice='an optimizer here, or "zero_force_ds_cpu_optimizer": false'),
)  # fmt: skip

# update_interval, select_interval and warm-up: study 002 `auto_interval`, `moments_restart`, `reselection_truncates`,
# `reselection_reverts`, `same_buffer`, `late_pipeline`
_INTERVALS = (
    Rule(name="update-interval-auto", field=_UPDATE, severity="wrong", zenflow=True,
         fix={_UPDATE: SAFE_UPDATE_INTERVAL},
         when=lambda s: s.zenflow["update_interval"] == "auto" and not (s.at(_UPDATE) == "auto" and s.hugging_face),
         reason=lambda s: "All selected weights are NaN after the first step. Accelerate refuses the word."
         if s.at(_UPDATE) == "auto" else '"auto", the default, makes all selected weights NaN in the first step.'),
    Rule(name="auto-with-interval", field=_STRATEGY, severity="crashes", zenflow=True, fix={_STRATEGY: "step"},
         when=lambda s: s.zenflow["select_strategy"] == "auto" and is_whole(s.zenflow["select_interval"]),
         reason='With "auto", the default, DeepSpeed raises where select_interval is a number.'),
    Rule(name="strategy-without-interval", field=_SELECT, severity="crashes", zenflow=True,
         when=lambda s: s.zenflow["select_strategy"] in ("step", "epoch") and s.zenflow["select_interval"] == "auto",
         reason=lambda s: f'DeepSpeed needs a number with select_strategy "{s.zenflow["select_strategy"]}"; "auto" is '
         "the default.",
         fix=lambda s: {_SELECT: 1 if s.zenflow["select_strategy"] == "epoch" else s.windows(RARE_SELECTION_STEPS)}),
    Rule(name="select-interval-zero", field=_SELECT, severity="crashes", zenflow=True, backends=OURS,
         when=lambda s: is_whole(s.zenflow["select_interval"]) and s.zenflow["select_interval"] == 0,
         reason="The runtime of zftune run takes 1 and more.",
         fix=lambda s: {_SELECT: s.windows(RARE_SELECTION_STEPS)}),
    Rule(name="select-below-update", field=_SELECT, severity="crashes", zenflow=True,
         backends=lambda s: BOTH if s.zenflow["select_interval"] < 1 else UPSTREAM,
         when=lambda s: s.zenflow["select_strategy"] == "step" and is_whole(s.zenflow["select_interval"])
         and s.zenflow["select_interval"] != 0 and s.selects_every is None,
         reason="DeepSpeed refuses less than update_interval.",
         fix=lambda s: {_SELECT: s.windows(RARE_SELECTION_STEPS)}),
    Rule(name="never-selects-again", field=_SELECT, severity="note", zenflow=True,
         when=lambda s: s.zenflow["select_interval"] == 0 or s.zenflow["select_strategy"] == "epoch"
         or (s.zenflow["select_strategy"], s.zenflow["select_interval"]) == ("auto", "auto"),
         reason=lambda s: ("To DeepSpeed 0 is never:" if s.zenflow["select_interval"] == 0
                           else "Unless initialize() is given training_data,")
         + " columns are selected once and never again.",
         advice='select_strategy "step" selects again'),
    Rule(name="selects-often", field=_SELECT, severity="wrong", zenflow=True,
         when=lambda s: s.selects_every is not None and s.selects_every < RARE_SELECTION_STEPS,
         reason=lambda s: "Each selection zeroes the selected columns' moments but not their step count, so they step "
         "up to 4 times too far, and cuts 16-bit models' masters down to the weights' precision."
         + (" The overlapped update in flight is lost." if s.overlaps else ""),
         fix=lambda s: {_SELECT: s.windows(RARE_SELECTION_STEPS)}),
    Rule(name="selects-rarely", field=_SELECT, severity="note", zenflow=True,
         when=lambda s: s.selects_every is not None and s.selects_every >= RARE_SELECTION_STEPS,
         reason="Each selection zeroes the selected columns' moments but not their step count, so they step up to 4 "
         "times too far, and cuts 16-bit models' masters down to the weights' precision."),
    *(rule for name in (_SELECT, _WARM_UP) for rule in (
        Rule(name="broken-windows", field=name, severity="wrong", zenflow=True,
             when=lambda s, name=name: s.overlaps and name in _unfitting(s),  # type: ignore[misc]
             reason="It is no multiple of update_interval: two overlapped updates then share a buffer, a race.",
             fix=lambda s, name=name: {name: _unfitting(s)[name]}),  # type: ignore[misc]
        Rule(name="broken-windows", field=name, severity="note", zenflow=True,
             when=lambda s, name=name: not s.overlaps and name in _unfitting(s),  # type: ignore[misc]
             reason="It is no multiple of update_interval: a selection cuts a window short, whose mean is too small.",
             advice=lambda s, name=name: str(_unfitting(s)[name])))),  # type: ignore[misc]
    Rule(name="warm-up-negative", field=_WARM_UP, severity="crashes", zenflow=True, backends=OURS,
         when=lambda s: is_whole(_warm_up(s)) and _warm_up(s) < 0, reason="The runtime of zftune run takes 0 and more.",
         fix=lambda s: {_WARM_UP: s.update_interval or SAFE_UPDATE_INTERVAL}),
    Rule(name="overlap-without-warm-up", field=_WARM_UP, severity="wrong", zenflow=True,
         when=lambda s: is_whole(_warm_up(s)) and _warm_up(s) < 1 and s.overlaps,
         reason="Overlapped without warm-up, the default, the first wait is left out: the second boundary applies "
         "nothing, and updates come two windows late.",
         fix=lambda s: {_WARM_UP: s.update_interval or SAFE_UPDATE_INTERVAL}),
)  # fmt: skip

# What upstream's ZenFlow needs around it. Study 002 `clipping`, `user_accumulation`, `scrambled_weights`, `no_master`,
# `step_count_stuck`, `accelerate_boundary`, `zero1_accumulation`
_AROUND_ZENFLOW = (
    Rule(name="topk-auto", field=_TOPK, severity="ignored", zenflow=True, backends=BOTH, fix={_TOPK: 0.1},
         when=lambda s: s.at(_TOPK) == "auto" and not s.hugging_face,
         reason="DeepSpeed drops the word and takes 0.1."),
    Rule(name="zenflow-stage-0", field=_STAGE, severity="crashes", zenflow=True, when=lambda s: s.stage == 0,
         reason="ZenFlow works in ZeRO's optimizers; without a stage the first step ends with an AttributeError.",
         fix={_STAGE: 2}),
    Rule(name="zenflow-stage-3", field=_STAGE, severity="crashes", zenflow=True, when=lambda s: s.stage == 3,
         reason="With several ranks the first selection that changes a rank's share of the columns ends the run; on "
         "other devices than CUDA the first step does.", advice=f"stage 3 with {_INSTEAD}"),
    Rule(name="zenflow-without-offload", field=_DEVICE, severity="crashes", zenflow=True, backends=BOTH,
         when=_offloads_nothing, fix={_DEVICE: "cpu"},
         reason="DeepSpeed refuses ZenFlow without offload_optimizer; zftune run's runtime then offloads nothing."),
    Rule(name="scrambled-weights", field=ZENFLOW, severity="wrong", zenflow=True, elsewhere=True,
         versions=lambda v: v[:3] in [tuple(map(int, one.split("."))) for one in SCRAMBLING],
         when=lambda s: s.flattens, advice=f"DeepSpeed {GOOD}, or zftune run",
         reason=lambda s: f"DeepSpeed {s.version} scrambles every 2-D weight at initialize(): a pretrained model is "
         "noise."),
    Rule(name="zenflow-client-optimizer", field="optimizer", severity="crashes", zenflow=True, elsewhere=True,
         when=lambda s: s.flattens and s.optimizer is None, advice="an optimizer here",
         reason="ZenFlow takes its optimizer from the ds_config. One that the script passes ends in a TypeError."),
    Rule(name="zenflow-not-adam", field="optimizer.type", severity="wrong", zenflow=True, elsewhere=True,
         when=lambda s: s.flattens and s.optimizer not in (*ZENFLOW_OPTIMIZERS, None), advice=_INSTEAD,
         reason="ZenFlow updates the selected columns with AdamW, whatever stands here; the others by this."),
    Rule(name="zenflow-no-params", field="optimizer.params", severity="crashes", zenflow=True,
         when=_adam_without_params, fix={"optimizer.params": {"weight_decay": 0.0}},
         reason="ZenFlow fails where there are none."),
    Rule(name="weight-decay-default", field=_DECAY, severity="wrong", zenflow=True, fix={_DECAY: 0.0},
         when=lambda s: _adam_with_params(s) and not s.has(_DECAY),
         reason="Left out, the selected columns decay by 0.01, torch's default, and the others by 0."),
    Rule(name="group-settings", field=_DECAY, severity="wrong", zenflow=True, elsewhere=True, advice=_INSTEAD,
         when=lambda s: _adam_with_params(s) and s.hugging_face and is_number(s.at(_DECAY)) and s.at(_DECAY) != 0,
         reason="The Trainer decays biases and norms by 0. ZenFlow drops the groups' own values, and decays them too."),
    Rule(name="zenflow-guard", field=OVERLAP, severity="note", zenflow=True, when=lambda s: overlaps(s.config),
         reason="The update's own process reads the training's script again: what trains there has to stand under "
         f"`{GUARD}`, or it waits for ten minutes."),
    Rule(name="zenflow-reduce-scatter", field=f"{ZERO}.reduce_scatter", severity="crashes", zenflow=True,
         when=lambda s: s.flattens and s.at(f"{ZERO}.reduce_scatter") is False, fix={f"{ZERO}.reduce_scatter": True},
         reason="ZenFlow's other path lacks an argument: TypeError in the first backward pass."),
    Rule(name="zenflow-offload", field=_OFFLOADED, severity="crashes", zenflow=True, fix={f"{ZERO}.overlap_comm": True},
         when=lambda s: s.zenflow["offload"] is True and s.at(f"{ZERO}.overlap_comm") is not True
         and not (s.stage == 3 and not s.has(f"{ZERO}.overlap_comm")),
         reason="DeepSpeed refuses it without zero_optimization.overlap_comm."),
    Rule(name="zenflow-parallel", field="tensor_parallel.autotp_size", severity="wrong", zenflow=True,
         when=lambda s: is_number(ranks := s.at("tensor_parallel.autotp_size")) and ranks > 1, advice='no "zenflow"',
         reason="ZenFlow sends selected columns from the rank with the group's number, which is another rank's here."),
    Rule(name="zenflow-clipping", field=_CLIPPING, severity="wrong", zenflow=True, elsewhere=True, when=_clips,
         reason=lambda s: ("" if s.has(_CLIPPING) else "Left out, DeepSpeed clips to 1.0. ")
         + "Clipping leaves the selected columns out, which have the largest gradients.",
         fix=_no_clipping,
         advice=lambda s: "" if _no_clipping(s) else f"zftune run, which clips all columns; or 0.0, {_ASKED}"),
    Rule(name="zenflow-accumulation", field=_PASSES, severity="ignored", zenflow=True, elsewhere=True,
         when=lambda s: is_number(s.at(_PASSES)) and s.at(_PASSES) > 1,
         reason="ZenFlow overwrites it with update_interval: every backward pass is a step of its own, on its part of "
         "the batch.",
         fix=_no_accumulation,
         advice=lambda s: "" if _no_accumulation(s) else f"zftune run, which accumulates; or 1, {_ASKED}"),
    Rule(name="accelerate-boundary", field=ZENFLOW, severity="wrong", zenflow=True, elsewhere=True, advice=_INSTEAD,
         when=lambda s: s.hugging_face,
         reason="The Trainer and Accelerate make every step a boundary: the host updates in each of them, whatever "
         "update_interval is."),
    *(rule for name in ("bf16", "bfloat16") for rule in (
        Rule(name="zenflow-bf16", field=f"{name}.enabled", severity="wrong", zenflow=True, elsewhere=True,
             when=lambda s, name=name: s.enabled(name),  # type: ignore[misc]
             reason="Selected columns have no fp32 masters: updates below bf16's resolution are lost, and their step "
             "count sticks at 256.",
             advice='zftune run\'s runtime has masters for them; or no "zenflow" section'),
        Rule(name="zenflow-bf16", field=f"{name}.enabled", severity="note", zenflow=True,
             when=lambda s, name=name: s.at(f"{name}.enabled") == "auto",  # type: ignore[misc]
             reason="With --bf16 selected columns have no fp32 masters: updates below bf16's resolution are lost, and "
             "their step count sticks at 256.",
             advice='zftune run\'s runtime has masters for them; or no "zenflow" section'),
        Rule(name="zenflow-overflow", field=f"{name}.check_grad_overflow", severity="ignored", zenflow=True,
             elsewhere=True, fix={f"{name}.check_grad_overflow": False},
             when=lambda s, name=name: s.enabled(name)  # type: ignore[misc]
             and s.at(f"{name}.check_grad_overflow") is True,
             reason="Selected columns are updated before the check: an infinite gradient reaches their weights."))),
    Rule(name="zenflow-fp16", field="fp16.enabled", severity="wrong", zenflow=True, elsewhere=True,
         when=lambda s: s.enabled("fp16"), advice='no "zenflow" section',
         reason="Selected columns get gradients with the loss scale in them, infinite ones too."),
    *(Rule(name="zenflow-16-bit-masters", field=f"{name}.{name}_master_weights_and_grads", severity="crashes",
           zenflow=True, reason="DeepSpeed refuses 16-bit masters with ZenFlow.",
           when=lambda s, name=name: s.at(f"{name}.{name}_master_weights_and_grads") is True,  # type: ignore[misc]
           fix=lambda s, name=name: {f"{name}.{name}_master_weights_and_grads": False}  # type: ignore[misc]
           | ({states: MISSING} if s.has(states := f"{name}.{name}_optimizer_states") else {}))
      for name in ("bf16", "fp16")),
    Rule(name="zenflow-accumulation-dtype", field="data_types.grad_accum_dtype", severity="crashes", zenflow=True,
         when=_accumulation_dtype, fix={"data_types.grad_accum_dtype": MISSING},
         reason=lambda s: "With ZeRO-1 and ZenFlow the first step ends where it is not the model's dtype, "
         f"{_model_dtype(s)}: TypeError."),
)  # fmt: skip

# Study 002 `resume`, `resume_reverts`, `export_transposed`, `convolution`, `unused_parameter`, `window_mean`,
# `micro_step_correction`, `two_momenta`, `worker_death`, `destroy_leaks`
_NOTES = (
    Rule(name="zenflow-checkpoints", field=ZENFLOW, severity="note", zenflow=True,
         reason="Checkpoints lack the selected columns' state: a resumed run is another run. zero_to_fp32 writes "
         "transposed weights."),
    Rule(name="zenflow-model", field=ZENFLOW, severity="note", zenflow=True,
         reason="The run ends at a weight of more than two dimensions and at a parameter without gradient. Settings of "
         "parameter groups, but for the learning rate, do not reach selected columns."),
    Rule(name="zenflow-selection", field=ZENFLOW, severity="note", zenflow=True, when=lambda s: s.flattens,
         reason="Weights of one dimension, biases and norms, shift the sums that columns are selected by: behind them "
         "in a bucket other columns are selected than those with the largest gradients."),
    Rule(name="zenflow-ranks", field=ZENFLOW, severity="note", zenflow=True, versions=lambda v: v <= (0, 19, 6),
         when=lambda s: s.flattens,
         reason="On two ranks or more the run may end with a TypeError in the first step: it does where the border "
         "between two ranks' shares lies within a weight of one dimension."),
    Rule(name="zenflow-mean", field=_UPDATE, severity="note", zenflow=True,
         when=lambda s: (s.update_interval or 0) > 1,
         reason="The host makes one update a window, of the mean gradient, and its bias correction counts backward "
         "passes: the first updates are shorter."),
    Rule(name="zenflow-overlap", field=OVERLAP, severity="note", zenflow=True, when=lambda s: s.overlaps,
         reason="Overlapped, there are two sets of moments, each of every other window. A dead worker is noticed after "
         "60 s, and destroy() leaves worker and cores behind. On several nodes cores are split wrongly."),
    Rule(name="own-offload", field=_OFFLOADED, severity="note", zenflow=True, backends=OURS,
         when=lambda s: s.zenflow["offload"] is True,
         reason="The runtime of zftune run does without it: the selected columns' state stays on the GPU."),
)  # fmt: skip

RULES: tuple[Rule, ...] = (*_ANYWHERE, *_INTERVALS, *_AROUND_ZENFLOW, *_OFFLOADING, *_NOTES)
