"""The scripted NVML for every test of the telemetry."""

from tests.support.nvml.scripted import clock, here, machine, nvml_library, old_nvml_library

__all__ = ["clock", "here", "machine", "nvml_library", "old_nvml_library"]
