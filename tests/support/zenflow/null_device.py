"""A device whose kernels do nothing and whose copies are of tiny tensors: the training thread's own work is left.

Everything in Python runs as on a GPU, the wrappers of Triton's kernels too, up to the launch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

import zenflow.runtime
from zenflow.device import Arrived, Device, HostSpan, Mark, Transfer

KERNELS = ("column_sums", "pack_columns", "scatter_columns", "update_columns")
ROWS = 8
"""Of each matrix: enough for the kernels' wrappers, little for what PyTorch does itself."""


class NullDevice(Device):
    """Marks are numbers, copies are made at once; all of them are counted in `calls`."""

    has_streams = True

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.calls: Counter[str] = Counter()

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")

    def mark(self) -> Mark:
        self.calls["mark"] += 1
        return self.calls["mark"]

    def asked(self) -> Mark:
        return None

    def elapsed_s(self, begin: Mark, end: Mark) -> float:
        return 0.0

    def passed(self, mark: Mark) -> bool:
        return True

    def wait_for(self, mark: Mark) -> None:
        return None

    def d2h(self, source: torch.Tensor, target: torch.Tensor) -> Transfer:
        self.calls["d2h"] += 1
        target.copy_(source)
        return Arrived(0, source.nbytes)

    def h2d(self, source: torch.Tensor, after: HostSpan, asked: Mark) -> tuple[Transfer, torch.Tensor]:
        self.calls["h2d"] += 1
        return Arrived(0, source.nbytes), source.clone()

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        self.calls["send"] += 1
        return tensor.clone()

    def join(self, transfer: Transfer, tensor: torch.Tensor) -> None:
        return None


class _NoKernel:
    """A kernel that is counted instead of launched; importance is made up, so that each selection is another one."""

    def __init__(self, name: str, device: NullDevice, generator: torch.Generator) -> None:
        self._name = name
        self._device = device
        self._generator = generator

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._launch

    def _launch(self, *arguments: Any, **constants: Any) -> None:
        self._device.calls[f"launch {self._name}"] += 1
        if self._name == "column_sums":
            arguments[1].uniform_(generator=self._generator)


@contextmanager
def null_kernels(device: NullDevice, seed: int = 0) -> Iterator[None]:
    """Have optimizers that are made within use Triton's kernels, and none of these launched."""
    from zenflow.kernels import triton_kernels  # not before: Triton reads TRITON_INTERPRET when it is imported
    from zenflow.kernels.triton_launch import TritonKernels

    generator = torch.Generator("cpu").manual_seed(seed)
    with ExitStack() as replaced:
        replaced.enter_context(mock.patch.object(zenflow.runtime, "kernels_for", return_value=TritonKernels()))
        for name in KERNELS:
            replaced.enter_context(mock.patch.object(triton_kernels, name, _NoKernel(name, device, generator)))
        yield


class _Piece(nn.Module):
    """One weight that is used without a matrix product, which would hide the rest."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape, device="cpu").bfloat16() * 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add its sum."""
        return x + self.weight.sum()


def model_of(matrices: int, vectors: int, columns: int) -> nn.Module:
    """A model in bf16 whose own forward and backward take the thread little time.

    Args:
        matrices: of `ROWS` x `columns`.
        vectors: of `columns` elements.
        columns: of each.
    """
    torch.manual_seed(0)
    pieces = [_Piece(ROWS, columns) for _ in range(matrices)] + [_Piece(columns) for _ in range(vectors)]
    return nn.Sequential(*pieces)
