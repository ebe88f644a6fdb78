"""The compiled Triton kernels on a CUDA device, beside the eager ones on the same device."""

from __future__ import annotations

import pytest
import torch

from tests.support.zenflow.bucket_cases import BucketCases
from tests.support.zenflow.gpu_cases import GpuKernelCases
from zenflow.kernels import Kernels, kernels_for

pytestmark = pytest.mark.gpu


class OnAGpu:
    @pytest.fixture
    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    @pytest.fixture
    def kernels(self, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Kernels:
        pytest.importorskip("triton", reason="Triton cannot be imported here")
        monkeypatch.delenv("ZENFLOW_KERNELS", raising=False)
        kernels = kernels_for(device)
        assert kernels.name == "triton"
        return kernels


class TestOnAGpu(OnAGpu, GpuKernelCases):
    pass


class TestBucketsOnAGpu(OnAGpu, BucketCases):
    pass
