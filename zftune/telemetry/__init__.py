"""What the machine is and does. The only package that talks to NVML. Importing it loads no torch."""

from zftune.telemetry.fingerprint import fingerprint, hardware, hw_id, model_id, software
from zftune.telemetry.host_sampler import HostSampler, cpu_quota
from zftune.telemetry.nvml_device import visible_devices
from zftune.telemetry.nvml_sampler import NvmlSampler

__all__ = [
    "HostSampler",
    "NvmlSampler",
    "cpu_quota",
    "fingerprint",
    "hardware",
    "hw_id",
    "model_id",
    "software",
    "visible_devices",
]
