"""The cells: each a ds_config, what the script does with it, and on which side it runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from compatibility.idioms.listing import NAMES

SIDES = ("zenflow", "deepspeed", "plain")
"""zftune's backends, and DeepSpeed without zftune."""
DTYPES = ("fp32", "bf16", "fp16")
STAGES = (0, 1, 2, 3)
LR, DECAY, CLIP = 1e-3, 0.1, 0.1
STEPS, WINDOWED_STEPS = 12, 24

EVERY_STEP = {"topk_ratio": 0.2, "select_strategy": "step", "select_interval": 64, "update_interval": 1}
"""ZenFlow that must train as AdamW does: it defers nothing, and selects once."""
WINDOWS = {"topk_ratio": 0.2, "select_strategy": "step", "select_interval": 16, "update_interval": 4}
AUTO = {"topk_ratio": 0.1, "select_strategy": "auto", "select_interval": "auto", "update_interval": "auto"}
SECTIONS: dict[str, dict[str, Any] | None] = {"ZeRO-Offload": None, "ZenFlow": EVERY_STEP}
OPTIMIZER = {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}}
WARMUP = {
    "warmup_min_lr": 1e-4,
    "warmup_max_lr": LR,
    "warmup_num_steps": 6,
    "warmup_type": "linear",
}
UNTESTED = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
"""What DeepSpeed asks for where a script passes an optimizer of torch's."""
RANKS = (2, 4)
LOOPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a plain loop": ({}, {}),
    "gradient accumulation": ({}, {"passes": 3}),
    "ZenFlow, nothing deferred": ({"zenflow": EVERY_STEP}, {}),
    "made under `zero.Init`": ({}, {"under_init": True}),
    "`offload_param` on the CPU": ({"offload_param": {"device": "cpu", "pin_memory": False}}, {}),
}
"""What a row on several ranks changes: of zero_optimization, and of the script."""
ONLY_STAGE_3 = tuple(LOOPS)[3:]
ONLY_OURS = tuple(LOOPS)[2:3]
"""DeepSpeed's own names CUDA at stage 3 and fails on two ranks below: other tables have it."""
QUICK_ON_RANKS = ("2 ranks, stage 3, made under `zero.Init`", "zenflow", "bf16")
CUT_UP = {"stage3_param_persistence_threshold": 0}
"""Without it DeepSpeed keeps weights of up to 100,000 elements whole on each rank: here all of them."""
OVERFLOWS = {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 4, "hysteresis": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A combination to try."""

    table: str
    row: str
    side: str
    dtype: str
    config: dict[str, Any]
    model: str = "plain"
    optimizer: str = "json"
    """json, instance or callable."""
    scheduler: str = "none"
    """none, json, callable or instance."""
    groups: bool = False
    """Whether the script makes two parameter groups."""
    passes: int = 1
    ranks: int = 1
    under_init: bool = False
    """Whether the model is made under `deepspeed.zero.Init` and filled within `GatheredParameters`, as
    `from_pretrained` does."""
    tries: int = 1
    """How often it is trained: more where what happens may differ from time to time."""
    spikes: bool = False
    """Whether some batches have gradients many times as large."""
    resume: bool = False
    weights: str = "module"
    """Where the script takes them from in the end: module, accessors (which also set what they get) or zero_to_fp32."""
    steps: int = STEPS
    windowed: bool = False
    """Whether updates are deferred, so that the weights need not be AdamW's."""
    setting: str = ""
    """Of an idiom, which the row names: one of `SETTINGS`."""
    limit_s: float = 60.0

    @property
    def column(self) -> str:
        """Of its table, within those of its side."""
        return self.setting or self.dtype

    @property
    def name(self) -> str:
        return f"{self.table}: {self.row}, {self.side} {self.column}"


@dataclass(frozen=True, slots=True)
class Feature:
    """What a row of the features' table changes."""

    config: dict[str, Any] = field(default_factory=dict)
    case: dict[str, Any] = field(default_factory=dict)
    json_optimizer: bool = True


FEATURES = {
    "optimizer in the ds_config": Feature(),
    "optimizer that the script passes": Feature(UNTESTED, {"optimizer": "instance"}, json_optimizer=False),
    "callable that makes the optimizer": Feature(UNTESTED, {"optimizer": "callable"}, json_optimizer=False),
    "parameter groups": Feature({}, {"groups": True}),
    "scheduler in the ds_config": Feature(
        {"scheduler": {"type": "WarmupLR", "params": WARMUP}}, {"scheduler": "json"}
    ),
    "scheduler of the script, callable": Feature({}, {"scheduler": "callable"}),
    "optimizer and scheduler of the script": Feature(
        UNTESTED, {"optimizer": "instance", "scheduler": "instance"}, json_optimizer=False
    ),
    "gradient clipping": Feature({"gradient_clipping": CLIP}, {"spikes": True}),
    "gradient accumulation": Feature({"gradient_accumulation_steps": 3}, {"passes": 3}),
    "save and resume": Feature({}, {"resume": True}),
    "accessors get and set the fp32 state": Feature({}, {"weights": "accessors"}),
    "fp32 weights by zero_to_fp32": Feature({}, {"weights": "zero_to_fp32"}),
    "two ranks": Feature({}, {"ranks": 2}),
    "tied weights": Feature({}, {"model": "tied"}),
    "frozen parameters": Feature({}, {"model": "frozen"}),
    "Conv2d": Feature({}, {"model": "convolution"}),
    "unused parameter": Feature({}, {"model": "unused"}),
}  # fmt: skip


OF_IDIOMS = {"type": "AdamW", "params": {"lr": 5e-3, "weight_decay": DECAY}}
OFFLOADED, TWIN_FLOW = "ZeRO-Offload", "Twin-Flow 0.5"
SYNCHRONOUS = {"update_interval": 1, "overlap_step": False}
SETTINGS: dict[str, dict[str, Any] | None] = {
    OFFLOADED: None,
    "in DeepSpeed's order": {**SYNCHRONOUS, "topk_ratio": 0.0, "pipeline": "none"},
    TWIN_FLOW: None,
    "ZenFlow, nothing deferred": {**SYNCHRONOUS, "topk_ratio": 0.2, "select_interval": 3},
    "windows of 4": {"topk_ratio": 0.2, "select_interval": 4, "update_interval": 4, "overlap_step": False},
    "windows of 4, overlapped": {"topk_ratio": 0.2, "select_interval": 4, "update_interval": 4, "overlap_step": True},
    '"auto", overlapped': {"topk_ratio": 0.2, "overlap_step": True},  # intervals left out: Accelerate refuses the word
}
"""The "zenflow" section of each of the idioms' columns."""
LATE = tuple(SETTINGS)[-3:]
"""Of these, those whose updates are late: the right weights are those of `tests/support/oracle.py`, not AdamW's."""


def ds_config(dtype: str, stage: int, zenflow: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """One that offloads."""
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": {"device": "cpu", "pin_memory": False}}
    if zenflow is not None:
        zero["zenflow"] = dict(zenflow)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,  # left out, DeepSpeed clips the norm to 1
        "zero_optimization": zero,
        **more,
    }
    if dtype != "fp32" and dtype not in config:
        config[dtype] = {"enabled": True, **({"initial_scale_power": 8} if dtype == "fp16" else {})}
    return config


def grid() -> Iterator[Cell]:
    """Every stage, dtype and side, with the optimizer in the ds_config."""
    for section, zenflow in SECTIONS.items():
        for stage in STAGES:
            for side in SIDES:
                for dtype in DTYPES:
                    config = ds_config(dtype, stage, zenflow, optimizer=OPTIMIZER)
                    yield Cell(table="stages", row=f"{section}, stage {stage}", side=side, dtype=dtype, config=config)


def features(section: str) -> Iterator[Cell]:
    """What scripts do, at stage 2."""
    for row, feature in FEATURES.items():
        for side in SIDES:
            for dtype in DTYPES[:2]:
                more = {**({"optimizer": OPTIMIZER} if feature.json_optimizer else {}), **feature.config}
                config = ds_config(dtype, 2, SECTIONS[section], **more)
                if feature.case.get("ranks"):
                    config["train_micro_batch_size_per_gpu"] = 2
                yield Cell(table=section, row=row, side=side, dtype=dtype, config=config, **feature.case)


def settings() -> Iterator[Cell]:
    """ZenFlow's and Twin-Flow's own settings, and a loss scale that overflows."""
    windows = {"windowed": True, "steps": WINDOWED_STEPS}
    rows: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "ZenFlow, windows of 4 steps": ({"stage": 2, "zenflow": WINDOWS}, windows),
        "ZenFlow, overlapped": (
            {"stage": 2, "zenflow": {**WINDOWS, "overlap_step": True, "full_warm_up_rounds": 1}},
            {**windows, "limit_s": 180.0},
        ),
        'ZenFlow, "auto" for all': ({"stage": 2, "zenflow": AUTO}, windows),
        "Twin-Flow, ratio 0.5, stage 2": ({"stage": 2, "ratio": 0.5}, {}),
        "Twin-Flow, ratio 0.5, stage 3": ({"stage": 3, "ratio": 0.5}, {}),
        "ZenFlow with ratio 0.5": ({"stage": 2, "zenflow": EVERY_STEP, "ratio": 0.5}, {}),
    }
    for row, (zero, case) in rows.items():
        for side in SIDES:
            for dtype in DTYPES[:2]:
                if "overlapped" in row and side != "zenflow" and (side, dtype) != ("deepspeed", "fp32"):
                    continue  # upstream's process takes half a minute to begin
                config = ds_config(dtype, zero["stage"], zero.get("zenflow"), optimizer=OPTIMIZER)
                if "ratio" in zero:
                    config["zero_optimization"]["offload_optimizer"]["ratio"] = zero["ratio"]
                    config["zero_optimization"]["sub_group_size"] = 256
                yield Cell(table="settings", row=row, side=side, dtype=dtype, config=config, **case)
    for side in SIDES:
        config = ds_config("fp16", 2, optimizer=OPTIMIZER, fp16=OVERFLOWS)
        yield Cell(table="settings", row="loss scale that overflows", side=side, dtype="fp16", config=config, steps=20)


def stage_3_refused() -> Iterator[Cell]:
    """Settings of stage 3 that zftune's runtime does not have; what DeepSpeed needs for them is not on each machine."""
    rows: dict[str, dict[str, Any]] = {
        "stage 3, weights on NVMe": {"offload_param": {"device": "nvme", "nvme_path": "nvme"}},
        "stage 3, state on NVMe": {"offload_optimizer": {"device": "nvme", "nvme_path": "nvme"}},
        "stage 3, hpZ": {"zero_hpz_partition_size": 2},
    }
    for row, zero in rows.items():
        for dtype in DTYPES[:2]:
            config = ds_config(dtype, 3, optimizer=OPTIMIZER)
            config["zero_optimization"] |= zero
            yield Cell(table="settings", row=row, side="zenflow", dtype=dtype, config=config)


def on_ranks() -> Iterator[Cell]:
    """ZeRO-Offload on several ranks, each with its part of the batch, in each kind of loop."""
    for count, stage, kind in product(RANKS, STAGES[1:], LOOPS):
        zero, case = LOOPS[kind]
        if stage != 3 and kind in ONLY_STAGE_3:
            continue
        for side, dtype in product(("zenflow",) if kind in ONLY_OURS else ("zenflow", "plain"), DTYPES):
            config = ds_config(dtype, stage, optimizer=OPTIMIZER, gradient_accumulation_steps=case.get("passes", 1))
            config["train_micro_batch_size_per_gpu"] = 4 // count
            config["zero_optimization"] |= {**zero, **(CUT_UP if stage == 3 else {})}
            yield Cell(
                table="ranks",
                row=f"{count} ranks, stage {stage}, {kind}",
                side=side,
                dtype=dtype,
                config=config,
                ranks=count,
                tries=3 if stage == 3 else 1,
                **case,
            )


def idioms() -> Iterator[Cell]:
    """What scripts do to weights, in fp32: nothing deferred, late updates, and DeepSpeed's ZeRO-Offload."""
    for row in NAMES:
        for side, setting in [*(("zenflow", setting) for setting in SETTINGS), ("plain", OFFLOADED)]:
            config = ds_config("fp32", 2, SETTINGS[setting], optimizer=OF_IDIOMS)
            if setting == TWIN_FLOW:
                config["zero_optimization"]["offload_optimizer"]["ratio"] = 0.5
            windowed = setting in LATE
            yield Cell(
                table="idioms", row=row, side=side, dtype="fp32", config=config, setting=setting, windowed=windowed
            )


def tables() -> dict[str, list[Cell]]:
    """All cells, by their table."""
    return {
        "stages": list(grid()),
        **{section: list(features(section)) for section in SECTIONS},
        "settings": [*settings(), *stage_3_refused()],
        "ranks": list(on_ranks()),
        "idioms": list(idioms()),
    }


def quick() -> dict[str, list[Cell]]:
    """A dozen of them, and one on several ranks."""
    rows = ("ZeRO-Offload, stage 2", "ZenFlow, stage 3")
    some = [cell for cell in grid() if cell.row in rows and cell.dtype == "bf16"]
    clipped = [cell for cell in features("ZenFlow") if cell.row in ("gradient clipping", "unused parameter")]
    cut_up = [replace(one, tries=1) for one in on_ranks() if (one.row, one.side, one.dtype) == QUICK_ON_RANKS]
    return {"stages": some, "ZenFlow": [cell for cell in clipped if cell.dtype == "fp32"], "ranks": cut_up}
