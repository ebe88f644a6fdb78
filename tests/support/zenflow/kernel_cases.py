"""What every implementation of the device kernels must do: the same as the eager one, wherever it runs."""

from __future__ import annotations

import random
import zlib
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.tiers import combinations, fast, pairs
from tests.support.zenflow.rule_cases import NAMES, random_group
from zenflow.kernels import ColumnUpdate, Kernels
from zenflow.kernels.base import EagerKernels
from zenflow.rules import RULES, Hyper, Rule
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


# Dtype and layout of the weights and of the gradient (None: the same dtype); whether columns are chosen; the factor;
# whether the second step is skipped, None: no step can be.
UPDATES = combinations(
    name=NAMES,
    dtype=DTYPES,
    of_gradient=(None, torch.float32),
    of_weights=LAYOUTS,
    laid_gradient=LAYOUTS,
    chosen=(True, False),
    factor=(None, 0.37),
    skip=(None, False, True),
)[:: fast(1, all_of=19)]


def matrices(*shapes: tuple[int, int]) -> pytest.MarkDecorator:
    """Tests in which each two of a shape, a dtype and a layout of a matrix meet."""
    return pytest.mark.parametrize(
        ("shape", "dtype", "layout"), pairs(shape=shapes, dtype=DTYPES, layout=LAYOUTS), ids=str
    )


class KernelCases:
    """Test cases for subclasses, which provide the fixtures `kernels` and `device`."""

    @matrices(*SHAPES, (5000, 3), (700, 40))
    def test_importance_of_integers_is_exact(
        self, kernels: Kernels, device: torch.device, shape: tuple[int, int], dtype: torch.dtype, layout: str
    ) -> None:
        """Their sums are exact in any order, so every element counts once."""
        draw = Draw(sum(shape), device)
        values = draw.integers(-9, 10, *shape)
        scores = kernels.importance(laid_out(values.to(dtype), layout))
        assert scores.dtype == torch.float32
        assert torch.equal(scores, values.square().sum(dim=0).float())

    @matrices((1, 7), (33, 65), (5000, 3))
    def test_importance_is_as_near_as_fp32_sums_are(
        self, kernels: Kernels, device: torch.device, shape: tuple[int, int], dtype: torch.dtype, layout: str
    ) -> None:
        matrix = Draw(sum(shape), device).values(*shape).to(dtype)
        exact = matrix.double().square().sum(dim=0)
        bound = exact * (shape[0] + 1) * 2.0**-24
        laid = laid_out(matrix, layout)
        for got in (kernels.importance(laid), EAGER.importance(laid)):
            assert bool(((got.double() - exact).abs() <= bound).all())

    @matrices((3, 5), (900, 5))
    def test_importance_that_is_not_finite_is_0(
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
        assert kernels.importance(laid).tolist() == [0.0, 0.0, 0.0, 0.0, rows]
        assert torch.isfinite(kernels.energies(laid)).tolist() == [False, False, False, False, True]
        assert kernels.energies(laid)[4] == rows

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

    @pytest.mark.parametrize("case", UPDATES, ids=lambda case: "-".join(map(str, case)))
    def test_update_is_the_eager_one(self, kernels: Kernels, device: torch.device, case: tuple[Any, ...]) -> None:
        name, dtype, of_gradient, *layouts, chosen, factor, skip = case
        draw = Draw(zlib.crc32(repr(case).encode()), device)
        rows, of = draw.choice.choice(SHAPES)
        self.compare(
            kernels,
            device,
            draw,
            RULES[name],
            RULES[name].hyper(random_group(name, draw.choice)),
            (rows, of, draw.choice.randint(1, of) if chosen else of),
            (dtype, of_gradient or dtype),
            (layouts[0], layouts[1]),
            odd=draw.choice.random() < 0.33,
            chosen=chosen,
            factor=factor,
            skip=skip,
        )

    def compare(
        self,
        kernels: Kernels,
        device: torch.device,
        draw: Draw,
        rule: Rule,
        hyper: Hyper,
        shape: tuple[int, int, int],
        dtypes: tuple[torch.dtype, torch.dtype],
        layouts: tuple[str, str],
        *,
        odd: bool,
        chosen: bool,
        factor: float | None,
        skip: bool | None,
    ) -> None:
        """Two updates; dtypes and layouts are those of the weights and of the gradient."""
        rows, of, n = shape
        columns = draw.columns(n, of) if chosen else None
        weights = laid_out(draw.values(rows, of).to(dtypes[0]), layouts[0])
        twin = laid_out(weights, layouts[0])
        state = draw.state(rule, n, rows, odd=odd)
        eager = copied(state)
        for step in range(2):
            gradient = laid_out(draw.values(rows, of, odd=odd).to(dtypes[1]), layouts[1])
            before = gradient.clone()
            knobs = {
                "columns": columns,
                "factor": None if factor is None else torch.tensor(factor, device=device),
                "skip": None if skip is None else torch.tensor(skip and step == 1, device=device),
            }
            kernels.update(rule, state, gradient, weights, hyper, **knobs)
            EAGER.update(rule, eager, gradient, twin, hyper, **knobs)
            assert equal_states(state, eager), (hyper, layouts, knobs)
            assert same(memory(weights), memory(twin)), (hyper, layouts, knobs)
            assert same(gradient, before)

    @pytest.mark.parametrize("name", NAMES)
    def test_the_updates_of_a_step_at_once(self, kernels: Kernels, device: torch.device, name: str) -> None:
        """Of two groups, weights with update counts of their own: what follows from counts is made for all of them."""
        draw, rule = Draw(9, device), RULES[name]
        hypers = [rule.hyper(random_group(name, draw.choice)) for _ in range(2)]
        ours: list[ColumnUpdate] = []
        theirs: list[ColumnUpdate] = []
        for number, (n, rows, of) in enumerate([(3, 5, 3), (2, 4, 6), (1, 30, 1), (7, 3, 9)]):
            columns = draw.columns(n, of) if n < of else None
            gradient, weights = draw.values(rows, of), draw.values(rows, of).to(torch.bfloat16)
            state = draw.state(rule, n, rows, odd=False)
            for made, own, written in ((ours, state, weights), (theirs, copied(state), weights.clone())):
                made.append(ColumnUpdate(own, gradient, written, hypers[number % 2], columns))
        for factor in (None, torch.tensor(0.3, device=device)):
            kernels.update_many(rule, ours, factor=factor)
            EAGER.update_many(rule, theirs, factor=factor)
        for one, other in zip(ours, theirs, strict=True):
            assert equal_states(one.state, other.state)
            assert one.weights is not None
            assert other.weights is not None
            assert same(one.weights, other.weights)

    @pytest.mark.parametrize("name", NAMES)
    def test_a_skipped_first_update_leaves_the_state(self, kernels: Kernels, device: torch.device, name: str) -> None:
        draw = Draw(7, device)
        rule = RULES[name]
        hyper = rule.hyper(random_group(name, draw.choice))
        state = ColumnState(draw.values(3, 40), rule.moments)
        weights = state.master.t().to(torch.bfloat16)
        before, old = copied(state), weights.clone()
        gradient = torch.full((40, 3), float("nan"), device=device)
        kernels.update(rule, state, gradient, weights, hyper, skip=torch.tensor(True, device=device))
        assert equal_states(state, before)
        assert same(weights, old)

    @pytest.mark.parametrize("name", NAMES)
    def test_a_master_that_is_the_weight(self, kernels: Kernels, device: torch.device, name: str) -> None:
        """As a wholly resident parameter: one column as long as the parameter."""
        draw = Draw(8, device)
        rule = RULES[name]
        hyper = rule.hyper(random_group(name, draw.choice))
        parameter, gradient = draw.values(30, 50), draw.values(30, 50)
        state = ColumnState(parameter.view(1, -1), rule.moments)
        expected = copied(state)
        for _ in range(3):
            kernels.update(rule, state, gradient.view(-1, 1), None, hyper)
            EAGER.update(rule, expected, gradient.view(-1, 1), None, hyper)
        assert equal_states(state, expected)
        assert state.master.data_ptr() == parameter.data_ptr()

    def test_no_columns_and_no_rows(self, kernels: Kernels, device: torch.device) -> None:
        matrix, none = torch.ones(4, 3, device=device), torch.empty(0, dtype=torch.int64, device=device)
        assert kernels.importance(matrix[:, :0]).shape == (0,)
        assert kernels.importance(matrix[:0]).tolist() == [0.0, 0.0, 0.0]
        assert kernels.pack(matrix, none).shape == (0, 4)
        assert kernels.pack(matrix[:0], torch.tensor([2], device=device)).shape == (1, 0)
        kernels.scatter(matrix, none, torch.empty(0, 4, device=device))
        for name in NAMES:
            rule = RULES[name]
            state = ColumnState(torch.empty(0, 4, device=device), rule.moments)
            hyper = rule.hyper(random_group(name, random.Random(1)))
            kernels.update(rule, state, torch.ones(4, 3, device=device), matrix, hyper, columns=none)
        assert matrix.unique().tolist() == [1.0]

    def test_rows_that_are_far_apart(self, kernels: Kernels, device: torch.device) -> None:
        """More than 2^31 elements between the first and the last: addresses are not int32."""
        draw, apart = Draw(9, device), 2**30 + 7
        memory = torch.empty(2 * apart + 3, dtype=torch.bfloat16, device=device)  # of which a few pages are touched
        matrix = memory.as_strided((3, 3), (apart, 1)).copy_(draw.integers(-9, 10, 3, 3))
        near, columns = matrix.contiguous(), torch.tensor([2, 0], device=device)
        assert torch.equal(kernels.importance(matrix), EAGER.importance(near))
        assert torch.equal(kernels.pack(matrix, columns), EAGER.pack(near, columns))
        state, hyper = (
            draw.state(RULES["lion"], 2, 3, odd=False),
            RULES["lion"].hyper(random_group("lion", draw.choice)),
        )
        expected, gradient = copied(state), near.clone()
        kernels.update(RULES["lion"], state, matrix, matrix, hyper, columns=columns)
        EAGER.update(RULES["lion"], expected, gradient, near, hyper, columns=columns)
        assert equal_states(state, expected)
        assert same(matrix, near)
        kernels.scatter(matrix, columns, gradient[:2])
        EAGER.scatter(near, columns, gradient[:2])
        assert same(matrix, near)
