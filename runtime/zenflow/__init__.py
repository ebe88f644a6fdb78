"""ZenFlow: an optimizer whose state is split between the GPU and the host, exact where exactness is defined."""

from zenflow.config import ZenFlowConfig
from zenflow.device import CpuDevice, CudaDevice, Device
from zenflow.errors import (
    CheckpointError,
    ConfigError,
    HostEngineError,
    HostMemoryError,
    UnsupportedError,
    ZenFlowError,
)
from zenflow.family import ZenFlowAdagrad, ZenFlowAdam, ZenFlowAdamW, ZenFlowLion, ZenFlowSGD
from zenflow.history import Timeline, TimelineRecorder
from zenflow.ledger import Balance
from zenflow.optimizer import ZenFlowOptimizer
from zenflow.partition import Partition
from zenflow.stats import CoverageCurve, StepStats

__all__ = [
    "Balance",
    "CheckpointError",
    "ConfigError",
    "CoverageCurve",
    "CpuDevice",
    "CudaDevice",
    "Device",
    "HostEngineError",
    "HostMemoryError",
    "Partition",
    "StepStats",
    "Timeline",
    "TimelineRecorder",
    "UnsupportedError",
    "ZenFlowAdagrad",
    "ZenFlowAdam",
    "ZenFlowAdamW",
    "ZenFlowConfig",
    "ZenFlowError",
    "ZenFlowLion",
    "ZenFlowOptimizer",
    "ZenFlowSGD",
]
