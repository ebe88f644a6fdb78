"""The compiled Triton kernels on a CUDA device, beside the eager ones on the same device."""

from __future__ import annotations

import random

import pytest
import torch

from tests.zenflow.kernel_cases import DTYPES, Draw, KernelCases
from tests.zenflow.rule_cases import NAMES, random_group
from zenflow.kernels import Kernels, kernels_for
from zenflow.rules import RULES

pytestmark = pytest.mark.gpu
# Many tiles, none of them full.
LARGE = (1531, 2063, 517)


class TestOnAGpu(KernelCases):
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

    @pytest.mark.parametrize("layout", ["contiguous", "transposed"])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("name", NAMES)
    def test_a_large_update_is_the_eager_one(
        self, kernels: Kernels, device: torch.device, name: str, dtype: torch.dtype, layout: str
    ) -> None:
        hyper = RULES[name].hyper(random_group(name, random.Random(3)))
        draw = Draw(11, device)
        self.compare(kernels, device, draw, RULES[name], hyper, LARGE, dtype, (layout, layout), odd=False)

    def test_nothing_waits_for_the_device(self, kernels: Kernels, device: torch.device) -> None:
        draw = Draw(12, device)
        matrix, columns = draw.values(64, 96).bfloat16(), draw.columns(20, 96)
        skip, factor = torch.tensor(False, device=device), torch.tensor(0.5, device=device)
        cases = [(RULES[name], draw.state(RULES[name], 20, 64, odd=False)) for name in NAMES]
        hypers = [rule.hyper(random_group(rule.name, random.Random(4))) for rule, _ in cases]
        torch.cuda.set_sync_debug_mode("error")
        try:
            kernels.scatter(matrix, columns, kernels.pack(matrix, columns))
            kernels.importance(matrix)
            gradient = matrix.clone()
            for (rule, state), hyper in zip(cases, hypers, strict=True):
                kernels.update(rule, state, gradient, matrix, hyper, columns=columns, factor=factor, skip=skip)
        finally:
            torch.cuda.set_sync_debug_mode("default")
