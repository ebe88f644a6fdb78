from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from zftune.telemetry.nvml import driver_version, gpus


class NVMLError(Exception):
    pass


class NotSupportedError(NVMLError):
    pass


class InvalidArgumentError(NVMLError):
    pass


class NotFoundError(NVMLError):
    pass


def fail(error: type[Exception]) -> Any:
    def call(*_: Any) -> Any:
        raise error("no")

    return call


def driver(**changes: Any) -> Any:
    """A binding of a machine with one GPU, as far as zftune calls it."""
    module: Any = ModuleType("pynvml")
    calls: dict[str, Any] = {
        "NVMLError": NVMLError,
        "NVMLError_NotSupported": NotSupportedError,
        "NVMLError_InvalidArgument": InvalidArgumentError,
        "NVMLError_NotFound": NotFoundError,
        "NVML_NVLINK_MAX_LINKS": 18,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: b"570.1",
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: handle if isinstance(handle, str) else "NVIDIA H200",
        "nvmlDeviceGetCudaComputeCapability": lambda _: (9, 0),
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(total=150_754_820_096),
        "nvmlDeviceGetMigMode": lambda _: [0, 0],
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda _: 5,
        "nvmlDeviceGetMaxPcieLinkWidth": lambda _: 16,
        "nvmlDeviceGetNvLinkState": lambda *_: 1,
        **changes,
    }
    for name, call in calls.items():
        setattr(module, name, call)
    return module


def ask(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> tuple[list[dict[str, Any]] | None, dict[str, str]]:
    monkeypatch.setitem(sys.modules, "pynvml", driver(**changes))
    missing: dict[str, str] = {}
    return gpus(missing), missing


def test_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found, missing = ask(monkeypatch)
    assert missing == {}
    assert found == [
        {
            "name": "NVIDIA H200",
            "compute_capability": "9.0",
            "memory_bytes": 150_754_820_096,
            "mig_profile": "off",
            "pcie_gen": 5,
            "pcie_width": 16,
            "nvlink": True,
        }
    ]
    assert driver_version(missing) == "570.1"


def test_a_call_that_fails_is_null_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    found, missing = ask(monkeypatch, nvmlDeviceGetMaxPcieLinkGeneration=fail(NVMLError))
    assert found is not None
    assert found[0]["pcie_gen"] is None
    assert missing == {"gpus.0.pcie_gen": "NVML: no"}


def test_no_nvlink_and_no_mig_are_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    found, missing = ask(
        monkeypatch, nvmlDeviceGetNvLinkState=fail(NotSupportedError), nvmlDeviceGetMigMode=fail(NotSupportedError)
    )
    assert found is not None
    assert (found[0]["nvlink"], found[0]["mig_profile"], missing) == (False, "off", {})


def test_mig_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def instance(_: Any, index: int) -> str:
        if index == 1:
            raise NotFoundError("none there")
        return f"NVIDIA H200 MIG {index + 1}g.18gb"

    found, _ = ask(
        monkeypatch,
        nvmlDeviceGetMigMode=lambda _: [1, 1],
        nvmlDeviceGetMaxMigDeviceCount=lambda _: 3,
        nvmlDeviceGetMigDeviceHandleByIndex=instance,
    )
    assert found is not None
    assert found[0]["mig_profile"] == "1g.18gb,3g.18gb"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"nvmlInit": fail(NVMLError)}, "no NVIDIA driver answers (no)"),
        ({"nvmlDeviceGetCount": lambda: 0}, "the NVIDIA driver lists no GPU"),
        ({"nvmlDeviceGetCount": fail(NVMLError)}, "NVML: no"),
    ],
)
def test_no_gpu_is_null_with_its_reason(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], reason: str) -> None:
    assert ask(monkeypatch, **changes) == (None, {"gpus": reason})


def test_no_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    missing: dict[str, str] = {}
    assert gpus(missing) is None
    assert missing == {"gpus": "the package nvidia-ml-py is not installed"}
