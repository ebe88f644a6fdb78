"""The Triton kernels in Triton's interpreter on the simulated CUDA device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.zenflow.bucket_cases import BucketCases
from tests.support.zenflow.device_cases import WINDOWS, RuntimeCases
from tests.support.zenflow.gpu_cases import GpuKernelCases
from tests.support.zenflow.simulated_cuda import SimulatedCuda
from zenflow.kernels import Kernels, kernels_for

pytestmark = pytest.mark.simulated_cuda(kernels="triton")
DEVICE = torch.device("privateuseone", 0)


@pytest.mark.smoke
def test_nothing_waits_for_the_device() -> None:
    GpuKernelCases().test_nothing_waits_for_the_device(kernels_for(DEVICE), DEVICE)


@pytest.mark.simulated_cuda(arrival=0.0, kernels="triton")
def test_a_training_with_them_is_that_of_the_eager_ones(gpu: SimulatedCuda) -> None:
    cases = RuntimeCases()
    ours = cases.trained(gpu.device, WINDOWS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZENFLOW_KERNELS", "eager")
        theirs = cases.trained(gpu.device, WINDOWS)
    cases.assert_bitwise(ours, theirs)
    assert gpu.counts().launches["update_kept"]


class _There:
    """Stands for the kernels until it is in the process of the simulated device."""

    def __reduce__(self) -> tuple[Any, ...]:
        return kernels_for, (DEVICE,)


class TestOnTheSimulatedGpu(BucketCases, GpuKernelCases):
    large = (75, 140)

    @pytest.fixture
    def device(self) -> torch.device:
        return DEVICE

    @pytest.fixture
    def kernels(self) -> Kernels | _There:
        return _There()
