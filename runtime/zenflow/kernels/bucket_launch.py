"""The kernels over buckets in Triton: their tiles, and what each launch is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from zenflow.kernels import bucket_kernels
from zenflow.kernels.base import Kernels, address_of
from zenflow.kernels.launcher import launcher
from zenflow.kernels.tables import COUNT_BLOCK, KEPT_TILES, BucketTables, KeptState, KeptTables, sent_together
from zenflow.rules import Hyper, Rule, SGDHyper
from zenflow.rules.adaptive import AdagradHyper, AdamHyper, AdamWHyper
from zenflow.rules.base import root
from zenflow.rules.momentum import LionHyper

ELEMENTS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# Rows and columns of a tile, by whether an element has 4 bytes and whether weights are transposed. A part of the order
# in which energies are summed. Some do not compile in some releases of Triton.
PACK_TILES = {(False, False): (64, 128), (True, False): (64, 64), (False, True): (256, 32), (True, True): (128, 32)}
SHOW_TILES = {**PACK_TILES, (False, False): (128, 64)}
_CHUNK = 1024
"""Counts by which the table of powers grows."""


class BucketKernels(Kernels):
    """One launch for 8 weights that are packed or shown and one for the sums of 64, two for the update of all."""

    def pack_bucket(
        self,
        tables: BucketTables,
        gradients: Sequence[torch.Tensor | None],
        sent: torch.Tensor,
        kept: torch.Tensor,
        energies: torch.Tensor,
    ) -> None:
        device, (block_r, block_c) = tables.places.device, _tile(PACK_TILES, tables)
        tiles = tables.tiles(block_r, block_c)
        partials = torch.empty(tiles.partials, dtype=torch.float32, device=device)
        addresses = _over_bucket(bucket_kernels.pack_bucket, PACK_TILES, tables, gradients, (sent, kept), (partials,))
        total = launcher(bucket_kernels.sum_partials, BLOCK_R=block_r, BLOCK_C=block_c)
        for at, part in enumerate(tiles.columns):
            present = sum(1 << bit for bit, address in enumerate(addresses[64 * at : 64 * at + 64]) if address)
            present -= present >> 63 << 64  # as an int64
            total(len(part), device, present, part, tiles.records, partials, energies)

    def show_bucket(self, tables: BucketTables, weights: Sequence[torch.Tensor | None], rows: torch.Tensor) -> None:
        _over_bucket(bucket_kernels.show_bucket, SHOW_TILES, tables, weights, (rows,))

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
        numbers = [of_group for of_group in map(rule_numbers, hypers) if of_group is not None]
        if len(numbers) < len(hypers):  # a rule of somebody else's
            super().update_kept(
                rule, tables, weights, gradients, state, hypers,
                longest=longest, factor=factor, skip=skip, present=present,
            )  # fmt: skip
            return
        device, kind = tables.columns.device, numbers[0].kind
        found = _Numbers.of(tables, hypers, numbers, longest)
        addresses = list(map(address_of, weights))
        if tables.addresses is None or tables.addresses[0] != addresses:
            tables.addresses = addresses, sent_together(tables.send, [np.array(addresses, np.int64)])[0]
        there = tables.all_present
        if present is not None and not all(present):
            (there,) = sent_together(tables.send, [np.array(present, np.uint8)])
        counts = state.count, *tables.of_counts
        count = launcher(bucket_kernels.count_kept, RULE=kind, BLOCK=COUNT_BLOCK)
        in_all = tables.count_tiles, tables.records, found.wide, found.powers
        count(len(tables.count_tiles), device, found.last, *in_all, *counts)
        streams = gradients, state.master, *(*state.moments, None)[:2]
        scalars = tables.one if factor is None else factor, tables.never if skip is None else skip
        for transposed, tiles in tables.tiles.items():
            block_n, block_r = KEPT_TILES[transposed]
            reached = [*map(address_of, streams), *(addresses if transposed else ())]
            update = launcher(
                bucket_kernels.update_kept,
                RULE=kind,
                L2=kind in ("adagrad", "sgd") or isinstance(hypers[0], AdamHyper),
                ELEMENT=ELEMENTS[tables.buckets[0].dtype],
                EVEN=tables.even[transposed] and not any(address % 16 for address in reached),
                TRANSPOSED=transposed,
                BLOCK_N=block_n,
                BLOCK_R=block_r,
            )
            of_tier = tiles, tables.records, tables.addresses[1], there, found.narrow, tables.columns
            update(len(tiles), device, *of_tier, *counts, *streams, *scalars, reaches=weights)


def _over_bucket(
    kernel: Any,
    tiles: dict[tuple[bool, bool], tuple[int, int]],
    tables: BucketTables,
    matrices: Sequence[torch.Tensor | None],
    buffers: Sequence[torch.Tensor],
    others: Sequence[torch.Tensor] = (),
) -> list[int]:
    """Launch a kernel for every 8 parts; the addresses of their matrices."""
    block_r, block_c = _tile(tiles, tables)
    fixed = tables.tiles(block_r, block_c)
    addresses = list(map(address_of, matrices))
    even = tables.even and not any(address % 16 for address in (*addresses, *map(address_of, buffers)))
    launch = launcher(
        kernel,
        ELEMENT=ELEMENTS[tables.dtype],
        EVEN=even,
        TRANSPOSED=tables.transposed,
        BLOCK_R=block_r,
        BLOCK_C=block_c,
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


class _Numbers:
    """Groups' hyperparameters on the device, for `count_kept` and `update_kept`; see there.

    Powers are Python's, as those of the eager rules on the CPU. Their table ends where none changes any more, or with
    the largest count so far, rounded up.
    """

    def __init__(self, tables: KeptTables) -> None:
        self._send = tables.send
        self._hypers: tuple[Hyper, ...] = ()
        self._powers: dict[tuple[float, float], list[tuple[float, float]]] = {}
        self._ended = False
        self.last = -1

    @classmethod
    def of(cls, tables: KeptTables, hypers: Sequence[Hyper], numbers: Sequence[RuleNumbers], longest: int) -> _Numbers:
        """Those of the tables, brought up to date: in most steps nothing is to do."""
        found: _Numbers = tables.numbers or cls(tables)
        tables.numbers = found
        if found._hypers != tuple(hypers):
            found._take(tuple(hypers), numbers)
        if longest > found.last and not found._ended:
            found._extend(longest)
        return found

    def _take(self, hypers: tuple[Hyper, ...], numbers: Sequence[RuleNumbers]) -> None:
        betas = [(one.beta1, one.beta2) if isinstance(one, (AdamWHyper, AdamHyper)) else (0.0, 0.0) for one in hypers]
        if set(betas) != set(self._powers):
            self._powers, self.last, self._ended = {pair: [(1.0, 1.0)] for pair in betas}, -1, False
        table = np.zeros((len(hypers), 8))
        for line, hyper, of_group, pair in zip(table, hypers, numbers, betas, strict=True):
            counts = of_group.kind != "sgd" or of_group.scalars[6] != 0
            line[:4] = hyper.lr, getattr(hyper, "lr_decay", 0.0), list(self._powers).index(pair), counts
            line[4:].view(np.float32)[:] = *of_group.scalars, of_group.l2 + 2 * of_group.nesterov + 4 * counts
        (self.wide,) = sent_together(self._send, [table])
        self.narrow = self.wide.view(torch.float32)
        self._hypers = hypers

    def _extend(self, longest: int) -> None:
        high = -(-(longest + 1) // _CHUNK) * _CHUNK
        for (beta1, beta2), powers in self._powers.items():
            powers += [(1 - beta1**count, 1 / root(1 - beta2**count)) for count in range(len(powers), high)]
        self.last, self._ended = high - 1, all(powers[-1] == (1.0, 1.0) for powers in self._powers.values())
        (self.powers,) = sent_together(self._send, [np.array(list(self._powers.values()))])


@dataclass(frozen=True, slots=True)
class RuleNumbers:
    """One update's scalars as `update_columns` takes them; see there."""

    kind: str
    scalars: tuple[float, ...]
    """lr, decay, weight_decay, eps, mix1, mix2, keep."""
    l2: bool = False
    nesterov: bool = False
    per_column: tuple[Any, ...] = ()
    """What depends on a column's update count, for `per_count`."""


def rule_numbers(hyper: Hyper) -> RuleNumbers | None:
    """What the kernel takes for a rule's hyperparameters; None for a rule that it does not know."""
    lr = hyper.lr
    if isinstance(hyper, (AdamWHyper, AdamHyper)):
        beta1, beta2 = hyper.beta1, hyper.beta2
        return RuleNumbers(
            "adam",
            (0.0, hyper.decay, hyper.weight_decay, hyper.eps, 1 - beta1, 1 - beta2, beta2),
            l2=isinstance(hyper, AdamHyper) and hyper.weight_decay != 0,
            per_column=(lambda c: lr / (1 - beta1**c), lambda c: 1 / root(1 - beta2**c)),
        )
    if isinstance(hyper, AdagradHyper):
        lr_decay = hyper.lr_decay
        return RuleNumbers(
            "adagrad",
            (0.0, 1.0, hyper.weight_decay, hyper.eps, 0.0, 0.0, 0.0),
            l2=hyper.weight_decay != 0,
            per_column=(lambda c: lr / (1 + (c - 1) * lr_decay),),
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
