"""A session with NVML, and what it tells of the GPUs before they do anything; None has its reason."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

from zftune.errors import ZftuneError

NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
FUNCTION_NOT_FOUND = 13

PERMANENT = frozenset({2, NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, 25, 26})
"""Codes of answers that will not change: invalid argument, not supported, no permission, no such function, ..."""

GONE = frozenset({1, 9, 15, 16, 28})
"""Codes that say that the GPU or its driver is gone: lost, reset required, not found, driver not loaded, ..."""


_NVML = "NVML: "


class NvmlError(ZftuneError):
    """NVML does not answer.

    Args:
        code: NVML's return value.
        teller: what the message begins with.
    """

    def __init__(self, reason: str, code: int, teller: str = "") -> None:
        super().__init__(teller + reason)
        self.reason, self.code = reason, code


class Nvml:
    """An open session."""

    def __init__(self, binding: ModuleType) -> None:
        self._binding = binding

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the binding by its name, such as "nvmlDeviceGetName".

        Raises:
            NvmlError: it fails, or the driver or the binding is too old to have it.
        """
        function = self._member(name)
        try:
            answer = function(*arguments)
        except self._binding.NVMLError as error:
            raise self._translated(error, name) from error
        return answer.decode("utf-8", errors="replace") if isinstance(answer, bytes) else answer

    def struct(self, name: str) -> Any:
        """A new structure of the binding, such as "c_nvmlGpmMetricsGet_t".

        Raises:
            NvmlError: the binding is too old to have it.
        """
        return self._member(name)()

    def text(self, code: int) -> str:
        """What a return value inside a structure means."""
        return f"{_NVML}{self._binding.NVMLError(code)}"

    def _member(self, name: str) -> Any:
        member = getattr(self._binding, name, None)
        if member is None:
            reason = f"the binding has no {name}: uninstall pynvml and install nvidia-ml-py again"
            raise NvmlError(reason, FUNCTION_NOT_FOUND)
        return member

    def _translated(self, error: Any, name: str) -> NvmlError:
        if error.value == FUNCTION_NOT_FOUND:
            return NvmlError(f"the installed driver has no {name}", error.value, _NVML)
        return NvmlError(str(error), error.value, _NVML)


@contextmanager
def nvml_session() -> Iterator[Nvml]:
    """NVML, initialised until the block ends; sessions may overlap.

    Raises:
        NvmlError: there is no binding, or no driver answers.
    """
    nvml = Nvml(load_binding())
    try:
        nvml.call("nvmlInit")
    except NvmlError as error:
        raise NvmlError(f"no NVIDIA driver answers ({error.reason})", error.code) from error
    try:
        yield nvml
    finally:
        with suppress(NvmlError):  # a driver that has gone has no session to end
            nvml.call("nvmlShutdown")


def load_binding() -> ModuleType:
    """The module `pynvml` of the distribution nvidia-ml-py.

    The deprecated distribution of the module's own name hooks a FutureWarning to every import of it, which is an
    error under `-W error`; it says nothing about this import.

    Raises:
        NvmlError: it is not installed.
    """
    loaded = sys.modules.get("pynvml")
    if loaded is not None:
        return loaded
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            import pynvml
        except ImportError as error:
            raise NvmlError("the package nvidia-ml-py is not installed", FUNCTION_NOT_FOUND) from error
    module: ModuleType = pynvml
    return module


MIG_OFF = "off"
_INVALID_ARGUMENT = 2
_MAX_NVLINKS = 36  # a link that a GPU does not have ends the search


def gpus(missing: dict[str, str]) -> list[dict[str, Any]] | None:
    """Every NVIDIA GPU of the machine, also those hidden from CUDA; None where there is no driver.

    `missing` gets the reason of everything that is None, under "gpus" or "gpus.INDEX.FIELD".
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
