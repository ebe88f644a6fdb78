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
from tests.support.zenflow.bucket_cases import Bucket, Side, assert_alike, drawn
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
from zenflow.kernels import Kernels
from zenflow.kernels.base import DevicePart, DeviceUpdates, DeviceWeight
from zenflow.kernels.native import NativeKernels
from zenflow.rules import RULES, Hyper, Rule
from zenflow.state import ColumnState

CPU = torch.device("cpu")
# Several tiles each way, none of them full; and one long column.
LARGE = [(531, 70), (40_001, 1), (2, 900)]


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
    @with_threads(name=NAMES, dtype=DTYPES)
    def test_large_updates_are_the_eager_ones(
        self, kernels: NativeKernels, device: torch.device, name: str, dtype: torch.dtype
    ) -> None:
        """Steps differ in gradients, factor and skip, and a weight gets other strides."""
        draw, rule = Draw(NAMES.index(name), device), RULES[name]
        weights = drawn(draw, rule, LARGE, dtype, odd=False)
        hypers = [rule.hyper(random_group(name, random.Random(seed))) for seed in (1, 2)]
        sides = Side(EAGER, rule, weights, device), Side(kernels, rule, weights, device)
        for factor, skip in ((None, None), (0.3, False), (0.7, True)):
            gradients = [draw.values(*weight.parameter.shape).to(dtype) for weight in weights]
            for side in sides:
                side.step(gradients, hypers, factor, skip)
                side.parameters[0] = side.parameters[0].t().contiguous().t()
            assert_alike(*sides)

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


@pytest.mark.usefixtures("threads")
@with_threads(name=NAMES, dtype=DTYPES, of_gradients=[torch.float32, torch.bfloat16])
def test_gradients_of_another_dtype(
    kernels: NativeKernels, name: str, dtype: torch.dtype, of_gradients: torch.dtype
) -> None:
    draw, rule = Draw(NAMES.index(name), CPU), RULES[name]
    weights = drawn(draw, rule, [(7, 3), (30, 40)], dtype, odd=False)
    hypers = [rule.hyper(random_group(name, random.Random(seed))) for seed in (1, 2)]
    sides = Side(EAGER, rule, weights, CPU, of_gradients), Side(kernels, rule, weights, CPU, of_gradients)
    gradients = [draw.values(*weight.parameter.shape).to(of_gradients) for weight in weights]
    for side in sides:
        side.step(gradients, hypers, 0.5, None)
    assert_alike(*sides)


def flat_updates(kernels: Kernels, rule: Rule, state: ColumnState) -> DeviceUpdates:
    """Of one row that is its own weight."""
    part = DevicePart(state, None, None)
    weight = DeviceWeight([part], 0, torch.float32, 1, torch.Tensor.detach, transposed=False)
    return kernels.device_updates(rule, [weight], torch.Tensor.clone)


def test_columns_that_the_matrix_does_not_have(kernels: NativeKernels) -> None:
    rule, hyper = hyper_of("adamw", 1)
    matrix, source = torch.ones(4, 3), torch.zeros(2, 4)
    for wrong in (torch.tensor([0, 3]), torch.tensor([-1, 0])):
        state = ColumnState(torch.ones(2, 4), rule.moments)
        with pytest.raises(IndexError, match="of a matrix with 3"):
            kernels.pack(matrix, wrong)
        with pytest.raises(IndexError, match="of a matrix with 3"):
            kernels.scatter(matrix, wrong, source)
        part = DevicePart(state, wrong, torch.ones(2, 4))
        weight = DeviceWeight([part], 0, matrix.dtype, 3, torch.Tensor.detach, transposed=False)
        with pytest.raises(IndexError, match="of a matrix with 3"):
            kernels.device_updates(rule, [weight], torch.Tensor.clone).run([matrix], [None], [hyper])
        assert matrix.unique().tolist() == [1.0]
        assert state.count.tolist() == [0, 0]


@pytest.mark.usefixtures("threads")
def test_numbers_are_rounded_as_ever_where_torch_flushes_denormals(kernels: NativeKernels) -> None:
    rule, hyper = hyper_of("sgd", 2)
    state = ColumnState(torch.full((1, 50_000), 3e-40), rule.moments)
    expected = copied(state)
    gradient = torch.full((50_000, 1), 1e-40)
    flat_updates(EAGER, rule, expected).run([None], [gradient], [hyper])
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        flat_updates(kernels, rule, state).run([None], [gradient], [hyper])
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
        updates = flat_updates(kernels, rule, state)
        for _ in range(10):
            updates.run([None], [gradient], [hyper])

    workers = [threading.Thread(target=work, args=pair) for pair in zip(states, gradients, strict=True)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for state, gradient, other in zip(states, gradients, expected, strict=True):
        for _ in range(10):
            flat_updates(EAGER, rule, other).run([None], [gradient], [hyper])
        assert equal_states(state, other)


def test_buffers_that_are_too_short(kernels: NativeKernels) -> None:
    bucket = Bucket(Draw(1, CPU), [(4, 6), (3, 5)], torch.float32, 0.5, transposed=False)
    tables, columns = bucket.tables(CPU), 11
    for short in range(3):
        sizes = [bucket.sent, bucket.kept, columns]
        sizes[short] -= 1
        with pytest.raises(IndexError, match=r"for (the columns|all energies) of a bucket"):
            kernels.pack_bucket(tables, bucket.weights, *map(torch.empty, sizes))
    with pytest.raises(IndexError, match="too short"):
        kernels.show_bucket(tables, bucket.weights, torch.empty(bucket.sent - 1))
