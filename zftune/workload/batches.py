"""Batches of token sequences: seeded, endless, the same in every run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from zftune.errors import BadInputError


class Batch(NamedTuple):
    """One micro-batch on the CPU; a causal language model shifts the labels by itself."""

    input_ids: Tensor  # [micro_batch, sequence], int64
    labels: Tensor  # [micro_batch, sequence], int64, equal to input_ids


def batches(tokens: Tensor, *, micro_batch: int, sequence: int, seed: int) -> Iterator[Batch]:
    """Endless batches of sequences that start at random places of `tokens`.

    Args:
        tokens: [n], any integer dtype, on the CPU.
        micro_batch: sequences in a batch, >= 1.
        sequence: tokens in a sequence, from 2 to n.
        seed: of the places; equal seeds give equal batches.

    Raises:
        BadInputError: a size is out of its range; raised here, not at the first batch.
    """
    if micro_batch < 1:
        raise BadInputError(f"--micro-batch {micro_batch}: allowed is an integer >= 1")
    if not 2 <= sequence <= tokens.numel():
        raise BadInputError(
            f"--sequence {sequence}: allowed is an integer from 2 to the text's length of {tokens.numel()} tokens"
        )
    return _draw(tokens, micro_batch, sequence, torch.Generator().manual_seed(seed))


def _draw(tokens: Tensor, micro_batch: int, sequence: int, generator: torch.Generator) -> Iterator[Batch]:
    within = torch.arange(sequence)
    while True:
        starts = torch.randint(tokens.numel() - sequence + 1, (micro_batch, 1), generator=generator)
        input_ids = tokens[starts + within].to(torch.int64)
        yield Batch(input_ids, input_ids.clone())
