"""What NVML knows of the GPUs before they do anything: functions that never fail; None has its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zftune.telemetry.nvml_session import NOT_FOUND, NOT_SUPPORTED, Nvml, NvmlError, nvml_session

MIG_OFF = "off"
_INVALID_ARGUMENT = 2
_MAX_NVLINKS = 36  # a link that a GPU does not have ends the search


def gpus(missing: dict[str, str]) -> list[dict[str, Any]] | None:
    """Every NVIDIA GPU of the machine, also those hidden from CUDA; None where there is no driver.

    Args:
        missing: gets the reason of everything that is None, under "gpus" or "gpus.INDEX.FIELD".
    """
    try:
        with nvml_session() as nvml:
            count = nvml.call("nvmlDeviceGetCount")
            handles = [nvml.call("nvmlDeviceGetHandleByIndex", index) for index in range(count)]
            if handles:
                return [_describe(nvml, handle, f"gpus.{index}", missing) for index, handle in enumerate(handles)]
            missing["gpus"] = "the NVIDIA driver lists no GPU"
    except NvmlError as error:
        missing["gpus"] = str(error)
    return None


def driver_version(missing: dict[str, str]) -> str | None:
    """Version of the NVIDIA driver; None with a reason under "nvidia_driver" where there is none."""
    try:
        with nvml_session() as nvml:
            return str(nvml.call("nvmlSystemGetDriverVersion"))
    except NvmlError as error:
        missing["nvidia_driver"] = str(error)
    return None


def _describe(nvml: Nvml, handle: Any, where: str, missing: dict[str, str]) -> dict[str, Any]:
    """Properties of one GPU that do not change while it works (PCIe: the most it can do, idle links shift down)."""
    questions: dict[str, Callable[[], Any]] = {
        "name": lambda: nvml.call("nvmlDeviceGetName", handle),
        "compute_capability": lambda: "{}.{}".format(*nvml.call("nvmlDeviceGetCudaComputeCapability", handle)),
        "memory_bytes": lambda: int(nvml.call("nvmlDeviceGetMemoryInfo", handle).total),
        "mig_profile": lambda: _mig_profile(nvml, handle),
        "pcie_gen": lambda: int(nvml.call("nvmlDeviceGetMaxPcieLinkGeneration", handle)),
        "pcie_width": lambda: int(nvml.call("nvmlDeviceGetMaxPcieLinkWidth", handle)),
        "nvlink": lambda: _has_nvlink(nvml, handle),
    }
    return {field: _ask(ask, f"{where}.{field}", missing) for field, ask in questions.items()}


def _ask(question: Callable[[], Any], field: str, missing: dict[str, str]) -> Any:
    try:
        return question()
    except NvmlError as error:
        missing[field] = str(error)
        return None


def mig_instances(nvml: Nvml, handle: Any) -> list[Any] | None:
    """Handles of the MIG devices of a GPU; None where it is not divided.

    Raises:
        NvmlError: the driver does not tell.
    """
    try:
        current, _ = nvml.call("nvmlDeviceGetMigMode", handle)
    except NvmlError as error:
        if error.code == NOT_SUPPORTED:
            return None
        raise
    if not current:
        return None
    instances = []
    for index in range(nvml.call("nvmlDeviceGetMaxMigDeviceCount", handle)):
        try:
            instances.append(nvml.call("nvmlDeviceGetMigDeviceHandleByIndex", handle, index))
        except NvmlError as error:
            if error.code != NOT_FOUND:
                raise
    return instances


def _mig_profile(nvml: Nvml, handle: Any) -> str:
    """The profiles of the GPU's MIG instances, such as "1g.10gb,2g.20gb"; "off" where it is not divided."""
    instances = mig_instances(nvml, handle)
    if instances is None:
        return MIG_OFF
    profiles = [nvml.call("nvmlDeviceGetName", instance).rpartition("MIG ")[2] for instance in instances]
    return ",".join(sorted(profiles)) or "on, without instances"


def _has_nvlink(nvml: Nvml, handle: Any) -> bool:
    """Whether any of the GPU's NVLinks is up."""
    for link in range(_MAX_NVLINKS):
        try:
            if nvml.call("nvmlDeviceGetNvLinkState", handle, link):
                return True
        except NvmlError as error:
            if error.code not in (NOT_SUPPORTED, _INVALID_ARGUMENT):  # no NVLink at all, or no such link
                raise
            break
    return False
