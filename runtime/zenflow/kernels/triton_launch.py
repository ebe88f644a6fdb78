"""The device kernels in Triton: their tiles, and what each launch is given."""

from __future__ import annotations

import itertools
import math
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from triton.runtime.interpreter import InterpretedFunction

from zenflow.errors import UnsupportedError
from zenflow.kernels import triton_kernels
from zenflow.kernels.base import (
    DeviceUpdates,
    DeviceWeight,
    EagerKernels,
    GuessedColumns,
    Kernels,
    address_of,
    addresses_of,
)
from zenflow.kernels.launcher import launcher
from zenflow.kernels.tables import ALIGNED, BucketTables, Send, TablePart, sent_together, tiles_of
from zenflow.rules import Hyper, Rule, SGDHyper
from zenflow.rules.adaptive import AdagradHyper, AdamHyper, AdamWHyper
from zenflow.rules.base import root
from zenflow.rules.momentum import LionHyper
from zenflow.state import ColumnState

ELEMENTS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# Rows and columns of a tile, by whether an element has 4 bytes and whether weights are transposed. A part of the order
# in which energies are summed. Some do not compile in some releases of Triton.
PACK_TILES = {(False, False): (64, 128), (True, False): (64, 64), (False, True): (256, 32), (True, True): (128, 32)}
SIGN_TILES = {kind: (block_r, block_c // 2) for kind, (block_r, block_c) in PACK_TILES.items()}
"""Where signs are packed too, which takes registers."""
SHOW_TILES = {**PACK_TILES, (False, False): (128, 64)}
KEPT_TILES = {False: (16, 64), True: (4, 256)}
"""Kept columns and rows of a tile, by whether the weight is stored transposed."""
COUNT_BLOCK = 256
"""Kept columns whose counts one program looks up."""
_MOST_COUNTS = 1 << 20
"""Of a table of powers, which ends where they are 1; beta2 = 0.9999 needs 370,000."""
_MOST_ROWS = 1 << 31


class TritonKernels(EagerKernels):
    """One launch for 8 weights that are packed or shown and one for the sums of 64, two or more for the update of all.

    What is about one weight alone is PyTorch's.
    """

    name = "triton"
    by_address = True

    def __init__(self) -> None:
        self._powers: dict[tuple[tuple[float, float], ...], torch.Tensor] = {}
        self._guesses: dict[_Kind, _Guesses] = {}

    def powers(self, betas: tuple[tuple[float, float], ...], send: Send) -> torch.Tensor:
        """On the device [pairs, counts, 2], see `count_kept`: Python's powers, as the eager rules have on the CPU."""
        if betas not in self._powers:
            counts = range(1, 1 + max(map(_counts_until_one, itertools.chain(*betas))))
            of_pairs = [[(1 - beta1**count, 1 / root(1 - beta2**count)) for count in counts] for beta1, beta2 in betas]
            whole = np.array([[(1.0, 1.0), *of_pair] for of_pair in of_pairs])
            self._powers = {betas: send(torch.from_numpy(whole))}
        return self._powers[betas]

    def runs_on(self, device: torch.device) -> bool:
        return device.type != "cpu" or isinstance(triton_kernels.pack_bucket, InterpretedFunction)

    def pack_bucket(
        self,
        tables: BucketTables,
        gradients: Sequence[torch.Tensor | None],
        sent: torch.Tensor,
        kept: torch.Tensor,
        energies: torch.Tensor,
        signs: torch.Tensor | None = None,
    ) -> None:
        shapes = PACK_TILES if signs is None else SIGN_TILES
        device, (block_r, block_c) = tables.places.device, _tile(shapes, tables)
        tiles = tables.tiles(block_r, block_c)
        partials = torch.empty(tiles.partials, dtype=torch.float32, device=device)
        others = partials, partials if signs is None else signs
        of_signs = {"SIGNS": signs is not None}
        addresses = _over_bucket(triton_kernels.pack_bucket, shapes, tables, gradients, (sent, kept), others, of_signs)
        total = launcher(triton_kernels.sum_partials, BLOCK_R=block_r, BLOCK_C=block_c)
        for at, part in enumerate(tiles.columns):
            present = sum(1 << bit for bit, address in enumerate(addresses[64 * at : 64 * at + 64]) if address)
            present -= present >> 63 << 64  # as an int64
            total(len(part), device, present, part, tiles.records, partials, energies)

    def show_bucket(self, tables: BucketTables, weights: Sequence[torch.Tensor | None], rows: torch.Tensor) -> None:
        _over_bucket(triton_kernels.show_bucket, SHOW_TILES, tables, weights, (rows,))

    def guess(
        self, guesses: Sequence[GuessedColumns], *, factor: torch.Tensor | None, skip: torch.Tensor | None
    ) -> None:
        """One launch for all weights that are alike, and a copy of their addresses where these have changed."""
        alike: dict[_Kind, list[NDArray[np.int64]]] = {}
        reaches = [tensor for one in guesses for tensor in (*one.weights, one.signs, one.tables.places)]
        for one in guesses:
            if not all(weight.is_contiguous() for weight in one.weights):
                super().guess([one], factor=factor, skip=skip)
                continue
            transposed, records = one.tables.transposed, _guess_records(one)
            even = ~(records[:, [0, 2] if transposed else [0, 1, 2]] % ALIGNED).any(axis=1)
            for is_even, lines in ((True, records[even]), (False, records[~even])):
                if len(lines):
                    alike.setdefault((one.weights[0].dtype, transposed, is_even), []).append(lines)
        send = guesses[0].tables.send
        for kind, some in alike.items():
            self._guesses.setdefault(kind, _Guesses(kind)).run(np.concatenate(some), send, reaches, factor, skip)

    def device_updates(self, rule: Rule, weights: Sequence[DeviceWeight], send: Send) -> DeviceUpdates:
        large = any(part.state.master.shape[1] >= _MOST_ROWS for weight in weights for part in weight.parts)
        if large or not all(weight.gradients_alike() for weight in weights):
            return super().device_updates(rule, weights, send)
        return TritonUpdates(self, rule, weights, send)


_Kind = tuple[torch.dtype, bool, bool]
"""Of weights: dtype, whether they are stored transposed, whether all accesses can be of 16 bytes."""


class _Guesses:
    """Guesses of weights alike; keeps their tables while nothing in them changes."""

    def __init__(self, kind: _Kind) -> None:
        dtype, transposed, even = kind
        tile = SHOW_TILES[dtype == torch.float32, transposed]
        self._tile = tile if even else narrow_tile(*tile)
        self._launch = launcher(
            triton_kernels.guess_columns,
            ELEMENT=ELEMENTS[dtype],
            EVEN=even,
            TRANSPOSED=transposed,
            BLOCK_R=self._tile[0],
            BLOCK_C=self._tile[1],
        )
        self._sent, self._shapes = np.empty(0, np.int64), np.empty(0, np.int64)

    def run(
        self,
        records: NDArray[np.int64],
        send: Send,
        reaches: Sequence[torch.Tensor],
        factor: torch.Tensor | None,
        skip: torch.Tensor | None,
    ) -> None:
        if not np.array_equal(records[:, :2], self._shapes):
            (block_r, block_c), self._shapes = self._tile, records[:, :2]
            blocks = (-(-records[:, 0] // block_r) * -(-records[:, 1] // block_c)).tolist()
            rest = np.ones(1, np.float32), np.zeros(1, np.bool_)
            self._tiles, self._one, self._never = sent_together(send, [tiles_of(blocks), *rest])
        if not np.array_equal(records, self._sent):
            self._sent, self._records = records, send(torch.from_numpy(records))
        scalars = self._one if factor is None else factor, self._never if skip is None else skip
        self._launch(len(self._tiles), self._records.device, self._tiles, self._records, *scalars, reaches=reaches)


def _guess_records(one: GuessedColumns) -> NDArray[np.int64]:
    """[weights, 8], see `guess_columns`."""
    records = np.zeros((len(one.numbers), 8), np.int64)
    records[:, [0, 1, 3, 4]] = one.tables.guessed[list(one.numbers)]
    records[:, 2] = addresses_of(one.weights)
    records[:, 3] += address_of(one.tables.places)
    records[:, 4] += address_of(one.signs)
    records[:, 5] = np.array(one.lengths, np.float32).view(np.int32)
    return records


def _over_bucket(
    kernel: Any,
    tiles: dict[tuple[bool, bool], tuple[int, int]],
    tables: BucketTables,
    matrices: Sequence[torch.Tensor | None],
    buffers: Sequence[torch.Tensor],
    others: Sequence[torch.Tensor] = (),
    constants: Mapping[str, bool] = MappingProxyType({}),
) -> list[int]:
    """Launch a kernel for every 8 parts; the addresses of their matrices."""
    block_r, block_c = _tile(tiles, tables)
    fixed = tables.tiles(block_r, block_c)
    addresses = addresses_of(matrices)
    even = tables.even and not any(address % 16 for address in (*addresses, *addresses_of(buffers)))
    launch = launcher(
        kernel,
        ELEMENT=ELEMENTS[tables.dtype],
        EVEN=even,
        TRANSPOSED=tables.transposed,
        BLOCK_R=block_r,
        BLOCK_C=block_c,
        **constants,
    )
    padded = [*addresses, *[0] * 7]
    for number, eight in enumerate(fixed.eights):
        some = slice(8 * number, 8 * number + 8)
        in_all = eight, fixed.records, tables.places, *buffers, *others
        launch(len(eight), tables.places.device, *padded[some], *in_all, reaches=matrices[some])
    return addresses


def narrow_tile(block_r: int, block_c: int) -> tuple[int, int]:
    """The tile of a bucket that allows no wide accesses: each of many addresses takes registers."""
    return block_r, block_c // 4


def _tile(tiles: dict[tuple[bool, bool], tuple[int, int]], tables: BucketTables) -> tuple[int, int]:
    tile = tiles[tables.dtype == torch.float32, tables.transposed]
    return tile if tables.even else narrow_tile(*tile)


@dataclass(frozen=True, slots=True, eq=False)
class _Alike:
    """Parts that one launch updates."""

    element: str
    transposed: bool
    even: bool
    """Whether all accesses can be of 16 bytes, as far as is known before a step."""
    parts: list[int]
    tiles: torch.Tensor
    """[programs, 2] int32: the part, and the tile in it."""


class TritonUpdates(DeviceUpdates):
    """One launch for the counts of all columns and one for all weights alike; what changes is sent by one copy."""

    def __init__(self, kernels: TritonKernels, rule: Rule, weights: Sequence[DeviceWeight], send: Send) -> None:
        super().__init__(kernels, rule, weights)
        self._send = send
        self._powers_of = kernels.powers
        self._parts = [part for weight in weights for part in weight.parts]
        self._packed = [[0 if part.packed is None else address_of(part.packed) for part in w.parts] for w in weights]
        self._reaches = [t for part in self._parts for t in (*_streams(part.state), part.state.count, part.packed)]
        self._reaches += [part.columns for part in self._parts]
        self._hypers: Sequence[Hyper] = ()
        self._betas: list[tuple[float, float]] = []
        self._sent = np.empty(0, np.int64)  # addresses and hyperparameters, as the device has them
        self._cut()

    def _cut(self) -> None:
        """Make the tables that do not change."""
        records = np.zeros((len(self._parts), 16), np.int64)
        alike: dict[tuple[str, bool, bool], list[int]] = {}
        weights = [weight for weight in self._weights for _ in weight.parts]
        first = 0
        for number, (record, part, weight) in enumerate(zip(records, self._parts, weights, strict=True)):
            (n, rows), state = part.state.master.shape, [address_of(one) for one in _streams(part.state)]
            record[:3] = rows, weight.columns, n
            record[3 : 3 + len(state)] = state
            record[6:10] = address_of(part.state.count), address_of(part.columns), first, weight.group
            first += n
            transposed = weight.transposed or part.columns is None
            even = not any(value % ALIGNED for value in (rows, *state))
            alike.setdefault((ELEMENTS[weight.dtype], transposed, even), []).append(number)
        sizes = [part.state.master.shape for part in self._parts]
        tiles = []
        for (_, transposed, _), parts in alike.items():
            block_n, block_r = KEPT_TILES[transposed]
            # One even where there are no rows: counts are stored with the first.
            blocks = [-(-n // block_n) * max(1, -(-rows // block_r)) for n, rows in sizes]
            tiles.append(tiles_of([blocks[number] * (number in {*parts}) for number in range(len(sizes))]))
        counts = tiles_of([-(-n // COUNT_BLOCK) for n, _ in sizes])
        rest = np.ones(1, np.float32), np.zeros(1, np.bool_)
        self._records, self._count_tiles, self._one, self._never, *sent = sent_together(
            self._send, [records, counts, *rest, *tiles]
        )
        self._alike = [_Alike(*of, parts, there) for (of, parts), there in zip(alike.items(), sent, strict=True)]
        # Of each column what follows from its count in an update: the new count, rate and inverse root.
        scratch = torch.empty((3, first), dtype=torch.float32, device=self._records.device)
        self._of_counts = scratch[0].view(torch.int32), scratch[1], scratch[2]

    def run(
        self,
        parameters: Sequence[torch.Tensor | None],
        gradients: Sequence[torch.Tensor | None],
        hypers: Sequence[Hyper],
        *,
        factor: torch.Tensor | None = None,
        skip: torch.Tensor | None = None,
    ) -> None:
        if not (self._same_dtypes(gradients) and self._take(hypers)):
            super().run(parameters, gradients, hypers, factor=factor, skip=skip)
            return
        plain = [one if one is None or one.is_contiguous() else None for one in parameters]
        reached: list[int] = []
        of_gradients = addresses_of(gradients)
        for address, whole, packed in zip(addresses_of(plain), of_gradients, self._packed, strict=True):
            for of_part in packed:
                reached += address, of_part or whole
        table, kind, device = self._table, self._kind, self._records.device
        changing = np.concatenate([np.array(reached, np.int64), table.reshape(-1).view(np.int64)])
        if not np.array_equal(changing, self._sent):
            self._sent, self._there = changing, self._send(torch.from_numpy(changing))
        addresses, wide = self._there[: len(reached)], self._there[len(reached) :].view(torch.float64)
        uneven = changing[: len(reached)].reshape(-1, 2) % 16 != 0
        count = launcher(triton_kernels.count_kept, RULE=kind, BLOCK=COUNT_BLOCK)
        in_all = self._count_tiles, self._records, wide, self._powers, *self._of_counts
        count(len(self._count_tiles), device, self._powers.shape[1] - 1, *in_all, reaches=self._reaches)
        reaches = [*parameters, *gradients, *self._reaches]
        scalars = self._one if factor is None else factor, self._never if skip is None else skip
        for one in self._alike:
            block_n, block_r = KEPT_TILES[one.transposed]
            update = launcher(
                triton_kernels.update_kept,
                RULE=kind,
                L2=kind in ("adagrad", "sgd") or isinstance(hypers[0], AdamHyper),
                ELEMENT=one.element,
                EVEN=one.even and not uneven[one.parts, 0 if one.transposed else 1 :].any(),
                TRANSPOSED=one.transposed,
                BLOCK_N=block_n,
                BLOCK_R=block_r,
            )
            narrow = wide.view(torch.float32)
            tables = one.tiles, self._records, addresses, narrow, *self._of_counts
            update(len(one.tiles), device, *tables, *scalars, reaches=reaches)
        for weight, parameter, written in zip(self._weights, parameters, plain, strict=True):
            if parameter is not None and written is None:
                for part in weight.parts:
                    self._write(weight, part, parameter)

    def _take(self, hypers: Sequence[Hyper]) -> bool:
        """Take in hyperparameters; whether the kernels know them."""
        if self._hypers == hypers:
            return True
        numbers = [of_group for of_group in map(rule_numbers, hypers) if of_group is not None]
        if len(numbers) < len(hypers):  # a rule of somebody else's
            return False
        betas = [(one.beta1, one.beta2) if isinstance(one, (AdamWHyper, AdamHyper)) else (0.0, 0.0) for one in hypers]
        if betas != self._betas:
            if max(map(_counts_until_one, itertools.chain(*betas))) > _MOST_COUNTS:
                return False
            self._betas, self._powers = betas, self._powers_of(tuple(dict.fromkeys(betas)), self._send)
        self._table = table = np.zeros((len(hypers), 8))
        for line, hyper, of_group in zip(table, hypers, numbers, strict=True):
            counts = of_group.kind != "sgd" or of_group.scalars[6] != 0
            line[:4] = hyper.lr, getattr(hyper, "lr_decay", 0.0), 0, counts
            line[4:].view(np.float32)[:] = *of_group.scalars, of_group.l2 + 2 * of_group.nesterov + 4 * counts
        table[:, 2] = [list(dict.fromkeys(betas)).index(pair) for pair in betas]
        self._hypers, self._kind = list(hypers), numbers[0].kind
        return True


def _streams(state: ColumnState) -> list[torch.Tensor]:
    return [state.master, *state.moments]


def _counts_until_one(beta: float) -> int:
    """Updates after which 1 - beta^count is 1 in fp64."""
    return math.ceil(-54 * math.log(2) / math.log(beta)) + 1 if beta else 1


@dataclass(frozen=True, slots=True)
class RuleNumbers:
    """One update's scalars as `update_kept` takes them; see there."""

    kind: str
    scalars: tuple[float, ...]
    """lr, decay, weight_decay, eps, mix1, mix2, keep."""
    l2: bool = False
    nesterov: bool = False


def rule_numbers(hyper: Hyper) -> RuleNumbers | None:
    """What the kernel takes for a rule's hyperparameters; None for a rule that it does not know."""
    lr = hyper.lr
    if isinstance(hyper, (AdamWHyper, AdamHyper)):
        beta1, beta2 = hyper.beta1, hyper.beta2
        return RuleNumbers(
            "adam",
            (0.0, hyper.decay, hyper.weight_decay, hyper.eps, 1 - beta1, 1 - beta2, beta2),
            l2=isinstance(hyper, AdamHyper) and hyper.weight_decay != 0,
        )
    if isinstance(hyper, AdagradHyper):
        return RuleNumbers(
            "adagrad",
            (0.0, 1.0, hyper.weight_decay, hyper.eps, 0.0, 0.0, 0.0),
            l2=hyper.weight_decay != 0,
        )
    if isinstance(hyper, LionHyper):
        return RuleNumbers("lion", (lr, hyper.decay, 0.0, 0.0, 1 - hyper.beta1, 1 - hyper.beta2, 0.0))
    if isinstance(hyper, SGDHyper):
        return RuleNumbers(
            "sgd",
            (lr, 1.0, hyper.weight_decay, 0.0, 1 - hyper.dampening, 0.0, hyper.momentum),
            l2=hyper.weight_decay != 0,
            nesterov=hyper.nesterov,
        )
    return None


def require_launch(kernels: Kernels, device: torch.device) -> None:
    """Launch the smallest kernel on a device: that Triton can be imported does not say that it can be used.

    Before its first kernel it builds a C module for Python, with a C compiler and Python's headers.

    Args:
        kernels: whose launch is tried.
        device: where.

    Raises:
        UnsupportedError: the kernel could not be built or launched, or did not do what it should; with the reason.
    """
    try:
        matrix = torch.tensor([[1.0, 2.0]], dtype=torch.float32, device=device)
        places = TablePart(1, 2, torch.tensor([-1, 0], dtype=torch.int32, device="cpu"), 0, 0)
        sent, kept, energies = (torch.zeros(n, dtype=torch.float32, device=device) for n in (1, 1, 2))
        tables = BucketTables([places], matrix.dtype, lambda tensor: tensor.to(device))
        kernels.pack_bucket(tables, [matrix], sent, kept, energies)
        packed = [*sent.tolist(), *kept.tolist(), *energies.tolist()]
    except Exception as error:  # Triton, the compiler, the loader and the driver raise what they like
        raise UnsupportedError(f"{kernels.name} cannot launch a kernel on {device}: {_why(error)}") from error
    if packed != [2.0, 1.0, 1.0, 4.0]:
        raise UnsupportedError(f"{kernels.name}'s first kernel on {device} gave {packed}, not what it should")


def _why(error: Exception) -> str:
    """The reason of a failed launch in one line."""
    if isinstance(error, subprocess.CalledProcessError):  # the compiler itself has told the terminal more
        scheme = sysconfig.get_default_scheme()
        headers = Path(sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme))
        missing = "" if (headers / "Python.h").exists() else f", and Python.h is not in {headers}"
        return f"{Path(error.cmd[0]).name} failed to build a C module for Python{missing}"
    first = (str(error).strip() or type(error).__name__).partition("\n")[0]
    return first.rstrip(".")
