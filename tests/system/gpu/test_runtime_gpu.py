"""The invariants on a CUDA device, and that `step()` never waits for it."""

from __future__ import annotations

import pytest
import torch

from tests.support.zenflow.gpu_cases import GpuCases

pytestmark = pytest.mark.gpu


class TestOnAGpu(GpuCases):
    @pytest.fixture
    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())
