from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from zftune.telemetry import fingerprint, hw_id, model_id

GPU = {
    "name": "NVIDIA H200",
    "compute_capability": "9.0",
    "memory_bytes": 150_754_820_096,
    "mig_profile": "off",
    "pcie_gen": 5,
    "pcie_width": 16,
    "nvlink": True,
}
MACHINE: dict[str, Any] = {"cpu_model": "CPU", "numa_nodes": 2, "ram_bytes": 500 << 30, "gpus": [GPU], "missing": {}}


def test_form() -> None:
    found = fingerprint(nn.Linear(2, 3))
    assert set(found) == {"hw_id", "model_id"}
    assert all(re.fullmatch("[0-9a-f]{16}", value) for value in found.values())
    assert found == fingerprint(nn.Linear(2, 3))


@pytest.mark.parametrize(
    "changes",
    [
        {"ram_bytes": 503 << 30},
        {"gpus": [GPU, GPU]},
        {"gpus": [{**GPU, "memory_bytes": 150_754_820_096 - (1 << 26)}]},
        {"usable_cores": 3},
    ],
)
def test_what_does_not_make_another_machine(changes: dict[str, Any]) -> None:
    assert hw_id({**MACHINE, **changes}) == hw_id(MACHINE)


@pytest.mark.parametrize(
    "changes",
    [
        {"cpu_model": "other"},
        {"numa_nodes": 1},
        {"ram_bytes": 250 << 30},
        {"gpus": None},
        *({"gpus": [{**GPU, field: None}]} for field in GPU),
    ],
)
def test_what_makes_another_machine(changes: dict[str, Any]) -> None:
    assert hw_id({**MACHINE, **changes}) != hw_id(MACHINE)


def test_a_rig_is_never_the_machine() -> None:
    assert len({hw_id(MACHINE), hw_id(MACHINE, rig="a"), hw_id(MACHINE, rig="b")}) == 3


@pytest.mark.parametrize(("gib", "same_as"), [(15.6, 16.0), (23.5, 32.0), (62.7, 64.0)])
def test_ram_rounds_up_to_a_power_of_two(gib: float, same_as: float) -> None:
    sizes = [hw_id({**MACHINE, "ram_bytes": int(size * (1 << 30))}) for size in (gib, same_as)]
    assert sizes[0] == sizes[1]


def test_order_and_values_of_parameters_do_not_count() -> None:
    assert model_id(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))) == model_id(
        nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))
    )


def test_dtype_number_ties_and_frozen_parameters_count() -> None:
    two = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    tied[1].weight = tied[0].weight
    frozen = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    frozen[0].requires_grad_(False)
    half = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).to(torch.bfloat16)
    assert len({model_id(model) for model in (two, tied, frozen, half)}) == 4
    assert model_id(frozen) == model_id(nn.Linear(2, 2, bias=False))
