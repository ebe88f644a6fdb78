"""The one way to open NVML: a session whose every failure is an `NvmlError` with its reason."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
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


class NvmlError(ZftuneError):
    """NVML does not answer.

    Args:
        reason: one sentence, or the driver's own words.
        code: NVML's return value.
    """

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.code = code


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
        return f"NVML: {self._binding.NVMLError(code)}"

    def _member(self, name: str) -> Any:
        member = getattr(self._binding, name, None)
        if member is None:
            reason = f"the binding has no {name}: uninstall pynvml and install nvidia-ml-py again"
            raise NvmlError(reason, FUNCTION_NOT_FOUND)
        return member

    def _translated(self, error: Any, name: str) -> NvmlError:
        if error.value == FUNCTION_NOT_FOUND:
            return NvmlError(f"NVML: the installed driver has no {name}", error.value)
        return NvmlError(f"NVML: {error}", error.value)


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
        words = str(error).removeprefix("NVML: ")
        raise NvmlError(f"no NVIDIA driver answers ({words})", error.code) from error
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
