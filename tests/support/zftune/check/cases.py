"""Bad ds_configs: which rule must see each, and what DeepSpeed itself does with it."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from zftune.ds_config.reading import MISSING, path_of, put

SAFE = Path(__file__).parent / "safe"
ZERO = "zero_optimization"
ZENFLOW = f"{ZERO}.zenflow"
OFFLOAD = f"{ZERO}.offload_optimizer"
PARAMS = "optimizer.params"

Proof = Literal["parse", "train", "accelerate", "figure", "moves", "elsewhere"]


@dataclass(frozen=True)
class Bad:
    rule: str
    base: str
    changes: dict[str, Any]
    proof: Proof
    """ "parse": DeepSpeedConfig raises. "train": initialize() or the first steps do. "accelerate": Accelerate's plugin
    does. "figure": a test of its own looks at it, and "moves": at how far each step goes. "elsewhere": study 002; or it
    takes a GPU, ranks, another version."""
    error: str = ""
    path: str = ""
    """Where the finding is; empty: at the only change."""
    mended: bool = True
    """Whether `--fix` for DeepSpeed's own runtime finds a safe value."""
    version: str = "0.19.6"

    @property
    def config(self) -> dict[str, Any]:
        config = safe(self.base)
        for dotted, value in self.changes.items():
            put(config, path_of(dotted), copy.deepcopy(value))
        return config

    @property
    def where(self) -> str:
        return self.path or next(iter(self.changes))

    def __str__(self) -> str:
        return f"{self.rule}:{self.where}={next(iter(self.changes.values()))!r}"


def safe(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((SAFE / f"{name}.json").read_text())
    return config


def _zf(rule: str, changes: dict[str, Any], proof: Proof, error: str = "", **more: Any) -> Bad:
    return Bad(rule, "zenflow-sequential", changes, proof, error, **more)


ZF_U, ZF_S, ZF_W = f"{ZENFLOW}.update_interval", f"{ZENFLOW}.select_interval", f"{ZENFLOW}.full_warm_up_rounds"
STRATEGY, TOPK, OVERLAP = f"{ZENFLOW}.select_strategy", f"{ZENFLOW}.topk_ratio", f"{ZENFLOW}.overlap_step"
RATIO = f"{OFFLOAD}.ratio"
INVALID = "ValidationError"

INTERVALS = (
    _zf("update-interval-auto", {ZF_U: "auto"}, "figure"),
    _zf("update-interval-auto", {ZF_U: MISSING}, "figure"),
    _zf("refused-by-deepspeed", {ZF_U: 0}, "parse", INVALID),
    _zf("refused-by-deepspeed", {ZF_U: -1}, "parse", INVALID),
    _zf("refused-by-deepspeed", {ZF_U: "four"}, "parse", INVALID),
    _zf("refused-by-deepspeed", {ZF_U: 4.5}, "parse", INVALID),
    _zf("refused-by-deepspeed", {STRATEGY: "steps"}, "parse", INVALID),
    _zf("auto-with-interval", {STRATEGY: "auto"}, "train", "Warning"),
    _zf("auto-with-interval", {STRATEGY: MISSING}, "train", "Warning"),
    _zf("strategy-without-interval", {ZF_S: "auto"}, "train", "ValueError"),
    _zf("strategy-without-interval", {ZF_S: MISSING}, "train", "ValueError"),
    _zf("strategy-without-interval", {ZF_S: "auto", STRATEGY: "epoch"}, "train", "ValueError"),
    _zf("refused-by-deepspeed", {ZF_S: "often"}, "parse", INVALID),
    _zf("refused-by-deepspeed", {ZF_S: 40.5}, "parse", INVALID),
    _zf("select-below-update", {ZF_S: 2}, "train", "ValueError"),
    _zf("select-below-update", {ZF_S: -8}, "train", "ValueError"),
    _zf("selects-often", {ZF_S: 32}, "elsewhere"),
    _zf("refused-by-deepspeed", {ZF_W: "some"}, "parse", INVALID),
    Bad("broken-windows", "zenflow-overlapped", {ZF_S: 258}, "elsewhere"),
    Bad("broken-windows", "zenflow-overlapped", {ZF_W: 3}, "elsewhere"),
    Bad("overlap-without-warm-up", "zenflow-overlapped", {ZF_W: 0}, "elsewhere"),
    Bad("overlap-without-warm-up", "zenflow-overlapped", {ZF_W: MISSING}, "elsewhere"),
)

AROUND_ZENFLOW = (
    _zf("topk-auto", {TOPK: "auto"}, "figure"),
    _zf("refused-by-deepspeed", {TOPK: 1.5}, "parse", INVALID),
    _zf("refused-by-deepspeed", {TOPK: "much"}, "parse", INVALID),
    _zf("refused-by-deepspeed", {TOPK: 0}, "parse", INVALID),
    _zf("refused-by-deepspeed", {TOPK: 1}, "parse", INVALID),
    _zf("zenflow-stage-0", {f"{ZERO}.stage": 0}, "train", "AttributeError"),
    _zf("zenflow-stage-3", {f"{ZERO}.stage": 3}, "figure", mended=False),
    _zf("zenflow-without-offload", {OFFLOAD: MISSING}, "train", "ValueError", path=f"{OFFLOAD}.device"),
    _zf("zenflow-without-offload", {f"{OFFLOAD}.device": "none"}, "train", "ValueError"),
    _zf("scrambled-weights", {f"{ZERO}.stage": 1}, "elsewhere", path=ZENFLOW, mended=False, version="0.19.7"),
    _zf("scrambled-weights", {f"{ZERO}.stage": 2}, "elsewhere", path=ZENFLOW, mended=False, version="0.19.8"),
    _zf("zenflow-client-optimizer", {"optimizer": MISSING}, "figure", mended=False),
    _zf("zenflow-not-adam", {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, "figure",
        path="optimizer.type", mended=False),
    _zf("zenflow-no-params", {PARAMS: MISSING}, "train", "TypeError"),
    *(
        _zf("zenflow-optimizer-setting", {f"{PARAMS}.{name}": True}, "train", "TypeError")
        for name in ("adam_w_mode", "fp32_optimizer_states", "torch_adam", "bias_correction", "fused")
    ),
    _zf("weight-decay-default", {f"{PARAMS}.weight_decay": MISSING}, "figure"),
    _zf("group-settings", {f"{PARAMS}.weight_decay": 0.1, f"{PARAMS}.lr": "auto"}, "elsewhere", mended=False),
    _zf("accelerate-boundary", {"train_micro_batch_size_per_gpu": "auto"}, "elsewhere", path=ZENFLOW, mended=False),
    _zf("zenflow-reduce-scatter", {f"{ZERO}.reduce_scatter": False}, "train", "TypeError"),
    _zf("zenflow-reduce-scatter", {f"{ZERO}.reduce_scatter": False, f"{ZERO}.stage": 1}, "train", "TypeError"),
    _zf("zenflow-offload", {f"{ZENFLOW}.offload": True, f"{ZERO}.overlap_comm": MISSING}, "train", "AssertionError"),
    _zf("refused-by-deepspeed", {"gradient_allreduce_op": "sum"}, "parse", "ValueError"),
    _zf("zenflow-parallel", {"tensor_parallel": {"autotp_size": 2}}, "elsewhere",
        path="tensor_parallel.autotp_size", mended=False),
    _zf("zenflow-clipping", {"gradient_clipping": 1.0}, "elsewhere"),
    _zf("zenflow-clipping", {"gradient_clipping": MISSING}, "figure"),
    _zf("zenflow-accumulation", {"gradient_accumulation_steps": 2}, "figure"),
    _zf("zenflow-accumulation", {"gradient_accumulation_steps": 2, "train_batch_size": 4}, "figure"),
    _zf("zenflow-bf16", {"bf16": {"enabled": True}}, "figure", path="bf16.enabled", mended=False),
    _zf("zenflow-overflow", {"bf16": {"enabled": True, "check_grad_overflow": True}}, "elsewhere",
        path="bf16.check_grad_overflow"),
    _zf("zenflow-fp16", {"fp16": {"enabled": True}}, "elsewhere", path="fp16.enabled", mended=False),
    _zf("zenflow-16-bit-masters", {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "train",
        "AssertionError", path="bf16.bf16_master_weights_and_grads"),
    _zf("zenflow-accumulation-dtype", {"data_types.grad_accum_dtype": "bf16", f"{ZERO}.stage": 1}, "train",
        "TypeError"),
)  # fmt: skip

OFFLOADING = (
    Bad("refused-by-deepspeed", "zero2-offload", {RATIO: 0.5}, "parse", INVALID),
    Bad("refused-by-deepspeed", "twin-flow", {RATIO: 1.5}, "parse", INVALID),
    Bad("ratio-zenflow", "twin-flow", {ZENFLOW: safe("zenflow-sequential")[ZERO]["zenflow"]}, "train",
        "AssertionError", path=RATIO),
    Bad(
        "ratio-nvme",
        "twin-flow",
        {f"{OFFLOAD}.device": "nvme", f"{OFFLOAD}.nvme_path": "/nvme"},
        "elsewhere",
        path=RATIO,
    ),
    Bad("ratio-optimizer", "twin-flow", {f"{PARAMS}.torch_adam": True}, "train", "AssertionError", path=RATIO),
    Bad("ratio-inert", "twin-flow", {f"{ZERO}.sub_group_size": MISSING}, "figure", path=RATIO),
    Bad("ratio-scheduler", "twin-flow", {"scheduler": safe("scheduler")["scheduler"]}, "figure", path=RATIO),
    Bad("nvme-stage", "zero2-offload", {f"{OFFLOAD}.device": "nvme"}, "figure"),
    Bad(
        "nvme-folder",
        "zero3-offload",
        {f"{ZERO}.offload_param": {"device": "nvme"}},
        "elsewhere",
        path=f"{ZERO}.offload_param.nvme_path",
        mended=False,
    ),
    Bad(
        "nvme-folder",
        "zero3-offload",
        {f"{OFFLOAD}.device": "nvme"},
        "elsewhere",
        path=f"{OFFLOAD}.nvme_path",
        mended=False,
    ),
    Bad("offload-stage-0", "zero2-offload", {f"{ZERO}.stage": 0}, "elsewhere"),
)  # fmt: skip

SCALING = (
    Bad("fp16-stage-0", "fp16-offload", {f"{ZERO}.stage": 0, OFFLOAD: MISSING, "fp16.loss_scale": 8}, "moves",
        path="fp16.enabled"),
    Bad("fp16-stage-0", "fp16-offload", {ZERO: MISSING}, "moves", path="fp16.enabled"),
)  # fmt: skip

THE_FILE = (
    Bad("misplaced-section", "zero2-offload", {"zenflow": {"topk_ratio": 0.1}}, "elsewhere"),
    Bad("misplaced-section", "zero2-offload", {f"{ZERO}.zero_allow_untested_optimizer": True}, "parse", INVALID),
    Bad("refused-by-deepspeed", "zero2-offload", {OFFLOAD: "cpu"}, "parse", INVALID),
    Bad("refused-by-deepspeed", "zero2-offload", {"communication_data_type": "bfp16"}, "parse", "ValueError"),
    Bad("refused-by-deepspeed", "fp16-offload", {"fp16.min_loss_scale": 0.5}, "parse", INVALID),
    Bad("refused-by-deepspeed", "zero2-offload", {"optimizer.type": "SGD", PARAMS: {"lr": 0.1}}, "train",
        "AssertionError"),
    Bad("refused-by-deepspeed", "zero2-offload", {"optimizer.type": "OneBitAdam"}, "train", "AssertionError",
        mended=False),
    Bad("unknown-setting", "zero2-offload", {"comms_logger": {"enabled": False, "prof_step": 1}}, "parse", INVALID,
        path="comms_logger.prof_step", mended=False),
    Bad("unknown-setting", "zero2-offload", {"compile": {"disable": True}}, "parse", INVALID, path="compile.disable"),
    Bad("unknown-setting", "zero2-offload", {f"{ZERO}.stages": 2}, "parse", INVALID, mended=False),
    Bad("unknown-setting", "zero2-offload", {f"{OFFLOAD}.ration": 0.5}, "parse", INVALID, mended=False),
    Bad("unknown-setting", "zero3-offload", {f"{ZERO}.offload_param.path": "x"}, "parse", INVALID, mended=False),
    Bad("unknown-setting", "zero2-offload", {"bf16.loss_scale": 1}, "parse", INVALID),
    Bad("unknown-setting", "fp16-offload", {"fp16.scale": 1}, "parse", INVALID, mended=False),
    _zf("unknown-setting", {f"{ZENFLOW}.topk": 0.1}, "parse", INVALID, mended=False),
    _zf("unknown-setting", {f"{ZENFLOW}.apply_lag": 2}, "parse", INVALID),
    Bad("zftune-misplaced", "zero2-offload", {f"{ZERO}.zftune": {"preset": "best"}}, "parse", INVALID),
    Bad("zftune-auto", "hugging-face", {"zftune": {"preset": "auto"}}, "accelerate", path="zftune.preset"),
    Bad("zftune-section", "zero2-offload", {"zftune": {"quality": "perfect"}}, "elsewhere", path="zftune.quality"),
    Bad("auto-not-filled", "hugging-face", {f"{ZERO}.allgather_bucket_size": "auto"}, "accelerate"),
    Bad("auto-not-filled", "hugging-face", {f"{OFFLOAD}.pin_memory": "auto"}, "accelerate"),
    Bad("auto-not-filled", "hugging-face", {f"{ZENFLOW}.update_interval": "auto"}, "accelerate", mended=False),
    Bad("clipping-no-number", "zero2-offload", {"gradient_clipping": "1.0"}, "train", "TypeError"),
    Bad("divided-by", "zero2-offload", {"steps_per_print": 0}, "train", "ZeroDivisionError"),
    Bad("divided-by", "zero2-offload", {"steps_per_print": False}, "train", "ZeroDivisionError"),
    Bad("divided-by", "zero2-offload", {"steps_per_print": "10"}, "train", "TypeError"),
    Bad("divided-by", "scheduler",
        {"scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_step_size": 0}}},
        "elsewhere", path="scheduler.params.lr_range_test_step_size", mended=False, version="0.19.2"),
    Bad("divided-by", "fp16-offload", {"fp16.loss_scale_window": 0}, "elsewhere", version="0.19.2"),
    Bad("not-a-number", "zero2-offload", {f"{PARAMS}.lr": float("nan")}, "figure", mended=False),
    Bad("refused-by-deepspeed", "zero2-offload", {f"{PARAMS}.max_grad_norm": 1.0}, "train", "ValueError"),
    Bad("refused-by-deepspeed", "scheduler", {"scheduler.params.warmup_num_steps": 0}, "train", "ValueError"),
    Bad("decay-within-warm-up", "scheduler",
        {"scheduler.params.total_num_steps": 1, "scheduler.params.warmup_num_steps": 2}, "elsewhere", mended=False),
    Bad("decay-within-warm-up", "scheduler",
        {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 9}}},
        "elsewhere", path="scheduler.params.total_num_steps", mended=False),
    Bad(
        "amp", "zero2-offload", {"amp": {"enabled": True}}, "train", "AssertionError", path="amp.enabled", mended=False
    ),
    Bad("autocast-quantized", "zero2-offload",
        {f"{ZERO}.zero_quantized_weights": True, "torch_autocast": {"enabled": True}}, "elsewhere"),
    Bad("refused-by-deepspeed", "zero2-offload", {f"{ZERO}.cpu_offload": True}, "parse", "AssertionError"),
    Bad("refused-by-deepspeed", "fp16-offload", {"bf16": {"enabled": True}}, "parse", "AssertionError",
        path="fp16.enabled"),
)  # fmt: skip

CASES = (*INTERVALS, *AROUND_ZENFLOW, *OFFLOADING, *SCALING, *THE_FILE)
