"""The device's cases on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.zenflow.device_cases import RuntimeCases


class TestOnTheCpu(RuntimeCases):
    @pytest.fixture
    def device(self) -> torch.device:
        return torch.device("cpu")
