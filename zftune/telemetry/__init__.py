"""What the machine is and does. The only package that talks to NVML. Importing it loads no torch."""

from zftune.telemetry.fingerprint import fingerprint, hw_id, model_id
from zftune.telemetry.hardware import hardware, software
from zftune.telemetry.host_files import cpu_quota
from zftune.telemetry.host_sampler import HostSampler
from zftune.telemetry.nvml_sampler import NvmlSampler
from zftune.telemetry.nvml_targets import visible_devices

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
