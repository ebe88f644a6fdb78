"""NVML, behind functions that never fail: what it does not tell is None with a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

MIG_OFF = "off"


def gpus(missing: dict[str, str]) -> list[dict[str, Any]] | None:
    """Every NVIDIA GPU of the machine, also those hidden from CUDA; None where there is no driver.

    Args:
        missing: gets the reason of everything that is None, under "gpus" or "gpus.INDEX.FIELD".
    """
    with _session(missing, "gpus") as nvml:
        if nvml is None:
            return None
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        except nvml.NVMLError as error:
            missing["gpus"] = f"NVML: {error}"
            return None
        if not handles:
            missing["gpus"] = "the NVIDIA driver lists no GPU"
            return None
        return [_describe(nvml, handle, f"gpus.{index}", missing) for index, handle in enumerate(handles)]


def driver_version(missing: dict[str, str]) -> str | None:
    """Version of the NVIDIA driver; None with a reason under "nvidia_driver" where there is none."""
    with _session(missing, "nvidia_driver") as nvml:
        if nvml is None:
            return None
        version: str | None = _ask(lambda: _text(nvml.nvmlSystemGetDriverVersion()), nvml, "nvidia_driver", missing)
        return version


@contextmanager
def _session(missing: dict[str, str], field: str) -> Iterator[ModuleType | None]:
    try:
        import pynvml
    except ImportError:
        missing[field] = "the package nvidia-ml-py is not installed"
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        missing[field] = f"no NVIDIA driver answers ({error})"
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _describe(nvml: Any, handle: Any, where: str, missing: dict[str, str]) -> dict[str, Any]:
    """Properties of one GPU that do not change while it works (PCIe: the most it can do, idle links shift down)."""
    questions: dict[str, Callable[[], Any]] = {
        "name": lambda: _text(nvml.nvmlDeviceGetName(handle)),
        "compute_capability": lambda: "{}.{}".format(*nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        "memory_bytes": lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        "mig_profile": lambda: _mig_profile(nvml, handle),
        "pcie_gen": lambda: int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)),
        "pcie_width": lambda: int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
        "nvlink": lambda: _has_nvlink(nvml, handle),
    }
    return {field: _ask(ask, nvml, f"{where}.{field}", missing) for field, ask in questions.items()}


def _ask(question: Callable[[], Any], nvml: Any, field: str, missing: dict[str, str]) -> Any:
    try:
        return question()
    except nvml.NVMLError as error:
        missing[field] = f"NVML: {error}"
        return None


def _mig_profile(nvml: Any, handle: Any) -> str:
    """The profiles of the GPU's MIG instances, such as "1g.10gb,2g.20gb"; "off" where it is not divided."""
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError_NotSupported:
        return MIG_OFF
    if not current:
        return MIG_OFF
    profiles = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except nvml.NVMLError_NotFound:
            continue
        profiles.append(_text(nvml.nvmlDeviceGetName(instance)).rpartition("MIG ")[2])
    return ",".join(sorted(profiles)) or "on, without instances"


def _has_nvlink(nvml: Any, handle: Any) -> bool:
    """Whether any of the GPU's NVLinks is up."""
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, link):
                return True
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument):  # no NVLink at all, or no such link
            break
    return False


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value
