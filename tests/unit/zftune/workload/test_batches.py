from __future__ import annotations

from itertools import islice

import pytest
import torch

from zftune.errors import BadInputError
from zftune.workload.text import batches

TOKENS = torch.arange(200, dtype=torch.uint8)


def test_shapes_and_values_are_pieces_of_the_text() -> None:
    for batch in islice(batches(TOKENS, micro_batch=3, sequence=16, seed=0), 20):
        assert batch.input_ids.shape == (3, 16)
        assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
        assert torch.equal(batch.input_ids.diff(dim=1), torch.ones(3, 15, dtype=torch.int64))
        assert torch.equal(batch.input_ids, batch.labels)
        assert batch.input_ids.data_ptr() != batch.labels.data_ptr()


def test_equal_seeds_give_equal_batches_whatever_the_global_generator_does() -> None:
    first = [batch.input_ids for batch in islice(batches(TOKENS, micro_batch=2, sequence=8, seed=5), 6)]
    torch.rand(3)
    again = [batch.input_ids for batch in islice(batches(TOKENS, micro_batch=2, sequence=8, seed=5), 6)]
    other = [batch.input_ids for batch in islice(batches(TOKENS, micro_batch=2, sequence=8, seed=6), 6)]
    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, other))


def test_a_text_of_one_sequence_is_enough() -> None:
    batch = next(batches(TOKENS, micro_batch=1, sequence=200, seed=0))
    assert torch.equal(batch.input_ids[0], TOKENS.long())


@pytest.mark.parametrize(
    ("micro_batch", "sequence", "field"),
    [(0, 8, "--micro-batch is 0"), (1, 1, "--sequence is 1"), (1, 201, "--sequence is 201")],
)
def test_bad_sizes_are_refused_at_once(micro_batch: int, sequence: int, field: str) -> None:
    with pytest.raises(BadInputError, match=f"^{field}; it must be"):
        batches(TOKENS, micro_batch=micro_batch, sequence=sequence, seed=0)
