"""`CUDA_VISIBLE_DEVICES` as CUDA reads it, matched by UUID."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.nvml.scripted import DIVIDED, GPU, HOPPER, LOST, MIG, NO_PERMISSION, SECOND_GPU, SECOND_MIG
from zftune.telemetry import visible_devices
from zftune.telemetry.nvml import nvml_session
from zftune.telemetry.nvml_device import find_targets

Write = Callable[..., None]

TWO = (*HOPPER, f"gpu NVIDIA_H200 {SECOND_GPU}", "capability 9 0")


def found(devices: list[str] | None) -> list[str | None]:
    with nvml_session() as nvml:
        return [target.uuid for target in find_targets(nvml, devices)[0]]


def reason(devices: list[str] | None) -> str:
    with nvml_session() as nvml:
        return find_targets(nvml, devices)[1]["devices"]


@pytest.mark.parametrize(
    ("value", "entries"), [(None, None), ("", []), ("1", ["1"]), (" 0, GPU-11 ,", ["0", "GPU-11"]), ("-1", ["-1"])]
)
def test_the_variable(value: str | None, entries: list[str] | None) -> None:
    environment = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert visible_devices(environment) == entries


@pytest.mark.parametrize(
    ("devices", "uuids"),
    [
        (None, [GPU, SECOND_GPU]),
        ([], []),
        (["1"], [SECOND_GPU]),
        (["1", "0"], [SECOND_GPU, GPU]),
        (["0", "0", GPU], [GPU]),
        ([SECOND_GPU], [SECOND_GPU]),
        (["GPU-1111"], [GPU]),
        (["GPU-11a", "GPU-111"], [SECOND_GPU, GPU]),
        ([GPU.removeprefix("GPU-")], [GPU]),
        ([GPU.lower().replace("gpu", "GPU").upper().replace("GPU-", "GPU-")], [GPU]),
    ],
)
def test_gpus(here: Write, devices: list[str] | None, uuids: list[str]) -> None:
    here(TWO)
    assert found(devices) == uuids


@pytest.mark.parametrize("entry", ["2", "-1", "GPU-11", "GPU-9", "NoDevFiles", "MIG-", "void", MIG])
def test_what_matches_nothing_or_too_much_hides_the_rest(here: Write, entry: str) -> None:
    here(TWO)
    assert found(["1", entry, "0"]) == [SECOND_GPU]
    assert f"'{entry}'" in reason(["1", entry, "0"])


@pytest.mark.parametrize(
    ("devices", "uuids"),
    [
        (None, [MIG, SECOND_MIG]),
        (["0"], [MIG]),
        ([SECOND_MIG, MIG], [SECOND_MIG, MIG]),
        (["MIG-b"], [SECOND_MIG]),
        ([SECOND_MIG.removeprefix("MIG-")], [SECOND_MIG]),
        ([GPU], [MIG]),
        ([f"MIG-{GPU}/5/0"], [SECOND_MIG]),
        ([f"MIG-{GPU}/4/0"], []),
    ],
)
def test_a_divided_gpu(here: Write, devices: list[str] | None, uuids: list[str]) -> None:
    here(DIVIDED)
    assert found(devices) == uuids


def test_a_mig_device_knows_its_gpu_and_instance(here: Write) -> None:
    here(DIVIDED)
    with nvml_session() as nvml:
        (target,) = find_targets(nvml, [SECOND_MIG])[0]
    assert (target.is_mig, target.instance, target.gpu_uuid) == (True, 5, GPU)


def test_a_container_that_was_given_one_mig_device_and_may_not_ask_its_gpu(here: Write) -> None:
    here(DIVIDED, errors=[("nvmlDeviceGetMigMode", NO_PERMISSION, 0, -1)])
    assert found([MIG]) == [MIG]


def test_indices_of_gpus_of_several_kinds_carry_a_warning(here: Write) -> None:
    here([*HOPPER, f"gpu NVIDIA_T400 {SECOND_GPU}"])
    assert found(["1"]) == [SECOND_GPU]
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in reason(["1"])
    with nvml_session() as nvml:
        assert find_targets(nvml, [SECOND_GPU])[1] == {}


def test_a_gpu_that_is_lost_before_the_start_is_left_out_with_its_reason(here: Write) -> None:
    here(TWO, errors=[("handle", LOST, 0, 0)])
    assert found(None) == [SECOND_GPU]
    assert reason(None) == "GPU 0 is left out: NVML: GPU is lost"


def test_a_gpu_without_a_uuid_is_found_by_its_index(here: Write) -> None:
    here(TWO, errors=[("nvmlDeviceGetUUID", NO_PERMISSION, 0, 1)])
    assert found(["1"]) == [None]
