"""The kernels over buckets in Triton: what each launch needs to know."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from zenflow.kernels import bucket_kernels
from zenflow.kernels.base import Kernels
from zenflow.kernels.launcher import Launcher, address_of, launcher
from zenflow.kernels.rule_numbers import RuleNumbers, rule_numbers
from zenflow.kernels.tables import COUNT_BLOCK, KEPT_TILES, BucketTables, KeptState, KeptTables, Send, sent_together
from zenflow.rules import Hyper, Rule
from zenflow.rules.adaptive import AdamHyper, AdamWHyper
from zenflow.rules.base import root

_ELEMENTS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# Rows and columns of a tile, by whether an element has 4 bytes and whether weights are transposed. A part of the order
# in which energies are summed. Some tiles do not compile in some releases of Triton.
_PACK_TILES = {(False, False): (64, 128), (True, False): (64, 64), (False, True): (256, 32), (True, True): (128, 32)}
_SHOW_TILES = {**_PACK_TILES, (False, False): (128, 64)}
_CHUNK = 1024
"""Counts by which the table of powers grows."""
_AN_ADDRESS = 1 << 40


class BucketKernels(Kernels):
    """One launch for 8 weights that are packed or shown, two for an update of all."""

    def warm(
        self, tables: Sequence[BucketTables], kept: KeptTables | None = None, hypers: Sequence[Hyper] = ()
    ) -> None:
        numbers = _all_numbers(hypers)
        for one in tables:
            pack, total, show = _pack(one, one.even), launcher(bucket_kernels.sum_partials, **_sum_tile(one)), _show(one, one.even)
            fixed = one.tiles(*_tile(_PACK_TILES, one))
            one.tiles(*_tile(_SHOW_TILES, one))
            addresses = [_AN_ADDRESS] * 8
            in_all = fixed.columns, fixed.records, one.places
            pack.prepare(one.device, *addresses, *in_all, one.dtype, one.dtype, torch.float32)
            total.prepare(one.device, -1, fixed.columns, fixed.records, torch.float32, torch.float32)
            show.prepare(one.device, *addresses, *in_all, one.dtype)
        if kept is not None and numbers:
            self._warm_kept(kept, numbers, hypers)

    def _warm_kept(self, kept: KeptTables, numbers: Sequence[RuleNumbers], hypers: Sequence[Hyper]) -> None:
        fixed, single, device = kept.fixed, torch.float32, kept.columns.device
        found = _Numbers.of(kept, hypers, numbers, 1)
        counts = torch.int32, torch.int32, single, single
        _count(numbers[0]).prepare(device, found.last, fixed.counts, fixed.records, found.wide, found.powers, *counts)
        second = single if numbers[0].kind == "adam" else None
        for transposed, tiles in fixed.tiles.items():
            before = tiles, fixed.records, torch.int64, fixed.present, found.narrow, kept.columns, *counts
            _update(kept, hypers[0], numbers[0], transposed, even=kept.even(transposed=transposed)).prepare(
                device, *before, kept.buckets[0].dtype, single, single, second, single, torch.bool
            )

    def pack_bucket(
        self,
        tables: BucketTables,
        gradients: Sequence[torch.Tensor | None],
        sent: torch.Tensor,
        kept: torch.Tensor,
        energies: torch.Tensor,
    ) -> None:
        tile = _tile(_PACK_TILES, tables)
        fixed, device = tables.tiles(*tile), tables.device
        addresses = [address_of(gradient) for gradient in gradients]
        partials = torch.empty(fixed.partials, dtype=torch.float32, device=device)
        buffers = sent, kept
        launch = _pack(tables, tables.even and _aligned(*addresses, *map(address_of, buffers)))
        for tiles, eight, at in _launches(fixed.launches, addresses):
            reaches = [one for one in gradients[at : at + 8] if one is not None]
            launch(len(tiles), device, *eight, tiles, fixed.records, tables.places, *buffers, partials, reaches=reaches)
        total, rest = launcher(bucket_kernels.sum_partials, **_sum_tile(tables)), (fixed.records, partials, energies)
        if all(addresses):
            total(len(fixed.columns), device, -1, fixed.columns, *rest)
            return
        for low in range(0, len(addresses), 64):
            some = addresses[low : low + 64]
            present = sum(1 << bit for bit, address in enumerate(some) if address)
            tiles = fixed.columns[fixed.column_starts[low] : fixed.column_starts[low + len(some)]]
            total(len(tiles), device, present - (present >> 63 << 64), tiles, *rest)

    def show_bucket(self, tables: BucketTables, weights: Sequence[torch.Tensor], rows: torch.Tensor) -> None:
        fixed, device = tables.tiles(*_tile(_SHOW_TILES, tables)), tables.device
        addresses = [address_of(weight) for weight in weights]
        launch = _show(tables, tables.even and _aligned(*addresses, address_of(rows)))
        for tiles, eight, at in _launches(fixed.launches, addresses):
            reaches = weights[at : at + 8]
            launch(len(tiles), device, *eight, tiles, fixed.records, tables.places, rows, reaches=reaches)

    def update_kept(
        self,
        rule: Rule,
        tables: KeptTables,
        weights: Sequence[torch.Tensor | None],
        gradients: torch.Tensor,
        state: KeptState,
        hypers: Sequence[Hyper],
        *,
        longest: int,
        factor: torch.Tensor | None = None,
        skip: torch.Tensor | None = None,
        present: Sequence[bool] | None = None,
    ) -> None:
        numbers = _all_numbers(hypers)
        if not numbers:
            super().update_kept(
                rule, tables, weights, gradients, state, hypers,
                longest=longest, factor=factor, skip=skip, present=present,
            )  # fmt: skip
            return
        fixed, device = tables.fixed, tables.columns.device
        found = _Numbers.of(tables, hypers, numbers, longest)
        addresses = [address_of(weight) for weight in weights]
        if tables.addresses is None or tables.addresses[0] != addresses:
            tables.addresses = addresses, sent_together(tables.send, [np.array(addresses, np.int64)])[0]
        there = fixed.present
        if present is not None and not all(present):
            (there,) = sent_together(tables.send, [np.array(present, np.uint8)])
        updated, rates, roots = fixed.scratch.view(torch.int32)[0], fixed.scratch[1], fixed.scratch[2]
        of_columns = state.count, updated, rates, roots
        _count(numbers[0])(
            len(fixed.counts), device, found.last, fixed.counts, fixed.records, found.wide, found.powers, *of_columns
        )
        first = state.moments[0]
        second = state.moments[1] if len(state.moments) > 1 else None
        aligned = _aligned(*map(address_of, (gradients, state.master, first, second)))
        scalars = fixed.one if factor is None else factor, fixed.never if skip is None else skip
        for transposed, tiles in fixed.tiles.items():
            even = aligned and tables.even(transposed=transposed) and not (transposed and not _aligned(*addresses))
            _update(tables, hypers[0], numbers[0], transposed, even=even)(
                len(tiles), device, tiles, fixed.records, tables.addresses[1], there, found.narrow, tables.columns,
                *of_columns, gradients, state.master, first, second, *scalars,
                reaches=[one for one in weights if one is not None],
            )  # fmt: skip


class _Numbers:
    """Groups' hyperparameters on the device, for `count_kept` and `update_kept`; see there.

    The powers end where none changes any more in fp64, or with the largest count that was asked for, rounded up.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._betas: list[tuple[float, float]] = []
        self._powers: list[list[tuple[float, float]]] = []
        self._hypers: tuple[Hyper, ...] = ()
        self.last = -1
        self._ended = False
        self.powers = self.wide = self.narrow = torch.empty(0)

    @classmethod
    def of(cls, tables: KeptTables, hypers: Sequence[Hyper], numbers: Sequence[RuleNumbers], longest: int) -> _Numbers:
        found = tables.numbers
        if found is None:
            found = tables.numbers = cls(tables.send)
        assert isinstance(found, cls)
        if found._hypers != tuple(hypers):
            found._take(hypers, numbers)
        if longest > found.last and not found._ended:
            found._extend(longest)
        return found

    def _take(self, hypers: Sequence[Hyper], numbers: Sequence[RuleNumbers]) -> None:
        betas = [(one.beta1, one.beta2) if isinstance(one, (AdamWHyper, AdamHyper)) else (0.0, 0.0) for one in hypers]
        if set(betas) != set(self._betas):
            self._betas = list(dict.fromkeys(betas))
            self._powers, self.last, self._ended = [[(1.0, 1.0)] for _ in self._betas], -1, False
        table = np.zeros((len(hypers), 8), np.float64)
        for line, (hyper, of_group, pair) in enumerate(zip(hypers, numbers, betas, strict=True)):
            momentum = of_group.kind != "sgd" or of_group.scalars[6] != 0
            flags = of_group.l2 + 2 * of_group.nesterov + 4 * momentum
            table[line, :4] = hyper.lr, getattr(hyper, "lr_decay", 0.0), self._betas.index(pair), momentum
            table[line, 4:].view(np.float32)[:] = *of_group.scalars, flags
        (self.wide,) = sent_together(self._send, [table])
        self.narrow = self.wide.view(torch.float32)
        self._hypers = tuple(hypers)

    def _extend(self, longest: int) -> None:
        high = -(-(longest + 1) // _CHUNK) * _CHUNK
        for (beta1, beta2), powers in zip(self._betas, self._powers, strict=True):
            for count in range(len(powers), high):
                powers.append((1 - beta1**count, 1 / root(1 - beta2**count)))
        self._ended = all(powers[-1] == (1.0, 1.0) for powers in self._powers)
        self.last = high - 1
        (self.powers,) = sent_together(self._send, [np.array(self._powers)])


def _all_numbers(hypers: Sequence[Hyper]) -> list[RuleNumbers]:
    """Those of all groups; empty where one has none."""
    found = [rule_numbers(hyper) for hyper in hypers]
    return [one for one in found if one is not None] if all(found) else []


def _launches(
    launches: Sequence[torch.Tensor], addresses: Sequence[int]
) -> Iterator[tuple[torch.Tensor, list[int], int]]:
    """Of each launch its tiles, 8 addresses, and the number of its first part."""
    for tiles, at in zip(launches, itertools.count(0, 8), strict=False):
        some = list(addresses[at : at + 8])
        yield tiles, some + [0] * (8 - len(some)), at


def _tile(tiles: dict[tuple[bool, bool], tuple[int, int]], tables: BucketTables) -> tuple[int, int]:
    return tiles[tables.dtype == torch.float32, tables.transposed]


def _aligned(*addresses: int) -> bool:
    return not any(address % 16 for address in addresses)


def _bucket(kernel: Any, tiles: dict[tuple[bool, bool], tuple[int, int]], tables: BucketTables, even: bool) -> Launcher:
    block_r, block_c = _tile(tiles, tables)
    element = _ELEMENTS[tables.dtype]
    return launcher(
        kernel, ELEMENT=element, EVEN=even, TRANSPOSED=tables.transposed, BLOCK_R=block_r, BLOCK_C=block_c
    )


def _pack(tables: BucketTables, even: bool) -> Launcher:
    return _bucket(bucket_kernels.pack_bucket, _PACK_TILES, tables, even)


def _show(tables: BucketTables, even: bool) -> Launcher:
    return _bucket(bucket_kernels.show_bucket, _SHOW_TILES, tables, even)


def _sum_tile(tables: BucketTables) -> dict[str, int]:
    block_r, block_c = _tile(_PACK_TILES, tables)
    return {"BLOCK_R": block_r, "BLOCK_C": block_c}


def _count(numbers: RuleNumbers) -> Launcher:
    return launcher(bucket_kernels.count_kept, RULE=numbers.kind, BLOCK=COUNT_BLOCK)


def _update(tables: KeptTables, hyper: Hyper, numbers: RuleNumbers, transposed: bool, *, even: bool) -> Launcher:
    block_n, block_r = KEPT_TILES[transposed]
    return launcher(
        bucket_kernels.update_kept,
        RULE=numbers.kind,
        L2=numbers.kind in ("adagrad", "sgd") or isinstance(hyper, AdamHyper),
        ELEMENT=_ELEMENTS[tables.buckets[0].dtype],
        EVEN=even,
        TRANSPOSED=transposed,
        BLOCK_N=block_n,
        BLOCK_R=block_r,
    )
