"""A preset in a ds_config: what stock DeepSpeed accepts and trains with, and what is said about it."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from tests.support.zftune.store.examples import KNOBS
from zenflow import ZenFlowConfig
from zftune.errors import BadInputError
from zftune.integrations.deepspeed.presets import Applied, apply

DS_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    document = copy.deepcopy(DS_CONFIG)
    *folders, last = path.split(".")
    inner = document
    for folder in folders:
        inner = inner.setdefault(folder, {})
    inner[last] = value
    return document


def applied(ds_config: dict[str, Any] | None = None, **knobs: Any) -> Applied:
    given = DS_CONFIG if ds_config is None else ds_config
    before = copy.deepcopy(given)
    made = apply(given, {**KNOBS, **knobs}, stage=2)
    assert given == before
    assert all(note.isprintable() and not note.endswith(".") for note in made.notes)
    return made


def says(made: Applied, part: str) -> bool:
    return any(part in note for note in made.notes)


def section(made: Applied) -> dict[str, Any]:
    found = made.config["zero_optimization"]["zenflow"]
    assert isinstance(found, dict)
    return found


def test_the_section_is_what_upstream_needs() -> None:
    made = applied()
    assert section(made) == {
        "topk_ratio": 0.1,
        "select_strategy": "step",
        "select_interval": 32,
        "update_interval": 4,
        "full_warm_up_rounds": 4,
        "overlap_step": True,
        "offload": False,
        "auto_ratio": 0.99,
        "pt_reserved_cores_perc": 0.5,
    }
    assert made.config["optimizer"]["params"]["weight_decay"] == 0.0
    assert says(made, "full_warm_up_rounds is 4 instead of 0")
    assert says(made, "upstream does not clip")
    ours = ZenFlowConfig.from_ds_config(made.config)
    assert (ours.topk_ratio, ours.update_interval, ours.select_interval) == (0.1, 4, 32)


def test_what_a_preset_does_not_speak_of_stays_the_users() -> None:
    config = copy.deepcopy(DS_CONFIG)
    own = {"auto_ratio": 0.9, "pt_reserved_cores_perc": 0.25}
    config["zero_optimization"]["zenflow"] = {"topk_ratio": 0.3, "update_interval": 2, **own}
    found = section(applied(config))
    assert {name: found[name] for name in own} == own
    assert (found["topk_ratio"], found["update_interval"]) == (0.1, 4)
    config["zero_optimization"]["zenflow"]["pt_reserved_cores_perc"] = 7
    with pytest.raises(BadInputError, match=r"zero_optimization\.zenflow: pt_reserved_cores_perc is 7; it must be"):
        applied(config)


@pytest.mark.parametrize("update", [1, 3, 4, 7, "auto"])
@pytest.mark.parametrize("select", [1, 5, 32, 1000, "auto"])
@pytest.mark.parametrize("warm_up", [0, 1, 6])
@pytest.mark.parametrize("overlap", [True, False])
def test_intervals_are_integers_in_whole_windows(update: Any, select: Any, warm_up: int, overlap: bool) -> None:
    made = section(
        applied(update_interval=update, select_interval=select, full_warm_up_rounds=warm_up, overlap_step=overlap)
    )
    window = made["update_interval"]
    assert window == (4 if update == "auto" else update)
    assert made["select_strategy"] == "step"
    assert made["select_interval"] % window == 0
    assert made["select_interval"] >= (window if select == "auto" else max(select, window))
    assert made["full_warm_up_rounds"] % window == 0
    assert made["full_warm_up_rounds"] >= max(warm_up, 1 if overlap else 0)


def test_what_is_not_offloaded_or_not_selected_needs_no_zenflow() -> None:
    with_section = changed("zero_optimization.zenflow", {"topk_ratio": 0.3})
    plain = applied(with_section, offload_ratio=0.0).config["zero_optimization"]
    assert plain == {"stage": 2}
    offload = applied(with_section, topk_ratio=0.0, update_interval=1, overlap_step=False)
    assert offload.config["zero_optimization"] == DS_CONFIG["zero_optimization"]
    assert offload.notes == []
    assert says(applied(topk_ratio=0.0), "updates everything in every step")


def test_a_ratio_is_for_stage_3_alone() -> None:
    twin: dict[str, Any] = {"topk_ratio": 0.0, "offload_ratio": 0.4, "update_interval": 1, "overlap_step": False}
    third = applied(changed("zero_optimization.stage", 3), **twin)
    assert third.config["zero_optimization"]["offload_optimizer"]["ratio"] == 0.4
    for made in (applied(**twin), applied(offload_ratio=0.4)):
        assert "ratio" not in made.config["zero_optimization"]["offload_optimizer"]
        assert says(made, "offload_ratio 0.4 was left out")


def test_what_upstream_fails_on_is_left_out_and_said() -> None:
    given = changed("optimizer.params", {"lr": "auto", "weight_decay": "auto", "adam_w_mode": True})
    given["zero_optimization"]["reduce_scatter"] = False
    given["zero_optimization"]["offload_optimizer"]["ratio"] = 0.5
    given["zftune"] = {"preset": "best"}
    made = applied(given)
    assert made.config["optimizer"]["params"] == {"lr": "auto", "weight_decay": "auto"}
    assert "reduce_scatter" not in made.config["zero_optimization"]
    assert "zftune" not in made.config
    for part in ("adam_w_mode", "reduce_scatter", "the zftune section"):
        assert says(made, part)


@pytest.mark.parametrize(
    ("path", "value", "part"),
    [
        ("optimizer", None, 'optimizer.type is None; it must be "Adam" or "AdamW"'),
        ("optimizer.type", "Lion", "optimizer.type is 'Lion'"),
        ("optimizer.params", [1], "optimizer.params is [1]"),
        ("gradient_accumulation_steps", 8, "gradient_accumulation_steps is 8; it must be 1"),
        ("fp16", {"enabled": True}, "fp16.enabled is true"),
        ("zero_optimization", "x", "zero_optimization is 'x'"),
        ("zero_optimization.stage", 7, "zero_optimization.stage is 7; it must be 1, 2 or 3"),
        ("zero_optimization.stage", True, "zero_optimization.stage is True"),
        ("zero_optimization.offload_optimizer", "cpu", "offload_optimizer is 'cpu'"),
        ("zero_optimization.offload_optimizer.device", "nvme", "device is 'nvme'"),
    ],
)
def test_what_upstream_cannot_train_is_refused(path: str, value: Any, part: str) -> None:
    with pytest.raises(BadInputError, match=re.escape(part)):
        applied(changed(path, value))
