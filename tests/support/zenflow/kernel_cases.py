"""What every implementation of the device kernels must do: the same as the eager one, wherever it runs."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tests.support.tiers import pairs
from zenflow.kernels import Kernels
from zenflow.kernels.base import EagerKernels, finite_or_zero
from zenflow.rules import Rule
from zenflow.state import ColumnState

EAGER = EagerKernels()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("contiguous", "transposed", "sliced", "strided")
SHAPES = ((1, 1), (1, 7), (9, 1), (33, 65), (300, 5))
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
# Infinities, NaN, both zeros, denormals in fp32 and in fp16, numbers beyond fp16 and next to the end of bf16 and fp32.
ODD = (float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 1e-40, -3e-8, 7e4, -3.3961775e38, 3.4028235e38)


def laid_out(values: Tensor, layout: str) -> Tensor:
    """A copy of a matrix in other strides, in memory where nothing else is 0."""
    rows, columns = values.shape
    if layout == "transposed":
        return values.t().contiguous().t()
    if layout == "sliced":
        memory = torch.full((rows, columns + 5), 7.0, dtype=values.dtype, device=values.device)[:, 2 : 2 + columns]
    elif layout == "strided":
        memory = torch.full((2 * rows, 3 * columns), 7.0, dtype=values.dtype, device=values.device)[::2, 1::3]
    else:
        memory = torch.empty_like(values, memory_format=torch.contiguous_format)
    return memory.copy_(values)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(BITS[tensor.dtype])


def memory(tensor: Tensor) -> Tensor:
    """All that a view's memory holds, also between its elements."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())


def same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, except that a NaN is a NaN."""
    assert one.dtype == other.dtype
    return bool(((bits(one) == bits(other)) | (one.isnan() & other.isnan()).contiguous()).all())


class Draw:
    """Random inputs on a device from one seed, which a failing test shows."""

    def __init__(self, seed: int, device: torch.device) -> None:
        print(f"seed {seed}")
        self.choice = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._device = device

    def values(self, *shape: int, odd: bool = False) -> Tensor:
        """fp32 of many magnitudes; odd: some of them from `ODD`."""
        scale = torch.randint(-8, 4, shape, generator=self._generator).float().exp2()
        values = torch.randn(shape, generator=self._generator) * scale
        if odd:
            some = torch.rand(shape, generator=self._generator) < 0.2
            pick = torch.randint(len(ODD), shape, generator=self._generator)
            values = torch.where(some, torch.tensor(ODD)[pick], values)
        return values.to(self._device)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self._generator).to(self._device)

    def columns(self, count: int, of: int) -> Tensor:
        return torch.randperm(of, generator=self._generator)[:count].to(self._device)

    def state(self, rule: Rule, n: int, rows: int, *, odd: bool) -> ColumnState:
        """Some updates in, each column with a count of its own."""
        state = ColumnState(self.values(n, rows, odd=odd), rule.moments)
        for place, moment in enumerate(state.moments):
            values = self.values(n, rows, odd=odd)
            moment.copy_(values.square() if place == 1 or rule.name == "adagrad" else values)
        state.count.copy_(self.integers(0, 3, n))
        state.count[::3] = self.integers(0, 5000, len(state.count[::3])).int()
        return state


def copied(state: ColumnState) -> ColumnState:
    streams = [stream.clone() for stream in (state.master, *state.moments)]
    return ColumnState.over(streams, state.count.clone())


def equal_states(one: ColumnState, other: ColumnState) -> bool:
    streams = zip((one.master, *one.moments), (other.master, *other.moments), strict=True)
    return torch.equal(one.count, other.count) and all(same(a, b) for a, b in streams)


def matrices(*shapes: tuple[int, int]) -> pytest.MarkDecorator:
    """Tests in which each two of a shape, a dtype and a layout of a matrix meet."""
    return pytest.mark.parametrize(
        ("shape", "dtype", "layout"), pairs(shape=shapes, dtype=DTYPES, layout=LAYOUTS), ids=str
    )


class KernelCases:
    """Test cases for subclasses, which provide the fixtures `kernels` and `device`."""

    @matrices(*SHAPES, (5000, 3), (700, 40))
    def test_energies_of_integers_are_exact(
        self, kernels: Kernels, device: torch.device, shape: tuple[int, int], dtype: torch.dtype, layout: str
    ) -> None:
        """Their sums are exact in any order, so every element counts once."""
        draw = Draw(sum(shape), device)
        values = draw.integers(-9, 10, *shape)
        energies = kernels.energies(laid_out(values.to(dtype), layout))
        assert energies.dtype == torch.float32
        if energies.device.type == "cpu":
            assert torch.equal(energies, values.square().sum(dim=0).float())
        else:  # the square of a root
            torch.testing.assert_close(energies, values.square().sum(dim=0).float(), rtol=1e-6, atol=0)

    @matrices((1, 7), (33, 65), (5000, 3))
    def test_energies_are_as_near_as_fp32_sums_are(
        self, kernels: Kernels, device: torch.device, shape: tuple[int, int], dtype: torch.dtype, layout: str
    ) -> None:
        matrix = Draw(sum(shape), device).values(*shape).to(dtype)
        exact = matrix.double().square().sum(dim=0)
        bound = exact * (shape[0] + 5) * 2.0**-24
        laid = laid_out(matrix, layout)
        for got in (kernels.energies(laid), EAGER.energies(laid)):
            assert bool(((got.double() - exact).abs() <= bound).all())

    @matrices((3, 5), (900, 5))
    def test_energies_that_are_not_finite(
        self, kernels: Kernels, device: torch.device, shape: tuple[int, int], dtype: torch.dtype, layout: str
    ) -> None:
        rows = shape[0]
        matrix = torch.ones(rows, 5, device=device)
        matrix[rows - 1, 0] = float("nan")
        matrix[0, 1] = -float("inf")
        matrix[1, 2] = 1e30  # whose square is beyond fp32, as it is itself beyond fp16
        matrix[1, 3] = float("inf")
        matrix[2, 3] = float("nan")
        laid = laid_out(matrix.to(dtype), layout)
        assert finite_or_zero(kernels.energies(laid))[:4].tolist() == [0.0, 0.0, 0.0, 0.0]
        assert torch.isfinite(kernels.energies(laid)).tolist() == [False, False, False, False, True]
        assert kernels.energies(laid)[4].item() == pytest.approx(rows, rel=1e-6)

    @matrices(*SHAPES)
    def test_pack_copies_every_bit(
        self, kernels: Kernels, device: torch.device, shape: tuple[int, int], dtype: torch.dtype, layout: str
    ) -> None:
        draw = Draw(1 + sum(shape) + LAYOUTS.index(layout), device)
        width = 31 if dtype == torch.float32 else 15
        raw = draw.integers(-(2**width), 2**width, *shape).to(BITS[dtype])  # NaNs with payloads among them
        matrix = laid_out(raw, layout).view(dtype)
        columns = draw.columns(draw.choice.randint(1, shape[1]), shape[1])
        index = draw.choice.choice([columns, columns.int()])
        packed = kernels.pack(matrix, index)
        assert packed.is_contiguous()
        assert packed.dtype == dtype
        assert torch.equal(packed.view(BITS[dtype]), raw.t()[columns])
        place = torch.empty_like(packed)
        assert kernels.pack(matrix, index, place) is place
        assert torch.equal(place.view(BITS[dtype]), raw.t()[columns])

    @matrices(*SHAPES)
    def test_scatter_rounds_to_nearest_even_and_writes_nothing_else(
        self, kernels: Kernels, device: torch.device, shape: tuple[int, int], dtype: torch.dtype, layout: str
    ) -> None:
        draw = Draw(2 + sum(shape), device)
        rows, of = shape
        matrix = laid_out(draw.values(rows, of).to(dtype), layout)
        expected = laid_out(matrix, layout)
        columns = draw.columns(draw.choice.randint(1, of), of)
        source = draw.values(len(columns), rows, odd=True)
        halves = bits(source) & ~0x1FFF | 0x1000  # half-way between two numbers of fp16, often of bf16 too
        for new in (source, halves.view(torch.float32), (halves << 3).view(torch.float32), source.to(dtype)):
            kernels.scatter(matrix, columns, new)
            EAGER.scatter(expected, columns, new)
            assert same(memory(matrix), memory(expected))

    def test_no_columns_and_no_rows(self, kernels: Kernels, device: torch.device) -> None:
        matrix, none = torch.ones(4, 3, device=device), torch.empty(0, dtype=torch.int64, device=device)
        assert kernels.energies(matrix[:, :0]).shape == (0,)
        assert kernels.energies(matrix[:0]).tolist() == [0.0, 0.0, 0.0]
        assert kernels.pack(matrix, none).shape == (0, 4)
        assert kernels.pack(matrix[:0], torch.tensor([2], device=device)).shape == (1, 0)
        kernels.scatter(matrix, none, torch.empty(0, 4, device=device))
        assert matrix.unique().tolist() == [1.0]

    def test_rows_that_are_far_apart(self, kernels: Kernels, device: torch.device) -> None:
        """More than 2^31 elements between the first and the last: addresses are not int32."""
        draw, apart = Draw(9, device), 2**30 + 7
        memory = torch.empty(2 * apart + 3, dtype=torch.bfloat16, device=device)  # of which a few pages are touched
        matrix = memory.as_strided((3, 3), (apart, 1)).copy_(draw.integers(-9, 10, 3, 3))
        near, columns = matrix.contiguous(), torch.tensor([2, 0], device=device)
        torch.testing.assert_close(kernels.energies(matrix), EAGER.energies(near), rtol=1e-6, atol=0)
        assert torch.equal(kernels.pack(matrix, columns), EAGER.pack(near, columns))
        rows = draw.values(2, 3)
        kernels.scatter(matrix, columns, rows)
        EAGER.scatter(near, columns, rows)
        assert same(matrix, near)
