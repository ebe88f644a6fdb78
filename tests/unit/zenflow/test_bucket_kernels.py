"""The kernels over buckets: plain loops beside the eager ones, the native ones and Triton's in its interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.support.zenflow.bucket_cases import Bucket, BucketCases
from tests.support.zenflow.kernel_cases import Draw
from zenflow.host.native import load_native
from zenflow.kernels import Kernels
from zenflow.kernels.base import EagerKernels
from zenflow.kernels.native import NativeKernels
from zenflow.kernels.tables import KeptTables

if torch.cuda.is_available():  # one process has either the interpreter or the compiler
    pytest.skip("a CUDA device is here: tests/system/gpu compares the compiled kernels", allow_module_level=True)
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("TRITON_INTERPRET", "1")  # read when the kernels are defined, and when the first of them is run
    pytest.importorskip("triton", reason="Triton cannot be imported here")
    from zenflow.kernels.triton_launch import TritonKernels

# The interpreter is numpy, which says where a number leaves its range.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CPU = torch.device("cpu")


def test_other_numbers_of_kept_columns_make_other_tables() -> None:
    draw = Draw(5, CPU)
    buckets = [Bucket(draw, [(9, 40), (300, 7)], torch.float32, share, transposed=share > 0.5) for share in (0.2, 0.9)]
    tables = KeptTables([bucket.tables(CPU) for bucket in buckets], [0, 1, 1, 0], torch.Tensor.clone)
    buckets[1].counts = [3, 5]
    moved = tables.with_places({1: buckets[1].moved()})
    new = KeptTables([bucket.tables(CPU) for bucket in buckets], [0, 1, 1, 0], torch.Tensor.clone)
    assert (tables.sizes, moved.sizes) == ([8, 1, 36, 6], [8, 1, 3, 5])
    for one, other in zip((moved, *moved.buckets), (new, *new.buckets), strict=True):
        for name, value in vars(other).items():
            assert not isinstance(value, torch.Tensor) or torch.equal(value, getattr(one, name)), name
    for flag, tiles in new.tiles.items():
        assert torch.equal(moved.tiles[flag], tiles)


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
