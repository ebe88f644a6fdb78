"""The scripted NVML for the doctor's tests."""

from tests.support.nvml.scripted import machine, nvml_library

__all__ = ["machine", "nvml_library"]
