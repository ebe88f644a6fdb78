"""The kernels over buckets: plain loops beside the eager ones, the native ones and Triton's in its interpreter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.zenflow.bucket_cases import Bucket, BucketCases
from tests.support.zenflow.kernel_cases import Draw
from zenflow.host.native import load_native
from zenflow.kernels import Kernels
from zenflow.kernels.base import EagerKernels
from zenflow.kernels.native import NativeKernels

if torch.cuda.is_available():  # one process has either the interpreter or the compiler
    pytest.skip("a CUDA device is here: tests/system/gpu compares the compiled kernels", allow_module_level=True)
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("TRITON_INTERPRET", "1")  # read when the kernels are defined, and when the first of them is run
    pytest.importorskip("triton", reason="Triton cannot be imported here")
    from zenflow.kernels.triton_launch import TritonKernels

# The interpreter is numpy, which says where a number leaves its range.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CPU = torch.device("cpu")


class OnTheCpu(BucketCases):
    @pytest.fixture
    def device(self) -> torch.device:
        return CPU


class TestEager(OnTheCpu):
    @pytest.fixture
    def kernels(self) -> Kernels:
        return EagerKernels()


class TestNative(OnTheCpu):
    @pytest.fixture
    def kernels(self) -> Kernels:
        return NativeKernels(load_native(), 1)


class TestInTheInterpreter(OnTheCpu):
    @pytest.fixture
    def kernels(self, monkeypatch: pytest.MonkeyPatch) -> Kernels:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        return TritonKernels()

    def test_weights_that_are_shared_lazily_stay_so(self, kernels: Kernels) -> None:
        """Their addresses do not ask torch for memory to write to."""
        bucket = Bucket(Draw(2, CPU), [(16, 32)], torch.float32, 0.5, transposed=False)
        (weight,) = bucket.weights
        clone = weight._lazy_clone()
        arrived = torch.full((bucket.sent,), 3.5)
        kernels.show_bucket(bucket.tables(CPU), [weight], arrived)
        assert torch._C._is_cow_tensor(weight)  # type: ignore[attr-defined]
        assert int((clone == 3.5).sum()) == bucket.sent


class Launches(TorchDispatchMode):
    """Counts what a device would be given to do."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.count += 1
        return func(*args, **kwargs or {})


def test_eager_sums_off_the_cpu_are_not_row_after_row() -> None:
    """Only the CPU's are promised an order."""
    with Launches() as launches:
        energies = EagerKernels().energies(torch.empty(5000, 3, dtype=torch.bfloat16, device="meta"))
    assert (energies.shape, energies.dtype) == ((3,), torch.float32)
    assert launches.count <= 3  # memory, roots, squares
