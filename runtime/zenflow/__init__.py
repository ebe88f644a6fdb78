"""ZenFlow: an optimizer whose state is split between the GPU and the host, exact where exactness is defined."""

from zenflow.bandwidth import HostBandwidth, host_bandwidth
from zenflow.config import ZenFlowConfig
from zenflow.device import CpuDevice, CudaDevice, Device
from zenflow.emulator import EmulatedAccelerator
from zenflow.errors import ConfigError, HostEngineError, UnsupportedError, ZenFlowError
from zenflow.optimizer import ZenFlowAdamW
from zenflow.reference import ReferenceAdamW
from zenflow.rig import Rig, RigSpec
from zenflow.stats import StepStats

__all__ = [
    "ConfigError",
    "CpuDevice",
    "CudaDevice",
    "Device",
    "EmulatedAccelerator",
    "HostBandwidth",
    "HostEngineError",
    "ReferenceAdamW",
    "Rig",
    "RigSpec",
    "StepStats",
    "UnsupportedError",
    "ZenFlowAdamW",
    "ZenFlowConfig",
    "ZenFlowError",
    "host_bandwidth",
]
