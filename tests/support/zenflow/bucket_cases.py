"""What every implementation of the kernels over buckets must do: the same as plain loops, and as the eager rules."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.tiers import combinations, fast
from tests.support.zenflow.kernel_cases import DTYPES, EAGER, Draw, bits, same
from tests.support.zenflow.rule_cases import NAMES, random_group
from zenflow.kernels import Kernels
from zenflow.kernels.tables import BucketTables, KeptState, KeptTables, Send, TablePart
from zenflow.rules import RULES, Hyper

CPU = torch.device("cpu")
# Rows and columns; more weights than one launch takes, and for a GPU more than one sum takes; rows of no rank.
SHAPES: dict[str, list[tuple[int, int]]] = {
    "one": [(1, 1)],
    "odd": [(33, 65), (7, 130)],
    "many": [(5, 3)] * fast(9, all_of=70),
    "tiles": [(129, 140)],
    "none": [(0, 3), (4, 2)],
    "even": [(48, 80), (160, 32)],
}


def sender(device: torch.device) -> Send:
    return functools.partial(torch.Tensor.to, device=device, copy=True)


def on(device: torch.device, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Copies on a device."""
    return [None if tensor is None else tensor.to(device, copy=True) for tensor in tensors]


def same_or_none(some: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(one is None or (other is not None and same(one.cpu(), other)) for one, other in pairs)


class Bucket:
    """Weights of random numbers on the CPU, of whose columns a share is kept.

    gap: empty places before a part's first column on the host, and on the device. start: of the kept columns.
    """

    def __init__(
        self, draw: Draw, shapes: Sequence[tuple[int, int]], dtype: torch.dtype, share: float,
        *, transposed: bool, gap: int = 0, start: int = 0,
    ) -> None:  # fmt: skip
        self.draw, self.shapes, self.dtype, self.transposed, self.gap = draw, shapes, dtype, transposed, gap
        self.counts = [round(share * columns) for _, columns in shapes]
        self.weights = self.drawn()
        self.parts, self.sent, self.kept = [], 0, start
        for (rows, columns), n, places in zip(shapes, self.counts, self.places(), strict=True):
            self.parts.append(TablePart(rows, columns, places, self.sent, self.kept))
            self.sent += (columns - n + gap) * rows
            self.kept += (n + gap) * rows

    def tables(self, device: torch.device) -> BucketTables:
        return BucketTables(self.parts, self.dtype, sender(device), transposed=self.transposed)

    def drawn(self) -> list[Tensor]:
        """A matrix for each weight, as it is stored; some numbers are odd."""
        found = [self.draw.values(*shape, odd=True).to(self.dtype) for shape in self.shapes]
        return [(one.t() if self.transposed else one).contiguous() for one in found]

    def column(self, stored: Tensor, column: int) -> Tensor:
        return stored[column] if self.transposed else stored[:, column]

    def places(self) -> list[Tensor]:
        """Of each weight the places of its columns, in random order."""
        found = []
        for (_, columns), n in zip(self.shapes, self.counts, strict=True):
            places, order = torch.empty(columns, dtype=torch.int32), self.draw.columns(columns, columns)
            places[order[:n]] = -1 - self.gap - self.draw.columns(n, n).int()
            places[order[n:]] = self.gap + self.draw.columns(columns - n, columns - n).int()
            found.append(places)
        return found

    def moved(self) -> list[Tensor]:
        """Other places, which this has from now on."""
        places = self.places()
        self.parts = [replace(part, places=one) for part, one in zip(self.parts, places, strict=True)]
        return places

    def each(self) -> list[tuple[int, int, int, int]]:
        """Part, column, whether it is kept (1), and the element at which it begins."""
        return [
            (
                which,
                column,
                int(place < 0),
                max(place, -1 - place) * part.rows + (part.sent_start, part.kept_start)[place < 0],
            )
            for which, part in enumerate(self.parts)
            for column, place in enumerate(part.places.tolist())
        ]


PACKED = combinations(
    shapes=SHAPES,
    dtype=DTYPES,
    share=(0.0, 0.05, 0.5, 1.0),
    transposed=(False, True),
    missing=(False, True),
    gap=(0, 2),
)[:: fast(1, all_of=5)]
UPDATES = combinations(
    name=NAMES,
    dtype=DTYPES,
    shapes=("odd", "many", "none", "even"),
    factor=(None, 0.37),
    skip=(None, False, True),
    missing=(False, True),
    gap=(0, 1),
)[:: fast(2, all_of=11)]


class BucketCases:
    """Test cases for subclasses, which provide the fixtures `kernels` and `device`."""

    @pytest.mark.parametrize(("shapes", "dtype", "share", "transposed", "missing", "gap"), PACKED, ids=str)
    def test_columns_are_packed_summed_and_shown(
        self, kernels: Kernels, device: torch.device, shapes: str, dtype: torch.dtype, share: float, transposed: bool,
        missing: bool, gap: int,
    ) -> None:  # fmt: skip
        draw = Draw(len(shapes) + gap, CPU)
        bucket = Bucket(draw, SHAPES[shapes], dtype, share, transposed=transposed, gap=gap)
        tables = bucket.tables(device)
        kept = KeptTables([tables], [0] * len(tables.parts), tables.send)
        kernels.warm(RULES["lion"], [tables], [], [])
        weights = on(device, bucket.weights)
        for _ in range(2):  # the second time with columns in other places
            gradients: list[Tensor | None] = [*bucket.drawn()]
            for which in range(0, len(gradients) if missing else 0, 2):
                gradients[which] = None
            buffers = [torch.full((elements,), 7.0, dtype=dtype) for elements in (bucket.sent, bucket.kept)]
            ours = [buffer.to(device, copy=True) for buffer in buffers]
            for which, column, is_kept, start in bucket.each():
                gradient = gradients[which]
                if gradient is not None:
                    rows = tables.parts[which].rows
                    buffers[is_kept][start : start + rows] = bucket.column(gradient, column)
            energies = torch.full((sum(tables.columns),), 7.0, device=device)
            kernels.pack_bucket(tables, on(device, gradients), ours[0], ours[1], energies)
            assert all(torch.equal(bits(one.cpu()), bits(other)) for one, other in zip(ours, buffers, strict=True))
            for got, gradient, part in zip(energies.cpu().split(tables.columns), gradients, tables.parts, strict=True):
                wanted = None if gradient is None else EAGER.energies(tables.matrix(part, gradient))
                if wanted is None:
                    assert got.tolist() == [7.0] * len(got)
                elif kernels.name == "triton" or device.type != "cpu":
                    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=0, equal_nan=True)
                else:
                    assert same(got, wanted)
            arrived = draw.values(bucket.sent, odd=True).to(dtype)
            for which, column, is_kept, start in bucket.each():
                if not is_kept and gradients[which] is not None:
                    rows = tables.parts[which].rows
                    bucket.column(bucket.weights[which], column).copy_(arrived[start : start + rows])
            shown = [None if gradient is None else one for gradient, one in zip(gradients, weights, strict=True)]
            kernels.show_bucket(tables, shown, arrived.to(device))
            pairs = zip(weights, bucket.weights, strict=True)
            assert all(one is not None and torch.equal(bits(one.cpu()), bits(other)) for one, other in pairs)
            kept = kept.with_places({0: bucket.moved()})
            (tables,) = kept.buckets

    @pytest.mark.parametrize("transposed", [False, True])
    def test_memory_that_is_not_aligned_holds_the_same_bits(
        self, kernels: Kernels, device: torch.device, transposed: bool
    ) -> None:
        """Views into larger memory, of a bucket whose sizes allow wide accesses."""
        bucket = Bucket(Draw(1, CPU), SHAPES["even"], torch.bfloat16, 0.2, transposed=transposed)
        tables, arrived = bucket.tables(device), bucket.draw.values(bucket.sent).bfloat16()
        assert tables.even

        def shifted(tensor: Tensor, by: int) -> Tensor:
            memory = torch.empty(tensor.numel() + by, dtype=tensor.dtype, device=device)
            return memory[by:].view(tensor.shape).copy_(tensor)

        found = []
        for by in (0, 1, 8):
            weights = [shifted(weight, by) for weight in bucket.weights]
            buffer, kept = (
                shifted(torch.zeros(bucket.sent).bfloat16(), by),
                shifted(torch.zeros(bucket.kept).bfloat16(), 0),
            )
            energies = torch.full((sum(tables.columns),), float("nan"), device=device)
            kernels.pack_bucket(tables, weights, buffer, kept, energies)
            kernels.show_bucket(tables, weights, shifted(arrived, by))
            found.append([one.cpu() for one in (buffer, kept, *weights)])
        for other in found[1:]:
            assert all(same(one, again) for one, again in zip(found[0], other, strict=True))

    def test_sums_are_the_same_each_time(self, kernels: Kernels, device: torch.device) -> None:
        bucket = Bucket(Draw(3, CPU), [(300, 48), (40, 16)], torch.float32, 0.2, transposed=False)
        bucket.weights = [one.nan_to_num(0, 1, 1) for one in bucket.weights]
        tables, found = bucket.tables(device), []
        for fill in (0.0, float("nan")):  # of memory that nothing should read
            buffers = [torch.full((size,), fill, device=device) for size in (bucket.sent, bucket.kept, 64)]
            kernels.pack_bucket(tables, on(device, bucket.weights), *buffers)
            found.append(buffers[2].cpu())
        assert torch.equal(*found)

    @pytest.mark.parametrize("missing", [(), (31, 32), (63,), (5, 64, 69)], ids=str)
    def test_many_weights_of_which_some_have_no_gradient(
        self, kernels: Kernels, device: torch.device, missing: tuple[int, ...]
    ) -> None:
        """More than one launch sums."""
        bucket = Bucket(Draw(4, CPU), [(2, 1)] * 70, torch.float32, 0.0, transposed=True)
        gradients = [None if which in missing else torch.ones(1, 2) for which in range(70)]
        sent, energies = torch.zeros(140, device=device), torch.zeros(70, device=device)
        tables = bucket.tables(device)
        kernels.pack_bucket(tables, on(device, gradients), sent, sent[:0], energies)
        assert sent.tolist() == [float(which // 2 not in missing) for which in range(140)]
        assert energies.tolist() == [2.0 * (which not in missing) for which in range(70)]

    @pytest.mark.parametrize(("name", "dtype", "shapes", "factor", "skip", "missing", "gap"), UPDATES, ids=str)
    def test_kept_columns_are_updated_as_by_the_eager_rule_on_the_cpu(
        self, kernels: Kernels, device: torch.device, name: str, dtype: torch.dtype, shapes: str,
        factor: float | None, skip: bool | None, missing: bool, gap: int,
    ) -> None:  # fmt: skip
        """Three buckets: one is stored transposed, one has vectors. Two groups, of which one has no weight decay."""
        rule, draw = RULES[name], Draw(len(shapes) + gap, CPU)
        vectors = [(rows + 31 * which, 1) for which, (rows, _) in enumerate(SHAPES[shapes][:2])]
        buckets, size = [], 0
        for of_bucket, share, transposed in (
            (SHAPES[shapes], 0.3, False),
            (SHAPES[shapes], 0.6, True),
            (vectors, 1, True),
        ):
            buckets.append(Bucket(draw, of_bucket, dtype, share, transposed=transposed, gap=gap, start=size))
            size = buckets[-1].kept
        parts = sum(len(bucket.parts) for bucket in buckets)
        settings = [random_group(name, random.Random(seed)) for seed in (1, 2)]
        hypers: list[Hyper] = [rule.hyper(settings[0]), rule.hyper({**settings[1], "weight_decay": 0.0})]
        present = [which % 3 != 1 for which in range(parts)] if missing else None
        places = [CPU, device]
        tables = [
            KeptTables(
                [one.tables(place) for one in buckets],
                [at % 2 for at in range(parts)],
                sender(place),
            )
            for place in places
        ]
        count = draw.integers(0, 5000, sum(tables[0].sizes)).int()
        count[::2] = draw.integers(0, 3, len(count[::2])).int()
        streams = [draw.values(size, odd=bool(gap)) for _ in range(1 + rule.moments)]
        for stream in streams[2:] if name != "adagrad" else streams[1:]:
            stream.abs_()
        copies: list[Any] = [on(place, [count, *streams]) for place in places]
        states = [KeptState(master, tuple(moments), counts) for counts, master, *moments in copies]
        weights = [on(place, [weight for bucket in buckets for weight in bucket.weights]) for place in places]
        kernels.warm(rule, [], [(tables[1], states[1])], hypers)
        for step in range(3):
            gradients = draw.values(size, odd=bool(gap)).to(dtype)
            for of, place, table, state, shown in zip((EAGER, kernels), places, tables, states, weights, strict=True):
                of.update_kept(
                    rule, table, [None, *shown[1:]] if step == 2 else shown, gradients.to(place), state, hypers,
                    longest=5000 + step,
                    factor=None if factor is None else torch.tensor(factor, device=place),
                    skip=None if skip is None else torch.tensor(skip and step == 1, device=place),
                    present=present,
                )  # fmt: skip
            for part, *of_part in zip(tables[0].parts, *map(KeptTables.states, tables, states), strict=True):
                used = part.runs[1].places  # what has no column is nobody's
                assert torch.equal(of_part[1].count.cpu()[used], of_part[0].count[used])
                pairs = [(one.master, *one.moments) for one in of_part]
                assert all(same(ours.cpu()[used], theirs[used]) for theirs, ours in zip(*pairs, strict=True))
            assert same_or_none(weights[1], [one for one in weights[0] if one is not None])
            if step == 0:
                moved = {number: buckets[number].moved() for number in (2, 0)}
                tables = [table.with_places(moved) for table in tables]
                hypers = [rule.hyper({**settings[0], "lr": 0.3}), hypers[1]]
                assert torch.equal(tables[1].buckets[0].places.cpu(), torch.cat(moved[0]))
