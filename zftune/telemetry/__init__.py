"""What the machine is and does. The only package that talks to NVML."""

from zftune.telemetry.fingerprint import fingerprint, hw_id, model_id
from zftune.telemetry.hardware import cpu_quota, hardware, software

__all__ = ["cpu_quota", "fingerprint", "hardware", "hw_id", "model_id", "software"]
