"""ds_configs of every shape, and what each version of DeepSpeed makes of them, recorded by running it.

`python -m tests.zftune.check.corpus FOLDER...` puts them to the DeepSpeed in each folder, in a process of its own, and
writes verdicts.json. The shapes that people have stand in `SHAPES`; the others are made from DeepSpeed's own models and
from what it was seen to read: each setting right, of a wrong type, out of its range, unknown, absent, "auto".
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zftune.ds_config.reading import MISSING, path_of, put
from zftune.ds_config.tables import KINDS, Table, table

VERSION = "0.19.6"
WORLDS = (1, 2, 8)
RECORD = Path(__file__).with_name("verdicts.json")

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


# As templates and example folders have them, in our own words and figures.
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
    "whole for eight": {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
    },
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


def corpus() -> dict[str, dict[str, Any]]:
    """All of them by name, in an order that stays."""
    known = table(VERSION)
    assert known is not None
    found = {f"shape: {name}": copy.deepcopy(config) for name, config in SHAPES.items()}
    for name, (dotted, value) in _made(known):
        config = base()
        put(config, path_of(dotted), copy.deepcopy(value))
        found[name] = config
    return found


def _made(known: Table) -> Iterator[tuple[str, tuple[str, Any]]]:
    for dotted, model in known.sections.items():
        yield from _of_model(known, dotted, known.models[model.__name__], known)
    for dotted in (*known.plain, *sorted(known.names)):
        if dotted.startswith("scheduler.") or dotted in known.sections:
            continue
        for kind, value in KINDS.items():
            yield f"{dotted}: {kind}", (dotted, value)
    for dotted, taken in known.plain.items():
        if dotted.startswith("scheduler."):
            _, scheduler, name = dotted.split(".")
            needed = {"WarmupDecayLR": {"total_num_steps": 100}, "WarmupCosineLR": {"total_num_steps": 100}}
            ends = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}
            params = {**needed.get(scheduler, ends if scheduler == "OneCycle" else {})}
            for kind in ("null", "zero", "negative", "word", "object"):
                value = {"type": scheduler, "params": {**params, name: KINDS[kind]}}
                yield f"{dotted}: {kind}", ("scheduler", value)
            assert taken["kinds"]


def _of_model(known: Table, dotted: str, model: Any, _: Any) -> Iterator[tuple[str, tuple[str, Any]]]:
    for name, field in model["fields"].items():
        path = f"{dotted}.{field.get('alias', name)}"
        values = {"default": field.get("default"), "auto": "auto", "word": "unheard_of", "null": None, "list": [1]}
        values |= {"true": True, "number in a word": "3", "fraction": 2.5, "object": {"unheard_of": 1}}
        for sign, bound in field.get("bounds", {}).items():
            values[f"{sign} {bound}, below"], values[f"{sign} {bound}, above"] = bound - 1, bound + 1
            values[f"{sign} {bound}, at it"] = bound
        for kind, value in values.items():
            yield f"{path}: {kind}", (path, value)
    yield f"{dotted}: unknown", (f"{dotted}.unheard_of", 1)
    yield f"{dotted}: absent", (dotted, MISSING)
    for kind in ("null", "true", "word", "list", "empty object"):
        yield f"{dotted}: {kind}", (dotted, KINDS[kind])


def digest(configs: dict[str, dict[str, Any]]) -> str:
    """Of what was recorded."""
    return hashlib.sha256(json.dumps(configs).encode()).hexdigest()[:16]


def recorded(version: str) -> dict[str, tuple[bool, ...]]:
    """Whether this version refused each, at one, two and eight ranks."""
    configs, record = corpus(), json.loads(RECORD.read_text())
    assert record["corpus"] == digest(configs), "it is another corpus: record it again"
    bits = record["refused"][version]
    size = len(WORLDS)
    return {name: tuple(bit == "1" for bit in bits[at * size : at * size + size]) for at, name in enumerate(configs)}


def here() -> None:
    """Put the corpus to the DeepSpeed that is imported."""
    from zftune.integrations.deepspeed import asking

    sys.stdout, out = sys.stderr, sys.stdout
    import deepspeed

    bits = "".join(
        "01"[asking.first_error(config, world) is not None] for config in corpus().values() for world in WORLDS
    )
    out.write(json.dumps([deepspeed.__version__.partition("+")[0].strip(), bits]) + "\n")


def main() -> None:
    """Record."""
    refused = {}
    for folder in sys.argv[1:]:
        paths = os.pathsep.join([folder, str(Path.cwd())])
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": paths}
        words = [sys.executable, "-m", "tests.zftune.check.corpus", "--here"]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{folder}: {done.stderr[-3000:]}")
        version, bits = json.loads(done.stdout.splitlines()[-1])
        refused[version] = bits
        sys.stderr.write(f"{version}: {bits.count('1')} of {len(bits)} are refused\n")
    RECORD.write_text(json.dumps({"corpus": digest(corpus()), "worlds": WORLDS, "refused": refused}, indent=1) + "\n")


if __name__ == "__main__":
    here() if sys.argv[1:] == ["--here"] else main()
