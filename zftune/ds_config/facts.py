"""What is known of DeepSpeed: its versions, its defaults, and settings that are safe where its own are not."""

from __future__ import annotations

from typing import Any

GOOD = "0.19.6"
"""The version to use where there is a choice: the last one whose own ZenFlow leaves weights as they are."""

TESTED = ("0.19.6", "0.19.7", "0.19.8")
"""With which the backend zenflow was tested."""

TESTED_UPSTREAM = ("0.19.6",)
"""With which its own ZenFlow and Twin-Flow were."""

SCRAMBLING = ("0.19.7", "0.19.8")
"""That scramble every 2-D weight at initialisation, under ZenFlow at ZeRO stages 1 and 2."""

FILES_SINCE = "0.16.0"
"""Checkpoints have looked the same since."""

ZENFLOW_DEFAULTS: dict[str, Any] = {
    "topk_ratio": 0.1,
    "select_strategy": "auto",
    "select_interval": "auto",
    "update_interval": "auto",
    "overlap_step": False,
    "offload": False,
    "auto_ratio": 0.99,
    "full_warm_up_rounds": 0,
    "pt_reserved_cores_perc": 0.5,
}

SAFE_UPDATE_INTERVAL = 4
"""For "auto", which turns all weights into NaN."""

RARE_SELECTION_STEPS = 128
"""Every selection resets moments and truncates masters: where our runtime would watch, one must be rare."""

ZENFLOW_OPTIMIZERS = ("adam", "adamw")
"""Types of the optimizers that ZenFlow works with, in small letters."""

OWN_KNOBS = (
    "deferred_update",
    "apply_lag",
    "look_ahead",
    "window_phase",
    "pipeline",
    "skip_nonfinite",
    "host_threads",
    "staging_bytes",
)
"""Which the runtime of `zftune run` takes beside, in the section of ZenFlow."""


def scrambles(version: str) -> bool:
    """Whether a version of DeepSpeed, such as "0.19.7+cu128", scrambles weights under ZenFlow at stages 1 and 2."""
    return version.partition("+")[0] in SCRAMBLING


BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""Settings of which the first is the product of the others and of the number of ranks."""

NAMES: dict[tuple[str, ...], frozenset[str]] = {
    (): frozenset({
        "activation_checkpointing", "aio", "amp", "autotuning", "bf16", "bfloat16", "checkpoint", "comet",
        "comms_logger", "communication_data_type", "compile", "compression_training", "csv_monitor",
        "curriculum_learning", "data_efficiency", "data_types", "dataloader_drop_last", "datastates_ckpt",
        "disable_allgather", "disable_python_gc", "dump_state", "eigenvalue", "elasticity", "expert_parallel",
        "flops_profiler", "fp16", "gradient_accumulation_steps", "gradient_allreduce_op", "gradient_clipping",
        "gradient_predivide_factor", "graph_harvesting", "hybrid_engine", "log_level", "managed_gradient_accumulation",
        "memory_breakdown", "nebula", "optimizer", "pipeline", "prescale_gradients", "progressive_layer_drop",
        "quantize_training", "scheduler", "seq_parallel_comm_data_type", "seq_parallel_communication_data_type",
        "sequence_parallel_size", "sparse_attention", "sparse_gradients", "steps_per_print", "tensor_parallel",
        "tensorboard", "timers", "torch_autocast", "train_batch_size", "train_micro_batch_size_per_gpu",
        "use_data_before_expert_parallelism", "vocabulary_size", "wall_clock_breakdown", "wandb", "weight_quantization",
        "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "zero_optimization", "zftune",
    }),
    ("optimizer",): frozenset({"type", "params", "legacy_fusion"}),
    ("scheduler",): frozenset({"type", "params"}),
    ("optimizer", "params"): frozenset({
        "adam_w_mode", "adamw_mode", "adjust_lr_fn", "alpha", "amsgrad", "beta2_decay", "betas", "bias_correction",
        "capturable", "centered", "dampening", "decoupled_weight_decay", "differentiable", "eps", "eps_inside_sqrt",
        "etas", "foreach", "fp32_optimizer_states", "fused", "history_size", "initial_accumulator_value", "lambd",
        "line_search_fn", "lr", "lr_decay", "max_coeff", "max_eval", "max_grad_norm", "max_iter", "maximize",
        "min_coeff", "momentum", "momentum_decay", "nesterov", "ns_coefficients", "ns_steps", "rho", "set_grad_none",
        "step_sizes", "tolerance_change", "tolerance_grad", "weight_decay",
    }),
}  # fmt: skip
"""Names, of any version, in the sections that no pydantic model of DeepSpeed's describes; at the top level and beside
"type" and "params" it ignores others without a word."""

OTHER_WORDS = {"learning_rate": "lr", "wd": "weight_decay", "l2": "weight_decay", "epsilon": "eps"}
"""An optimizer's settings under the names that other libraries have for them."""
