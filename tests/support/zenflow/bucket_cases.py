"""What every implementation of the kernels over buckets must do: the same as plain loops, and as the eager rules."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.support.tiers import combinations, fast
from tests.support.zenflow.kernel_cases import DTYPES, EAGER, Draw, bits, same
from tests.support.zenflow.rule_cases import NAMES, random_group
from zenflow.kernels import Kernels
from zenflow.kernels.base import DevicePart, DeviceWeight, GuessedColumns
from zenflow.kernels.tables import BucketTables, Send, TablePart, sign_bytes_of
from zenflow.rules import RULES, Hyper, Rule
from zenflow.state import ColumnState

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


class Bucket:
    """Weights of random numbers on the CPU, of whose columns a share is kept."""

    def __init__(
        self, draw: Draw, shapes: Sequence[tuple[int, int]], dtype: torch.dtype, share: float, *, transposed: bool
    ) -> None:
        self.draw, self.shapes, self.dtype, self.transposed = draw, shapes, dtype, transposed
        self.counts = [round(share * columns) for _, columns in shapes]
        self.weights = self.drawn()
        self.parts, self.sent, self.kept, signs = [], 0, 0, 0
        for (rows, columns), n, places in zip(shapes, self.counts, self.places(), strict=True):
            self.parts.append(TablePart(rows, columns, places, self.sent, self.kept, signs))
            signs += (columns - n) * sign_bytes_of(rows)
            self.sent += (columns - n) * rows
            self.kept += n * rows

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
            places[order[:n]] = -1 - self.draw.columns(n, n).int()
            places[order[n:]] = self.draw.columns(columns - n, columns - n).int()
            found.append(places)
        return found

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
)[:: fast(1, all_of=3)]
UPDATES = combinations(
    name=NAMES,
    dtype=DTYPES,
    shapes=("one", "odd", "many", "none", "even"),
    factor=(None, 0.37),
    skip=(None, False, True),
)[:: fast(1, all_of=5)]


class BucketCases:
    """Test cases for subclasses, which provide the fixtures `kernels` and `device`."""

    @pytest.mark.parametrize(("shapes", "dtype", "share", "transposed", "missing"), PACKED, ids=str)
    def test_columns_are_packed_summed_and_shown(
        self, kernels: Kernels, device: torch.device, shapes: str, dtype: torch.dtype, share: float, transposed: bool,
        missing: bool,
    ) -> None:  # fmt: skip
        draw = Draw(len(shapes), CPU)
        bucket = Bucket(draw, SHAPES[shapes], dtype, share, transposed=transposed)
        tables = bucket.tables(device)
        weights = on(device, bucket.weights)
        for _ in range(2):
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

    @pytest.mark.parametrize(("shapes", "dtype", "share", "transposed", "missing"), PACKED[::2], ids=str)
    def test_weights_move_against_the_signs_of_what_was_sent(
        self, kernels: Kernels, device: torch.device, shapes: str, dtype: torch.dtype, share: float, transposed: bool,
        missing: bool,
    ) -> None:  # fmt: skip
        """Three times, with other lengths; the second with a factor below 0, the last one skipped."""
        draw = Draw(len(shapes), CPU)
        bucket = Bucket(draw, SHAPES[shapes], dtype, share, transposed=transposed)
        tables = bucket.tables(device)
        weights, held = on(device, bucket.weights), [one.clone() for one in bucket.weights]
        for step, (factor, skip) in enumerate(((None, None), (-0.3, False), (2.0, True))):
            gradients: list[Tensor | None] = [*bucket.drawn()]
            for which in range(0, len(gradients) if missing else 0, 2):
                gradients[which] = None
            sent, kept = (torch.empty(elements, dtype=dtype, device=device) for elements in (bucket.sent, bucket.kept))
            energies = torch.empty(sum(tables.columns), device=device)
            signs = torch.full((tables.sign_bytes + 1,), 255, dtype=torch.uint8, device=device)
            kernels.pack_bucket(tables, on(device, gradients), sent, kept, energies, signs)
            assert int(signs[-1]) == 255
            lengths = [0.01 * (step + number + 1) for number in range(len(gradients))]
            moved = [
                (number, weight, functools.partial(tables.matrix, tables.parts[number]), length)
                for number, (weight, gradient, length) in enumerate(zip(weights, gradients, lengths, strict=True))
                if weight is not None and gradient is not None
            ]
            numbers, some, views, sizes = zip(*moved, strict=True) if moved else ((), (), (), ())
            guesses = [GuessedColumns(tables, numbers, some, views, signs, sizes)]
            scalars = (None if one is None else torch.tensor(one, device=device) for one in (factor, skip))
            kernels.guess(guesses, **dict(zip(("factor", "skip"), scalars, strict=True)))
            for which, column, is_kept, _ in bucket.each():
                gradient = gradients[which]
                if not is_kept and gradient is not None and not skip:
                    g, own = (bucket.column(one, column) for one in (gradient, held[which]))
                    sign = (g > 0).float() - (g < 0).float()
                    own.copy_((own.float() - sign * lengths[which] * (-1.0 if factor == -0.3 else 1.0)).to(dtype))
            for got, wanted in zip(weights, held, strict=True):
                assert got is not None
                assert same(got.cpu(), wanted)

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

    @pytest.mark.parametrize(("name", "dtype", "shapes", "factor", "skip"), UPDATES, ids=str)
    def test_state_on_the_device_is_updated_as_by_the_eager_rule_on_the_cpu(
        self, kernels: Kernels, device: torch.device, name: str, dtype: torch.dtype, shapes: str,
        factor: float | None, skip: bool | None,
    ) -> None:  # fmt: skip
        """Three steps, of which the second may be skipped; the last has other hyperparameters."""
        rule, draw = RULES[name], Draw(len(shapes), CPU)
        theirs = drawn(draw, rule, SHAPES[shapes][:12], dtype, odd=len(shapes) % 2 == 0)
        settings = [random_group(name, random.Random(seed)) for seed in (1, 2)]
        hypers: list[Hyper] = [rule.hyper(settings[0]), rule.hyper({**settings[1], "weight_decay": 0.0})]
        sides = Side(EAGER, rule, theirs, CPU), Side(kernels, rule, theirs, device)
        for step in range(3):
            if step == 2:
                hypers = [rule.hyper({**settings[0], "lr": 0.3}), hypers[1]]
            gradients = [draw.values(*weight.parameter.shape, odd=step == 1).to(dtype) for weight in theirs]
            for side in sides:
                side.step(gradients, hypers, factor, None if skip is None else skip and step == 1)
            assert_alike(*sides)

    def test_a_count_beyond_those_whose_powers_differ_from_1(self, kernels: Kernels, device: torch.device) -> None:
        """And counts that only one rule's kernel would look up too far for: such a group is PyTorch's."""
        rule, draw = RULES["adamw"], Draw(7, CPU)
        theirs = drawn(draw, rule, [(5, 6), (3, 3)], torch.bfloat16, odd=False)
        for weight in theirs:
            for state, _ in weight.parts:
                state.count.fill_(2_000_000_000)
        sides = Side(EAGER, rule, theirs, CPU), Side(kernels, rule, theirs, device)
        for beta2 in (0.99, 0.9999999):
            setting = {"lr": 0.1, "betas": (0.9, beta2), "eps": 1e-8, "weight_decay": 0.1}
            gradients = [draw.values(*weight.parameter.shape).bfloat16() for weight in theirs]
            for side in sides:
                side.step(gradients, [rule.hyper(setting)] * 2, None, None)
            assert_alike(*sides)


@dataclass
class Drawn:
    """A weight on the CPU with random state on the device."""

    parameter: Tensor
    """As it is stored."""
    parts: list[tuple[ColumnState, Tensor | None]]
    """Each with its columns; None: all of the parameter in one row."""
    group: int
    transposed: bool

    @property
    def is_own_master(self) -> bool:
        return self.parts[0][0].master.data_ptr() == self.parameter.data_ptr()


def drawn(draw: Draw, rule: Rule, shapes: Sequence[tuple[int, int]], dtype: torch.dtype, *, odd: bool) -> list[Drawn]:
    """Of each shape a matrix with two tiers, one that is stored transposed, and one whose state is one row.

    Every other one in fp32 is its own master, and some of those in one row are not in one piece.
    """
    found = []
    for number, (rows, columns) in enumerate(shapes):
        for transposed in (False, True):
            order = draw.columns(columns, columns)
            parts: list[tuple[ColumnState, Tensor | None]] = [
                (draw.state(rule, len(some), rows, odd=odd), some)
                for some in order[: max(1, columns // 2)].tensor_split([columns // 4])
                if len(some)
            ]
            matrix = draw.values(*((columns, rows) if transposed else (rows, columns))).to(dtype)
            found.append(Drawn(matrix, parts, number % 2, transposed))
        whole = draw.state(rule, 1, rows * columns, odd=odd)
        flat = whole.master.view(rows, columns)
        if dtype != torch.float32 or number % 2:
            flat = flat.to(dtype, copy=True)
            flat = flat.t().contiguous().t() if number % 3 == 1 else flat
        found.append(Drawn(flat, [(whole, None)], 1 - number % 2, transposed=False))
    return found


class Side:
    """Copies of weights in one place, and what updates them there."""

    def __init__(
        self, kernels: Kernels, rule: Rule, weights: Sequence[Drawn], place: torch.device,
        of_gradients: torch.dtype | None = None, send: Send | None = None,
    ) -> None:  # fmt: skip
        self.place = place
        self.weights: list[DeviceWeight] = []
        self.parameters: list[Tensor] = []
        self.own: list[bool] = []
        for weight in weights:
            parts = []
            for state, columns in weight.parts:
                streams = [stream.to(place, copy=True) for stream in (state.master, *state.moments)]
                copied = ColumnState.over(streams, state.count.to(place, copy=True))
                packed = (
                    None
                    if columns is None
                    else torch.empty_like(copied.master, dtype=of_gradients or weight.parameter.dtype)
                )
                parts.append(DevicePart(copied, None if columns is None else columns.to(place, copy=True), packed))
            self.own.append(weight.is_own_master)
            shape = weight.parameter.shape
            master = parts[0].state.master
            self.parameters.append(master.view(shape) if self.own[-1] else laid_out_like(weight.parameter, place))
            columns_of = shape[0] if weight.transposed else shape[1]
            matrix = torch.t if weight.transposed else torch.Tensor.detach
            self.weights.append(
                DeviceWeight(parts, weight.group, weight.parameter.dtype, columns_of, matrix, weight.transposed)
            )
        self.updates = kernels.device_updates(rule, self.weights, send or sender(place))

    def step(
        self, gradients: Sequence[Tensor], hypers: Sequence[Hyper], factor: float | None, skip: bool | None
    ) -> None:
        """Update all with gradients on the CPU, as the parameters are stored."""
        whole: list[Tensor | None] = []
        for weight, gradient in zip(self.weights, gradients, strict=True):
            there = gradient.to(self.place, copy=True)
            for part in weight.parts:
                if part.packed is not None and part.columns is not None:
                    part.packed.copy_(weight.view(there).t()[part.columns])
            whole.append(there if weight.parts[0].packed is None else None)
        self.updates.run(
            [None if own else one for one, own in zip(self.parameters, self.own, strict=True)],
            whole,
            hypers,
            factor=None if factor is None else torch.tensor(factor, device=self.place),
            skip=None if skip is None else torch.tensor(skip, device=self.place),
        )


def laid_out_like(tensor: Tensor, place: torch.device) -> Tensor:
    """A copy in the same strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=place).copy_(tensor)


def assert_alike(theirs: Side, ours: Side) -> None:
    for one, other in zip(theirs.weights, ours.weights, strict=True):
        for wanted, part in zip(one.parts, other.parts, strict=True):
            assert torch.equal(part.state.count.cpu(), wanted.state.count)
            streams = [(state.master, *state.moments) for state in (wanted.state, part.state)]
            assert all(same(mine.cpu(), of) for of, mine in zip(*streams, strict=True))
    assert all(same(mine.cpu(), of) for of, mine in zip(theirs.parameters, ours.parameters, strict=True))
