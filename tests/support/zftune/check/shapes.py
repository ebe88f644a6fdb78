"""ds_configs as templates and example folders have them, in our own words and figures; and random ones."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

import torch

from tests.support.tiers import fast
from tests.support.zftune.check.cases import OFFLOAD, SAFE, ZENFLOW, ZERO, safe
from zftune.ds_config.reading import MISSING, Source, at, given, path_of, put

_ADAMW: dict[str, Any] = {
    "type": "AdamW",
    "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
}
_WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-4, "warmup_num_steps": 100}}
_CPU = {"device": "cpu", "pin_memory": True}
_AUTO_ADAMW = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
_AUTO_BATCH = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}


def base() -> dict[str, Any]:
    """Stage 2 with the optimizer on the CPU, which fits any number of ranks."""
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "optimizer": copy.deepcopy(_ADAMW),
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }


SHAPES: dict[str, dict[str, Any]] = {
    "the smallest": {"train_batch_size": 8},
    "no batch size": {"zero_optimization": {"stage": 2}},
    "only passes": {"gradient_accumulation_steps": 4, "zero_optimization": {"stage": 2}},
    "whole and passes": {"train_batch_size": 32, "gradient_accumulation_steps": 4},
    "whole, a rank's and passes": {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4,
    },
    "whole for eight": {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4},
    "whole that is odd": {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2},
    "whole is less than ranks": {"train_batch_size": 1},
    "a rank's is zero": {"train_micro_batch_size_per_gpu": 0},
    "whole is negative": {"train_batch_size": -8},
    "whole is a word": {"train_batch_size": "8"},
    "whole is a fraction": {"train_batch_size": 8.0, "train_micro_batch_size_per_gpu": 2.0},
    "sequences in parallel": {"train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": 2},
    "no sequences in parallel": {"train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": 0},
    "stage 1 in bf16": {**base(), "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    "stage 2 in fp16": {
        **base(),
        "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
        "zero_optimization": {
            "stage": 2,
            "allgather_partitions": True,
            "allgather_bucket_size": 2e8,
            "overlap_comm": True,
            "reduce_scatter": True,
            "reduce_bucket_size": 2e8,
            "contiguous_gradients": True,
            "offload_optimizer": _CPU,
        },
    },
    "stage 3 with everything on the CPU": {
        **base(),
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": _CPU,
            "offload_param": _CPU,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": 1_000_000,
            "stage3_prefetch_bucket_size": 1_000_000,
            "stage3_param_persistence_threshold": 10_000,
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    },
    "stage 3 in words": {**base(), "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "5e7"}},
    "stage 3 with NVMe": {
        **base(),
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 4, "fast_init": False},
            "offload_param": {"device": "nvme", "nvme_path": "/nvme", "max_in_cpu": 1e9},
        },
        "aio": {"block_size": 262_144, "queue_depth": 32, "thread_count": 1, "single_submit": False},
    },
    "the Trainer's stage 2": {
        **_AUTO_BATCH,
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
        "bf16": {"enabled": "auto"},
        "optimizer": _AUTO_ADAMW,
        "scheduler": {"type": "WarmupLR", "params": dict.fromkeys(_WARMUP["params"], "auto")},
        "zero_optimization": {"stage": 2, "offload_optimizer": _CPU, "reduce_bucket_size": "auto"},
        "gradient_clipping": "auto",
        "steps_per_print": "auto",
        "wall_clock_breakdown": False,
    },
    "Accelerate's without an optimizer": {**_AUTO_BATCH, "zero_optimization": {"stage": 2, "offload_optimizer": _CPU}},
    "axolotl's stage 1": {
        **_AUTO_BATCH,
        "zero_optimization": {"stage": 1, "overlap_comm": True},
        "bf16": {"enabled": True},
        "fp16": {"enabled": "auto", "auto_cast": False},
        "gradient_clipping": "auto",
    },
    "the old switch": {**base(), "zero_optimization": {"stage": 2, "cpu_offload": True}},
    "the old switch off": {**base(), "zero_optimization": {"stage": 2, "cpu_offload": False}},
    "the old switch and the section": {
        **base(),
        "zero_optimization": {"stage": 2, "cpu_offload": True, "offload_optimizer": _CPU},
    },
    "the old switches of stage 3": {
        **base(),
        "zero_optimization": {"stage": 3, "cpu_offload": True, "cpu_offload_param": True},
    },
    "an old name that is gone": {**base(), "zero_optimization": {"stage": 3, "cpu_offload_params": True}},
    "the oldest form": {**base(), "zero_optimization": True},
    "the oldest form off": {"train_batch_size": 8, "zero_optimization": False},
    "offloading is false": {**base(), "zero_optimization": {"stage": 2, "offload_optimizer": False}},
    "offloading is null": {**base(), "zero_optimization": {"stage": 2, "offload_optimizer": None}},
    "offloading is a word": {**base(), "zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}},
    "offloading at the top": {"train_batch_size": 8, "offload_optimizer": {"device": "cpu"}},
    "ZenFlow at the top": {"train_batch_size": 8, "zenflow": {"topk_ratio": 0.1}},
    "ZenFlow": {
        **base(),
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu"},
            "zenflow": {"topk_ratio": 0.05, "select_strategy": "step", "select_interval": 128, "update_interval": 4},
        },
        "gradient_clipping": 0.0,
    },
    "ZenFlow for epochs": {
        **base(),
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu"},
            "zenflow": {"select_strategy": "epoch", "select_interval": 1, "update_interval": "auto"},
        },
    },
    "Twin-Flow": {**base(), "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}},
    "Twin-Flow at stage 2": {
        **base(),
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.3}},
    },
    "quantized": {
        **base(),
        "zero_optimization": {"stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 8},
    },
    "two dtypes": {**base(), "bf16": {"enabled": True}, "fp16": {"enabled": True}},
    "bf16 under its old name": {**base(), "bfloat16": {"enabled": True}},
    "bf16 under both names": {**base(), "bf16": {"enabled": False}, "bfloat16": {"enabled": 3}},
    "half a loss scale": {**base(), "fp16": {"enabled": True, "min_loss_scale": 0.5}},
    "16-bit masters": {**base(), "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    "16-bit masters without ZeRO": {
        "train_batch_size": 8,
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
    },
    "16-bit states alone": {**base(), "bf16": {"enabled": True, "bf16_optimizer_states": True}},
    "communication in a dtype": {**base(), "communication_data_type": "BF16"},
    "communication in none": {**base(), "communication_data_type": "bfp16"},
    "sums at stage 3": {**base(), "gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}},
    "sums at stage 2": {**base(), "gradient_allreduce_op": "SUM"},
    "compiled": {**base(), "compile": {"deepcompile": True}},
    "compiled, as of old": {**base(), "compile": {"disable": True, "backend": "inductor"}},
    "amp": {"train_batch_size": 8, "amp": {"enabled": True, "opt_level": "O1"}},
    "amp says nothing": {"train_batch_size": 8, "amp": {}},
    "autocast": {**base(), "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "autocast of nothing": {**base(), "torch_autocast": {"enabled": True, "dtype": "bf17"}},
    "logs": {
        **base(),
        "tensorboard": {"enabled": True, "output_path": "logs", "job_name": "run"},
        "wandb": {"enabled": False, "project": "mine"},
        "csv_monitor": {"enabled": True, "output_path": "logs"},
        "comms_logger": {"enabled": True, "verbose": False, "prof_all": True, "debug": False},
        "flops_profiler": {"enabled": True, "profile_step": 1, "module_depth": -1, "top_modules": 1},
        "wall_clock_breakdown": True,
        "dump_state": False,
    },
    "logs with an unknown setting": {**base(), "comms_logger": {"enabled": True, "prof_step": 3}},
    "activation checkpointing": {
        **base(),
        "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True, "number_checkpoints": 4},
    },
    "checkpoints": {**base(), "checkpoint": {"tag_validation": "Warn", "load_universal": True}},
    "checkpoints of no kind": {**base(), "checkpoint": {"tag_validation": "Maybe"}},
    "accumulation in fp32": {**base(), "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "accumulation in fp8": {**base(), "data_types": {"grad_accum_dtype": "fp8"}},
    "pipeline": {**base(), "pipeline": {"stages": "auto", "activation_checkpoint_interval": 1}},
    "sparse attention": {"train_batch_size": 8, "sparse_attention": {"mode": "fixed", "block": 16}},
    "sparse attention of no kind": {"train_batch_size": 8, "sparse_attention": {"mode": "holes"}},
    "layers dropped": {
        "train_batch_size": 8,
        "progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.001},
    },
    "leaf modules": {**base(), "zero_optimization": {"stage": 3, "leaf_module": {"classes": "Block"}}},
    "leaf modules in a list": {**base(), "zero_optimization": {"stage": 3, "leaf_module": ["Block"]}},
    "autotuning": {**base(), "autotuning": {"enabled": True, "fast": False, "results_dir": "results"}},
    "autotuning nowhere": {**base(), "autotuning": {"enabled": True, "results_dir": ""}},
    "Adam of torch": {**base(), "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}},
    "Adam that is no AdamW": {**base(), "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "adam_w_mode": False}}},
    "Adam with a clipping": {**base(), "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "max_grad_norm": 1.0}}},
    "Adam with momentum": {**base(), "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "momentum": 0.9}}},
    "Adam without settings": {**base(), "optimizer": {"type": "Adam"}},
    "Adagrad": {**base(), "optimizer": {"type": "Adagrad", "params": {"lr": 1e-2}}},
    "Lion": {**base(), "optimizer": {"type": "Lion", "params": {"lr": 1e-4, "betas": [0.9, 0.99]}}},
    "SGD with ZeRO": {**base(), "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}},
    "SGD that is allowed": {
        **base(),
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
    },
    "SGD without ZeRO": {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
    "an optimizer's lr is negative": {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": -0.1}}},
    "1-bit Adam with ZeRO": {**base(), "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 400}}},
    "an optimizer of no kind": {**base(), "optimizer": {"type": "AdamX", "params": {}}},
    "an optimizer without a type": {**base(), "optimizer": {"params": {"lr": 1}}},
    "an optimizer is a word": {**base(), "optimizer": "AdamW"},
    "the permission in the wrong place": {
        **base(),
        "zero_optimization": {"stage": 2, "zero_allow_untested_optimizer": True},
    },
    "warm-up": {**base(), "scheduler": copy.deepcopy(_WARMUP)},
    "warm-up of no steps": {**base(), "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}},
    "warm-up and decay": {
        **base(),
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 1000, "warmup_num_steps": 100}},
    },
    "warm-up and decay without an end": {**base(), "scheduler": {"type": "WarmupDecayLR", "params": {}}},
    "a cosine": {
        **base(),
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 1000, "warmup_min_ratio": 0.1}},
    },
    "a cosine with another's settings": {
        **base(),
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 1000, "warmup_min_lr": 0.0}},
    },
    "a scheduler without settings": {**base(), "scheduler": {"type": "WarmupLR"}},
    "a scheduler of no kind": {**base(), "scheduler": {"type": "Cosine", "params": {}}},
    "a section of ours": {**base(), "zftune": {"backend": "zenflow"}},
    "a comment": {**base(), "comment": "of ours"},
}

BAD: tuple[Any, ...] = (None, True, -1, 0, 1, 2.5, "x", "auto", [], {})
SWITCH: tuple[Any, ...] = (True, False, "true", "no", "auto", "x", None)
# Of each setting that either side looks at, what is mostly allowed; odd values are for all of them.
VALUES: dict[str, tuple[Any, ...]] = {
    ZERO: (MISSING, {"stage": 1}),
    f"{ZERO}.stage": (0, 1, 2, 3, "2", 2.0),
    f"{ZERO}.cpu_offload": (True, False),
    f"{ZERO}.overlap_comm": (True, False),
    f"{ZERO}.reduce_scatter": (True, False),
    f"{ZERO}.zftune": (MISSING, MISSING, {"preset": "best"}),
    f"{ZERO}.unheard_of": (MISSING, 1),
    f"{ZERO}.zero_quantized_gradients": SWITCH,
    f"{ZERO}.zero_quantized_weights": SWITCH,
    f"{ZERO}.zero_hpz_partition_size": (1, 2),
    f"{ZERO}.mics_shard_size": (-1, 1, 8),
    f"{ZERO}.offload_param": ({"device": "cpu"}, {"device": "none"}),
    f"{ZERO}.round_robin_gradients": (True, False),
    OFFLOAD: (MISSING, {"device": "cpu"}),
    f"{OFFLOAD}.device": ("cpu", "cpu", "cpu", "nvme", "none", "gpu"),
    f"{OFFLOAD}.ratio": (0, 0.3, 1.0, 1, 1.5),
    f"{OFFLOAD}.pin_memory": SWITCH,
    ZENFLOW: (MISSING, {}, {"topk_ratio": 0.1, "update_interval": "auto"}),
    f"{ZENFLOW}.topk_ratio": (0, 0.05, 1, 1.5),
    f"{ZENFLOW}.select_strategy": ("auto", "step", "epoch", "steps"),
    f"{ZENFLOW}.select_interval": ("auto", 8, 256, 4.0),
    f"{ZENFLOW}.update_interval": ("auto", 1, 4, 4.0, 128),
    f"{ZENFLOW}.full_warm_up_rounds": (0, 4, 2.0),
    f"{ZENFLOW}.overlap_step": SWITCH,
    f"{ZENFLOW}.offload": SWITCH,
    f"{ZENFLOW}.auto_ratio": (0.5, 2),
    f"{ZENFLOW}.pt_reserved_cores_perc": (0.5, 2),
    f"{ZENFLOW}.steps_per_epoch": (10, 0),
    f"{ZENFLOW}.apply_lag": (1, 4, 99),
    f"{ZENFLOW}.pipeline": ("bucket", "none"),
    f"{ZENFLOW}.deferred_update": ("replay", "mean"),
    f"{ZENFLOW}.skip_nonfinite": SWITCH,
    f"{ZENFLOW}.host_threads": (1, 10_000),
    f"{ZENFLOW}.offload_ratio": (MISSING, 0.5),
    f"{ZENFLOW}.top k": (MISSING, 1),
    "bf16": ({"enabled": True}, {"enabled": False}, {"enabled": "auto"}, MISSING),
    "bf16.enabled": SWITCH,
    "bfloat16.enabled": SWITCH,
    "fp16": ({"enabled": True}, {"enabled": True, "loss_scale": 8}, {"enabled": False}, MISSING),
    "fp16.enabled": SWITCH,
    "fp16.auto_cast": SWITCH,
    "fp16.loss_scale": (0, 1, 128.0, "16"),
    "fp16.initial_scale_power": (16, "8", 4000, 2.0),
    "fp16.loss_scale_window": (1000, 10.0),
    "fp16.hysteresis": (2, "2"),
    "fp16.consecutive_hysteresis": SWITCH,
    "fp16.min_loss_scale": (1, 0.5),
    "fp16.fp16_master_weights_and_grads": SWITCH,
    "fp16.opt_level": (MISSING, "O2"),
    "amp.enabled": SWITCH,
    "torch_autocast": ({"enabled": True, "dtype": "bfloat16"}, {"enabled": True, "dtype": "float16"}, {}),
    "data_types.grad_accum_dtype": ("bf16", "fp16", "fp32"),
    "data_types.buffer_dtype": ("bf16", "fp32", "int8"),
    "optimizer": (MISSING, {"type": "AdamW"}, {"params": {"lr": 1}}, {"type": "Lamb", "params": {"lr": 1}}),
    "optimizer.type": ("Adam", "AdamW", "adagrad", "Lion", "SGD", "OneBitAdam", "Muon"),
    "optimizer.params": (MISSING, {}, {"lr": 1e-3, "momentum": 0.9, "nesterov": True}),
    "optimizer.params.lr": (1e-3, "auto", "1e-3"),
    "optimizer.params.betas": ([0.9, 0.999], [0.9], [0.9, 1.0], "auto"),
    "optimizer.params.eps": (1e-8, 10**400),
    "optimizer.params.weight_decay": (0.1, 0),
    "optimizer.params.momentum": (0.9,),
    "optimizer.params.nesterov": SWITCH,
    "optimizer.params.amsgrad": SWITCH,
    "optimizer.params.adam_w_mode": SWITCH,
    "optimizer.params.torch_adam": SWITCH,
    "optimizer.params.bias_correction": SWITCH,
    "optimizer.params.freeze_step": (MISSING, 400),
    "optimizer.params.max_grad_norm": (MISSING, MISSING, 1.0),
    "scheduler": ({"type": "WarmupLR", "params": {"warmup_num_steps": 10}}, {"type": "Cosine"}, MISSING),
    "scheduler.params.warmup_num_steps": (10, 0, "auto"),
    "gradient_clipping": (0, 1.0, "auto", -1.0),
    "gradient_accumulation_steps": (1, 4, "auto", 2.0),
    "train_batch_size": (8, "auto"),
    "train_micro_batch_size_per_gpu": (4, "auto"),
    "communication_data_type": ("fp16", "fp32"),
    "sparse_gradients": SWITCH,
    "gradient_allreduce_op": ("mean", "sum", "SUM"),
    "managed_gradient_accumulation": SWITCH,
    "compile.deepcompile": SWITCH,
    "compression_training": (MISSING, {}, {"weight_quantization": {}}),
    "sequence_parallel_size": (1, 2),
    "pipeline_parallel_size": (1, 2),
    "tensor_parallel.autotp_size": (0, 1, 4),
    "pipeline": ({"stages": "auto"}, {"stages": 2}),
    "hybrid_engine.enabled": SWITCH,
    "elasticity.enabled": SWITCH,
    "eigenvalue.enabled": SWITCH,
    "expert_parallel.enabled": SWITCH,
    "checkpoint": ({"load_universal": True}, {"tag_validation": "WARN"}),
    "zero_allow_untested_optimizer": SWITCH,
    "zero_force_ds_cpu_optimizer": SWITCH,
    "zftune": (MISSING, {}, {"backend": "zenflow"}, {"backend": "deepspeed"}, {"presets": "x", "online": 1}),
    "zftune.backend": ("zenflow", "deepspeed", "torch"),
    "zftune.preset": ("best", "mine"),
    "zftune.quality": ("exact", "published", "loose", "best"),
    "zftune.online": SWITCH,
    "zftune.nested": (MISSING, {"inner": "auto"}),
}


def some_config(random: Random) -> dict[str, Any]:
    """A ds_config that trains, with up to eight other settings, of which one in eight is odd."""
    config = safe(random.choice(sorted(path.stem for path in SAFE.glob("*.json"))))
    for dotted in random.choices(sorted(VALUES), k=random.randint(0, 8)):
        values = BAD if random.randint(0, 7) == 0 else VALUES[dotted]
        put(config, path_of(dotted), copy.deepcopy(random.choice(values)))
    return config


_UNCOMPILED = ("adagrad", "lamb", "lion")
_COMPILED = ("adam", "adamw")  # for a CPU; torch's own are there
_ELSEWHERE = ("aio", "autotuning", "compression_training", "csv_monitor", "elasticity", "hybrid_engine", "tensorboard")


def can_be_made_here(config: dict[str, Any]) -> bool:
    """Whether DeepSpeed can make an engine of it on a CPU, on one rank, without compiling, and within seconds."""
    kind, zero = at(config, ("optimizer", "type")), config.get(ZERO)
    zero = zero if isinstance(zero, dict) else {}
    compiled = not isinstance(kind, str) or kind.lower() in _COMPILED or kind in vars(torch.optim)
    nvme = any("nvme" in str(zero.get(name)) for name in ("offload_optimizer", "offload_param"))
    overlaps = at(config, path_of(f"{ZENFLOW}.overlap_step")) not in (MISSING, False)
    ranks = any(config.get(name) not in (None, 1) for name in ("sequence_parallel_size", "pipeline_parallel_size"))
    compiled = compiled and not (isinstance(kind, str) and kind.lower() in _UNCOMPILED)
    apex = "amp" in config and ZERO not in config  # without ZeRO it is imported
    quantized = any("quantized" in name and value for name, value in zero.items())  # not on a CPU
    return compiled and not (
        nvme or overlaps or ranks or quantized or apex or any(name in config for name in _ELSEWHERE)
    )


def _put_to_it() -> dict[str, dict[str, Any]]:
    """The shapes, and 300 random ones; ten of each by day."""
    random = Random(50)
    drawn = {f"random {number}": some_config(random) for number in range(1000)}
    found = {name: given(Source(config)) for name, config in {**SHAPES, **drawn}.items()}
    names = [name for name, config in found.items() if can_be_made_here(config)]
    shapes = [name for name in names if name in SHAPES]
    others = [name for name in names if name in drawn]
    return {name: found[name] for name in fast([*shapes[::6], *others[:10]], all_of=[*shapes, *others[:300]])}


PUT_TO_IT = _put_to_it()
