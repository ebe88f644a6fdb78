"""What all weights of one optimizer share."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from zenflow.device import Device, Transfer
from zenflow.host import HostEngine
from zenflow.rules import AdamW
from zenflow.stats import Traffic


@dataclass(slots=True)
class Runtime:
    """Device, host engine and rule, and the count of bytes on the link."""

    device: Device
    engine: HostEngine
    rule: AdamW
    deferred_update: str
    traffic: Traffic = field(default_factory=Traffic)
    last_d2h: Transfer | None = None
    """The newest copy to the host; copies in one direction arrive in order."""

    def fetch(self, tensor: torch.Tensor, target: torch.Tensor | None = None) -> tuple[torch.Tensor, Transfer]:
        """Start a copy of a device tensor into host memory (new memory where none is given)."""
        if target is None:
            target = self.device.host_empty(tensor.shape, tensor.dtype)
        self.last_d2h = self.device.d2h(tensor, target)
        return target, self.last_d2h

    def send_index(self, index: torch.Tensor) -> torch.Tensor:
        """A copy of a column or slot index on the device."""
        if self.device.torch_device.type != "cpu":
            self.traffic.index_bytes += index.nbytes
        return self.device.send(index)
