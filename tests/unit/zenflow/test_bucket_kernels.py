"""The kernels over buckets: plain loops beside the eager ones, the native ones and Triton's in its interpreter."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.tiers import combinations, fast
from tests.support.zenflow.kernel_cases import DTYPES, Draw, bits, same
from tests.support.zenflow.rule_cases import NAMES, random_group
from zenflow.host.native import load_native
from zenflow.kernels import Kernels
from zenflow.kernels.base import EagerKernels
from zenflow.kernels.native import NativeKernels
from zenflow.kernels.tables import BucketTables, KeptState, KeptTables, TablePart
from zenflow.rules import RULES, Hyper

if torch.cuda.is_available():  # one process has either the interpreter or the compiler
    pytest.skip("a CUDA device is here: tests/system/gpu compares the compiled kernels", allow_module_level=True)
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("TRITON_INTERPRET", "1")  # read when the kernels are defined, and when the first of them is run
    pytest.importorskip("triton", reason="Triton cannot be imported here")
    from zenflow.kernels.triton_launch import TritonKernels

# The interpreter is numpy, which says where a number leaves its range.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CPU = torch.device("cpu")
ODD = [(1, 1)], [(33, 65), (7, 130), (64, 64)], [(5, 3)] * 19, [(129, 257)], [(0, 3), (4, 2)]
EVEN = [(48, 80), (160, 32)], [(16, 16)] * 9
IMPLEMENTATIONS = "eager", "native", "triton"
EAGER = EagerKernels()


@pytest.fixture
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return {"eager": EagerKernels, "native": lambda: NativeKernels(load_native()), "triton": TritonKernels}[
        request.param
    ]()


class Bucket:
    """Weights of random numbers, of whose columns a share is kept, with tables of their own.

    gap: an empty place before a part's first column on the host, and on the device.
    """

    def __init__(
        self, draw: Draw, shapes: Sequence[tuple[int, int]], dtype: torch.dtype, share: float,
        *, transposed: bool, gap: int = 0,
    ) -> None:  # fmt: skip
        self.draw, self.shapes, self.dtype, self.transposed, self.gap = draw, shapes, dtype, transposed, gap
        self.kept_counts = [round(share * columns) for _, columns in shapes]
        self.weights = [self.stored(draw.values(rows, columns, odd=True).to(dtype)) for rows, columns in shapes]
        parts, sent, kept = [], 0, 0
        for (rows, columns), n, places in zip(shapes, self.kept_counts, self.drawn(), strict=True):
            parts.append(TablePart(rows, columns, places, sent, kept))
            sent += (columns - n + gap) * rows
            kept += (n + gap) * rows
        self.sent, self.kept = sent, kept
        self.tables = BucketTables(parts, dtype, Tensor.clone, transposed=transposed)

    def drawn(self) -> list[Tensor]:
        """Of each weight the places of its columns, in random order."""
        found = []
        for (_, columns), n in zip(self.shapes, self.kept_counts, strict=True):
            places, order = torch.empty(columns, dtype=torch.int32), self.draw.columns(columns, columns)
            places[order[:n]] = -1 - self.gap - self.draw.columns(n, n).int()
            places[order[n:]] = self.gap + self.draw.columns(columns - n, columns - n).int()
            found.append(places)
        return found

    def stored(self, matrix: Tensor) -> Tensor:
        return (matrix.t() if self.transposed else matrix).contiguous()

    def matrix(self, tensor: Tensor) -> Tensor:
        return tensor.t() if self.transposed else tensor

    def places(self) -> list[tuple[int, int, int, int]]:
        """Part, column, whether it is kept (1), and the element at which it begins."""
        found = []
        for which, part in enumerate(self.tables.parts):
            for column, place in enumerate(part.places.tolist()):
                start = (
                    part.sent_start + place * part.rows if place >= 0 else part.kept_start + (-1 - place) * part.rows
                )
                found.append((which, column, int(place < 0), start))
        return found


CASES = combinations(
    shapes=(*ODD, *EVEN),
    dtype=DTYPES,
    share=(0.0, 0.05, 0.5, 1.0),
    transposed=(False, True),
    missing=(False, True),
    gap=(0, 2),
    kernels=IMPLEMENTATIONS,
)


@pytest.mark.parametrize(
    ("shapes", "dtype", "share", "transposed", "missing", "gap", "kernels"), CASES, ids=str, indirect=["kernels"]
)
def test_columns_are_packed_summed_and_shown(
    shapes: list[tuple[int, int]], dtype: torch.dtype, share: float, transposed: bool, missing: bool, gap: int,
    kernels: Kernels,
) -> None:  # fmt: skip
    draw = Draw(len(CASES) + len(shapes) + gap, CPU)
    bucket = Bucket(draw, shapes, dtype, share, transposed=transposed, gap=gap)
    kept = KeptTables([bucket.tables], [0] * len(shapes), Tensor.clone)
    kernels.warm(RULES["lion"], [bucket.tables], [], [])
    for _ in range(2):  # the second time with columns in other places, and buffers that hold something else
        gradients: list[Tensor | None] = [
            bucket.stored(draw.values(rows, columns, odd=bool(which % 2)).to(dtype))
            for which, (rows, columns) in enumerate(shapes)
        ]
        for which in range(0, len(gradients) if missing else 0, 2):
            gradients[which] = None
        buffers = [torch.full((elements,), 7.0, dtype=dtype) for elements in (bucket.sent, bucket.kept)]
        wanted = [buffer.clone() for buffer in buffers]
        for which, column, is_kept, start in bucket.places():
            gradient = gradients[which]
            if gradient is not None:
                wanted[is_kept][start : start + shapes[which][0]] = bucket.matrix(gradient)[:, column]
        energies = torch.full((sum(columns for _, columns in shapes),), 7.0)
        kernels.pack_bucket(bucket.tables, gradients, buffers[0], buffers[1], energies)
        assert all(torch.equal(bits(one), bits(other)) for one, other in zip(buffers, wanted, strict=True))
        for got, gradient in zip(energies.split(bucket.tables.columns), gradients, strict=True):
            if gradient is None:
                assert got.tolist() == [7.0] * len(got)
            elif kernels.name == "triton":
                exact = EAGER.energies(bucket.matrix(gradient))
                torch.testing.assert_close(got, exact, rtol=1e-5, atol=0, equal_nan=True)
            else:
                assert same(got, EAGER.energies(bucket.matrix(gradient)))

        arrived = draw.values(bucket.sent, odd=True).to(dtype)
        shown = [weight.clone() for weight in bucket.weights]
        for which, column, is_kept, start in bucket.places():
            if not is_kept:
                bucket.matrix(shown[which])[:, column] = arrived[start : start + shapes[which][0]]
        kernels.show_bucket(bucket.tables, bucket.weights, arrived)
        assert all(torch.equal(bits(one), bits(other)) for one, other in zip(bucket.weights, shown, strict=True))
        kept = kept.with_places({0: bucket.drawn()})
        bucket.tables = kept.buckets[0]


@pytest.mark.parametrize("kernels", ["triton"], indirect=True)
@pytest.mark.parametrize("transposed", [False, True])
def test_memory_that_is_not_aligned_holds_the_same_bits(kernels: Kernels, transposed: bool) -> None:
    """Views into larger memory, of a bucket whose sizes allow wide accesses."""
    draw = Draw(1, CPU)
    bucket = Bucket(draw, [(160, 48), (48, 96)], torch.bfloat16, 0.2, transposed=transposed)
    assert bucket.tables.even
    arrived = draw.values(bucket.sent).bfloat16()

    def moved(tensor: Tensor, by: int) -> Tensor:
        return torch.empty(tensor.numel() + by, dtype=tensor.dtype)[by:].view(tensor.shape).copy_(tensor)

    found = []
    for by in (0, 1, 8):
        weights, buffer = (
            [moved(weight, by) for weight in bucket.weights],
            moved(torch.empty(bucket.sent), by).bfloat16(),
        )
        energies, kept = torch.full((144,), float("nan")), torch.empty(bucket.kept).bfloat16()
        kernels.pack_bucket(bucket.tables, weights, buffer, kept, energies)
        kernels.show_bucket(bucket.tables, weights, moved(arrived, by))
        found.append((energies, buffer, kept, *weights))
    for other in found[1:]:
        assert all(same(one, again) for one, again in zip(found[0], other, strict=True))


@pytest.mark.parametrize("kernels", ["triton"], indirect=True)
def test_weights_that_are_shared_lazily_stay_so(kernels: Kernels) -> None:
    bucket = Bucket(Draw(2, CPU), [(16, 32)], torch.float32, 0.5, transposed=False)
    (weight,) = bucket.weights
    clone = weight._lazy_clone()
    kernels.show_bucket(bucket.tables, [weight], torch.zeros(bucket.sent))
    assert torch._C._is_cow_tensor(weight)  # type: ignore[attr-defined]
    assert bool((clone == 0).any())


UPDATES = combinations(
    name=NAMES,
    dtype=DTYPES,
    shapes=(ODD[1], ODD[2], ODD[4], EVEN[0]),
    factor=(None, 0.37),
    skip=(None, False, True),
    missing=(False, True),
    gap=(0, 1),
    kernels=IMPLEMENTATIONS[1:],
)[:: fast(1, all_of=3)]


@pytest.mark.parametrize(
    ("name", "dtype", "shapes", "factor", "skip", "missing", "gap", "kernels"), UPDATES, ids=str, indirect=["kernels"]
)
def test_kept_columns_are_updated_as_by_the_eager_rule(
    name: str, dtype: torch.dtype, shapes: list[tuple[int, int]], factor: float | None, skip: bool | None,
    missing: bool, gap: int, kernels: Kernels,
) -> None:  # fmt: skip
    """Three buckets: one is stored transposed, one has vectors. Two groups, of which one has no weight decay."""
    rule, draw = RULES[name], Draw(len(UPDATES) + len(shapes) + gap, CPU)
    vectors = [(rows + 31 * which, 1) for which, (rows, _) in enumerate(shapes[:2])]
    buckets = [
        Bucket(draw, of_bucket, dtype, share, transposed=transposed, gap=gap)
        for of_bucket, share, transposed in ((shapes, 0.3, False), (shapes, 0.6, True), (vectors, 1.0, True))
    ]
    start = 0
    for bucket in buckets:  # one after the other in the flat kept columns
        for part in bucket.tables.parts:
            object.__setattr__(part, "kept_start", part.kept_start + start)
        start += bucket.kept
    parts = [part for bucket in buckets for part in bucket.tables.parts]
    groups = [which % 2 for which in range(len(parts))]
    settings = [random_group(name, random.Random(seed)) for seed in (1, 2)]
    hypers: list[Hyper] = [rule.hyper(settings[0]), rule.hyper({**settings[1], "weight_decay": 0.0})]
    present = [which % 3 != 1 for which in range(len(parts))] if missing else None
    tables = KeptTables([bucket.tables for bucket in buckets], groups, Tensor.clone)
    counted = sum(tables.sizes)
    count = draw.integers(0, 5000, counted).int()
    count[::2] = draw.integers(0, 3, len(count[::2])).int()
    streams = [draw.values(start, odd=bool(gap)) for _ in range(1 + rule.moments)]
    for place, stream in enumerate(streams):
        if place == 2 or (place and name == "adagrad"):
            stream.abs_()
    states = [KeptState(streams[0].clone(), tuple(s.clone() for s in streams[1:]), count.clone()) for _ in range(2)]
    weights = [[weight.clone() for bucket in buckets for weight in bucket.weights] for _ in range(2)]
    number = None if factor is None else torch.tensor(factor)
    kernels.warm(rule, [], [(tables, states[0])], hypers)
    for step in range(3):
        gradients = draw.values(start, odd=bool(gap)).to(dtype)
        skips = None if skip is None else torch.tensor(skip and step == 1)
        for of, state, shown in zip((kernels, EAGER), states, weights, strict=True):
            masked: list[Any] = [None if step == 2 and which == 0 else weight for which, weight in enumerate(shown)]
            of.update_kept(
                rule, tables, masked, gradients, state, hypers,
                longest=5000 + step, factor=number, skip=skips, present=present,
            )  # fmt: skip
        ours, theirs = ([(one.count, one.master, *one.moments) for one in of] for of in map(tables.states, states))
        for part, one, other in zip(tables.parts, ours, theirs, strict=True):
            for a, b in zip(one, other, strict=True):  # what has no column is nobody's
                assert (
                    torch.equal(a[part.runs[1].places], b[part.runs[1].places])
                    if a.dtype == torch.int32
                    else same(a[part.runs[1].places], b[part.runs[1].places])
                )
        assert all(same(a, b) for a, b in zip(*weights, strict=True))
        if step == 0:
            places = {0: buckets[0].drawn(), 2: buckets[2].drawn()}
            tables = tables.with_places(places)
            assert torch.equal(tables.buckets[0].places, torch.cat(places[0]))
