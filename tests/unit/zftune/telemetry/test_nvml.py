"""The static facts of the GPUs, asked through the real binding from a scripted driver."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.nvml.scripted import (
    AMPERE,
    DIVIDED,
    GPU,
    HOPPER,
    LOST,
    NO_PERMISSION,
    NOT_SUPPORTED,
    SECOND_GPU,
    Machine,
    load_into_binding,
)
from zftune.telemetry.nvml import driver_version, gpus

Write = Callable[..., None]

H200 = {
    "name": "NVIDIA H200",
    "compute_capability": "9.0",
    "memory_bytes": 141 << 30,
    "mig_profile": "off",
    "pcie_gen": 5,
    "pcie_width": 16,
    "nvlink": True,
}


def ask() -> tuple[list[dict[str, Any]] | None, dict[str, str]]:
    missing: dict[str, str] = {}
    return gpus(missing), missing


def test_one_gpu(here: Write) -> None:
    here(HOPPER)
    assert ask() == ([H200], {})
    assert driver_version({}) == "570.1"


def test_every_gpu_is_listed(here: Write) -> None:
    here([*HOPPER, f"gpu NVIDIA_A100 {SECOND_GPU}"])
    found, _ = ask()
    assert found is not None
    assert [gpu["name"] for gpu in found] == ["NVIDIA H200", "NVIDIA A100"]


@pytest.mark.parametrize(
    ("lines", "nvlink", "mig_profile"),
    [
        ((f"gpu Tesla_T4 {GPU}", "capability 7 5"), False, "off"),
        (AMPERE, False, "off"),  # its links are down
        (DIVIDED, True, "1g.18gb,3g.71gb"),
        ((*HOPPER, "mig_mode 1"), True, "on, without instances"),
    ],
)
def test_links_and_profiles(here: Write, lines: list[str], nvlink: bool, mig_profile: str) -> None:
    here(lines)
    found, missing = ask()
    assert found is not None
    assert (found[0]["nvlink"], found[0]["mig_profile"], missing) == (nvlink, mig_profile, {})


def test_a_call_that_fails_is_null_with_its_reason(here: Write) -> None:
    here(HOPPER, errors=[("nvmlDeviceGetMaxPcieLinkGeneration", NO_PERMISSION, 0, -1)])
    assert ask() == ([{**H200, "pcie_gen": None}], {"gpus.0.pcie_gen": "NVML: Insufficient Permissions"})


def test_mig_that_may_not_be_asked_for_is_not_off(here: Write) -> None:
    here(HOPPER, errors=[("nvmlDeviceGetMigMode", NO_PERMISSION, 0, -1)])
    found, missing = ask()
    assert found is not None
    assert found[0]["mig_profile"] is None
    assert "gpus.0.mig_profile" in missing


@pytest.mark.parametrize(
    ("lines", "errors", "reason"),
    [
        ([], [], "the NVIDIA driver lists no GPU"),
        (HOPPER, [("nvmlInitWithFlags", 9, 0, -1)], "no NVIDIA driver answers (Driver Not Loaded)"),
        (HOPPER, [("nvmlDeviceGetCount_v2", NOT_SUPPORTED, 0, -1)], "NVML: Not Supported"),
        (HOPPER, [("handle", LOST, 0, 0)], "NVML: GPU is lost"),
    ],
)
def test_no_gpu_is_null_with_its_reason(here: Write, lines: list[str], errors: list[Any], reason: str) -> None:
    here(lines, errors=errors)
    assert ask() == (None, {"gpus": reason})


def test_no_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert ask() == (None, {"gpus": "the package nvidia-ml-py is not installed"})
    missing: dict[str, str] = {}
    assert driver_version(missing) is None
    assert missing == {"nvidia_driver": "the package nvidia-ml-py is not installed"}


def test_an_old_driver(old_nvml_library: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.write(HOPPER)
    monkeypatch.setenv("NVML_SCRIPT", str(machine.script))
    load_into_binding(old_nvml_library, monkeypatch)
    assert ask() == ([H200], {})
