"""The kernels of the native module beside the eager ones, on one thread and on several."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

from tests.support.oracle import energies as reference_energies
from tests.support.tiers import combinations
from tests.support.zenflow.kernel_cases import (
    DTYPES,
    EAGER,
    LAYOUTS,
    Draw,
    KernelCases,
    copied,
    equal_states,
    laid_out,
    memory,
    same,
)
from tests.support.zenflow.rule_cases import NAMES, random_group
from zenflow.host.native import load_native
from zenflow.kernels.base import ColumnUpdate, PackedColumns
from zenflow.kernels.native import NativeKernels
from zenflow.rules import RULES, Hyper, Rule
from zenflow.state import ColumnState

CPU = torch.device("cpu")
# Several tiles each way, none of them full; and one long column.
LARGE = ((531, 70, 37), (40_001, 1, 1), (2, 900, 411))


THREADS = (1, 2, 5)


@pytest.fixture(params=THREADS)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def device() -> torch.device:
    return CPU


@pytest.fixture
def kernels() -> NativeKernels:
    return NativeKernels(load_native())


def hyper_of(name: str, seed: int) -> tuple[Rule, Hyper]:
    return RULES[name], RULES[name].hyper(random_group(name, random.Random(seed)))


class TestOnTheCpu(KernelCases):
    """What is small is done by the caller alone, however many threads there are."""


def with_threads(**axes: Iterable[Any]) -> Any:
    """Parametrizes with these axes and the numbers of threads together."""
    cases = combinations(threads=THREADS, **axes)
    return pytest.mark.parametrize(",".join(("threads", *axes)), cases, ids=str, indirect=["threads"])


@pytest.mark.usefixtures("threads")
class TestOnSeveralThreads:
    @with_threads(name=NAMES, shape=LARGE)
    def test_a_large_update_is_the_eager_one(
        self, kernels: NativeKernels, device: torch.device, name: str, shape: tuple[int, int, int]
    ) -> None:
        draw = Draw(sum(shape), device)
        for layouts in zip(LAYOUTS, draw.choice.sample(LAYOUTS, len(LAYOUTS)), strict=True):
            dtype = draw.choice.choice(DTYPES)
            rule, hyper = hyper_of(name, draw.choice.randint(0, 99))
            for of_gradient in (dtype, torch.float32):
                KernelCases().compare(
                    kernels,
                    device,
                    draw,
                    rule,
                    hyper,
                    shape,
                    (dtype, of_gradient),
                    layouts,
                    odd=draw.choice.random() < 0.3,
                    chosen=shape[2] < shape[1] or draw.choice.random() < 0.5,
                    factor=draw.choice.choice([None, 0.37]),
                    skip=draw.choice.choice([None, False, True]),
                )

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_large_matrices_are_packed_and_written(
        self, kernels: NativeKernels, device: torch.device, dtype: torch.dtype
    ) -> None:
        draw = Draw(5, device)
        for rows, of in ((1000, 77), (3, 20_000), (20_000, 3), (1, 70_000)):
            for layout in LAYOUTS:
                matrix = laid_out(draw.values(rows, of).to(dtype), layout)
                expected = laid_out(matrix, layout)
                columns = draw.columns(draw.choice.randint(1, of), of)
                packed = kernels.pack(matrix, columns)
                assert torch.equal(packed, EAGER.pack(matrix, columns))
                for source in (packed.flip(1), draw.values(*packed.shape), packed.t().contiguous().t()):
                    kernels.scatter(matrix, columns, source)
                    EAGER.scatter(expected, columns, source)
                    assert same(memory(matrix), memory(expected)), layout

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_energies_are_the_eager_ones_and_the_references_to_a_bit(
        self, kernels: NativeKernels, device: torch.device, dtype: torch.dtype
    ) -> None:
        draw = Draw(6, device)
        for rows, of in ((1, 9), (63, 70), (64, 1025), (65, 64), (200, 2100), (4097, 33), (3, 70_000)):
            matrix = draw.values(rows, of).to(dtype)
            expected = reference_energies(matrix)
            for layout in (*LAYOUTS, "every other column"):
                laid = matrix.repeat_interleave(2, 1)[:, ::2] if layout not in LAYOUTS else laid_out(matrix, layout)
                assert torch.equal(kernels.energies(laid), expected), (rows, of, layout)
                assert torch.equal(EAGER.energies(laid), expected), (rows, of, layout)

    @with_threads(dtype=DTYPES, density=[1.0, 0.7, 0.1], ascending=[True, False])
    def test_columns_that_lie_close_together(
        self, kernels: NativeKernels, device: torch.device, dtype: torch.dtype, density: float, ascending: bool
    ) -> None:
        """As tiers have them, before and after a move: tiles are transposed in vectors, with what lies between."""
        draw = Draw(7, device)
        for rows, of in ((1, 40), (7, 33), (8, 90), (257, 100), (531, 3)):
            for layout in LAYOUTS:
                matrix = laid_out(draw.values(rows, of, odd=True).to(dtype), layout)
                expected = laid_out(matrix, layout)
                columns = draw.columns(max(1, int(density * of)), of)
                columns = columns.sort().values if ascending else columns
                place = torch.empty(len(columns), rows, dtype=dtype)
                assert kernels.pack(matrix, columns, place) is place
                assert same(place, EAGER.pack(matrix, columns)), (rows, of, layout)
                source = draw.values(len(columns), rows, odd=True).to(dtype)
                kernels.scatter(matrix, columns, source)
                EAGER.scatter(expected, columns, source)
                assert same(memory(matrix), memory(expected)), (rows, of, layout)


def updates(draw: Draw, rule: Rule, dtype: torch.dtype) -> list[ColumnUpdate]:
    """As a step has them: whole parameters, among them their own masters, and tiers of others."""
    made = []
    for number in range(12):
        rows, of = draw.choice.choice([(1, 1), (7, 3), (300, 40), (513, 66)])
        hyper = rule.hyper(random_group(rule.name, random.Random(number % 2)))
        n = draw.choice.randint(1, of)
        if number % 3 == 0:
            flat = draw.values(rows * of, 1)
            own = dtype == torch.float32
            weights = None if own else flat.to(dtype)
            state = ColumnState(flat.view(1, -1) if own else flat.t().contiguous(), rule.moments)
            made.append(ColumnUpdate(state, draw.values(rows * of, 1).to(dtype), weights, hyper))
            continue
        columns = draw.columns(n, of) if number % 3 == 1 else None
        gradient, weights = draw.values(rows, of).to(dtype), draw.values(rows, of).to(dtype)
        if columns is None:
            gradient, weights = gradient[:, :n], weights[:, :n]
        made.append(ColumnUpdate(draw.state(rule, n, rows, odd=False), gradient, weights, hyper, columns))
    return made


def twins(of: list[ColumnUpdate]) -> list[ColumnUpdate]:
    return [
        ColumnUpdate(copied(one.state), one.gradient, None if one.weights is None else one.weights.clone(), one.hyper,
                     one.columns)
        for one in of
    ]  # fmt: skip


def assert_equal(ours: list[ColumnUpdate], theirs: list[ColumnUpdate]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert equal_states(one.state, other.state)
        assert (one.weights is None) == (other.weights is None)
        if one.weights is not None and other.weights is not None:
            assert torch.equal(one.weights, other.weights)


@pytest.mark.usefixtures("threads")
@with_threads(name=NAMES, dtype=[*DTYPES, torch.float64])
def test_the_updates_of_a_step_at_once(kernels: NativeKernels, name: str, dtype: torch.dtype) -> None:
    """float64 is none of ours and goes another way."""
    draw, rule = Draw(NAMES.index(name), CPU), RULES[name]
    ours = updates(draw, rule, dtype)
    theirs = twins(ours)
    for factor, skip in (
        (None, None),
        (torch.tensor(0.3), torch.tensor(False)),
        (torch.tensor(0.7), torch.tensor(True)),
    ):
        kernels.update_many(rule, ours, factor=factor, skip=skip)
        EAGER.update_many(rule, theirs, factor=factor, skip=skip)
        assert_equal(ours, theirs)


@pytest.mark.usefixtures("threads")
@with_threads(name=NAMES, dtype=DTYPES, of_gradients=DTYPES)
def test_updates_with_packed_gradients(
    kernels: NativeKernels, name: str, dtype: torch.dtype, of_gradients: torch.dtype
) -> None:
    """Beside the eager ones; steps differ in gradients, factor and skip, and a weight gets other strides."""
    draw, rule = Draw(NAMES.index(name), CPU), RULES[name]
    weights, ours, theirs, hypers = [], [], [], []
    for number in range(5):
        rows, of = draw.choice.choice([(1, 1), (7, 3), (300, 40), (513, 66)])
        weights.append(draw.values(rows, of).to(dtype))
        hypers.append(rule.hyper(random_group(rule.name, random.Random(number % 2))))
        for columns in draw.columns(of, of).split(draw.choice.randint(1, of)):
            gradient = torch.empty(len(columns), rows, dtype=of_gradients)
            state = draw.state(rule, len(columns), rows, odd=False)
            ours.append(PackedColumns(number, state, gradient, columns))
            theirs.append(PackedColumns(number, copied(state), gradient, columns))
    copies = [weight.clone() for weight in weights]
    native, eager = kernels.packed_updates(rule, ours), EAGER.packed_updates(rule, theirs)
    for factor, skip in ((None, None), (torch.tensor(0.3), torch.tensor(False)), (None, torch.tensor(True))):
        for one in ours:
            one.gradient.copy_(draw.values(*one.gradient.shape))
        native.run(weights, hypers, factor=factor, skip=skip)
        eager.run(copies, hypers, factor=factor, skip=skip)
        assert all(equal_states(one.state, other.state) for one, other in zip(ours, theirs, strict=True))
        assert all(torch.equal(one, other) for one, other in zip(weights, copies, strict=True))
        weights[0] = weights[0].t().contiguous().t()


def test_columns_that_the_matrix_does_not_have(kernels: NativeKernels) -> None:
    rule, hyper = hyper_of("adamw", 1)
    matrix, source = torch.ones(4, 3), torch.zeros(2, 4)
    for wrong in (torch.tensor([0, 3]), torch.tensor([-1, 0])):
        state = ColumnState(torch.ones(2, 4), rule.moments)
        with pytest.raises(IndexError, match="of a matrix with 3"):
            kernels.pack(matrix, wrong)
        with pytest.raises(IndexError, match="of a matrix with 3"):
            kernels.scatter(matrix, wrong, source)
        with pytest.raises(IndexError, match="of a matrix with 3"):
            kernels.update(rule, state, matrix, matrix, hyper, columns=wrong)
        assert matrix.unique().tolist() == [1.0]
        assert state.count.tolist() == [0, 0]


@pytest.mark.usefixtures("threads")
def test_numbers_are_rounded_as_ever_where_torch_flushes_denormals(kernels: NativeKernels) -> None:
    rule, hyper = hyper_of("sgd", 2)
    state = ColumnState(torch.full((1, 50_000), 3e-40), rule.moments)
    expected = copied(state)
    gradient = torch.full((50_000, 1), 1e-40)
    EAGER.update(rule, expected, gradient, None, hyper)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        kernels.update(rule, state, gradient, None, hyper)
        assert torch.tensor(1e-40).mul(1.0).item() == 0.0  # as the caller left it
    finally:
        torch.set_flush_denormal(False)
    assert equal_states(state, expected)


@pytest.mark.usefixtures("threads")
def test_several_threads_update_at_once(kernels: NativeKernels) -> None:
    rule, hyper = hyper_of("adamw", 3)
    draw = Draw(9, CPU)
    gradients = [draw.values(60_000, 1) for _ in range(4)]
    states = [draw.state(rule, 1, 60_000, odd=False) for _ in gradients]
    expected = [copied(state) for state in states]

    def work(state: ColumnState, gradient: torch.Tensor) -> None:
        for _ in range(10):
            kernels.update(rule, state, gradient, None, hyper)

    workers = [threading.Thread(target=work, args=pair) for pair in zip(states, gradients, strict=True)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for state, gradient, other in zip(states, gradients, expected, strict=True):
        for _ in range(10):
            EAGER.update(rule, other, gradient, None, hyper)
        assert equal_states(state, other)
