"""Misspelt values of closed sets: the near name is in the sentence, on the command line and of a ds_config."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.zftune.check.asked import ask
from zftune.ds_config.facts import GOOD
from zftune.errors import BadInputError
from zftune.integrations.deepspeed.check.checking import check
from zftune.text import one_of

DS: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}
OFFLOAD = "zero_optimization.offload_optimizer.device"


def test_a_value_is_answered_with_the_near_name_or_with_none() -> None:
    assert one_of("--dtype", "bf16", ("bf16", "fp32")) == "bf16"
    with pytest.raises(BadInputError, match=r"^--dtype is 'bf61'; it must be bf16 or fp32; did you mean bf16$"):
        one_of("--dtype", "bf61", ("bf16", "fp32"))
    with pytest.raises(BadInputError, match=r"^--rig is 'moon'; it must be noisy, slow, or a file$"):
        one_of("--rig", "moon", ("noisy", "slow"), "a file")


@pytest.mark.parametrize(
    ("section", "meant"),
    [
        ({"optimizer": {"type": "AdmaW", "params": {}}}, "AdamW"),
        ({"scheduler": {"type": "WarmpuLR", "params": {}}}, "WarmupLR"),
        ({"communication_data_type": "bf61"}, "bf16"),
        ({"zftune": {"quality": "exakt"}}, "exact"),
        ({"zftune": {"backend": "deepspead"}}, "deepspeed"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cup"}}}, "cpu"),
    ],
)
def test_a_value_of_a_ds_config_is_answered_with_the_near_one(section: dict[str, Any], meant: str) -> None:
    report = check({**DS, **section}, version=GOOD, ask=ask)
    assert str(report.outcome).endswith(f"; did you mean {meant}"), str(report.outcome)


def test_a_misspelt_device_is_not_mended_by_leaving_offloading_out() -> None:
    config = {**DS, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cup"}}}
    found = [one for one in check(config, version=GOOD, ask=ask).findings if ".".join(one.path) == OFFLOAD]
    assert len(found) == 2  # of DeepSpeed, and of zftune run
    assert all(not one.changes and "did you mean cpu" in f"{one.reason} {one.safe}" for one in found)
