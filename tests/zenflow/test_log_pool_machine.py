"""The pool of the log's memory, used at random: nothing overlaps, nothing is lost, and the counts are right."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from torch import Tensor

from tests.zenflow.test_log_pool import host_bytes, lengths, ranges
from zenflow import ZenFlowError
from zenflow.host.log_pool import Extents, LogPool
from zenflow.host.places import padded


class PoolMachine(RuleBasedStateMachine):
    """Takes, gives, promises and resizes at random; every entry keeps what was written into it."""

    taken = Bundle("taken")

    @initialize(capacity=st.integers(0, 6000), align=st.sampled_from([8, 64]))
    def begin(self, capacity: int, align: int) -> None:
        self.segments: list[Tensor] = []
        self.align = align
        self.capacity = capacity
        self.most_allocated = 0
        self.reserved = 0
        self.pool = LogPool(capacity, self.allocate, align=align)
        self.contents: dict[Extents, Tensor] = {}
        self.promised: set[Extents] = set()

    def allocate(self, nbytes: int) -> Tensor:
        assert nbytes % self.align == 0
        self.segments.append(host_bytes(nbytes))
        self.most_allocated = max(self.most_allocated, sum(map(len, self.segments)))
        assert sum(map(len, self.segments)) <= max(self.capacity, self.reserved)
        return self.segments[-1]

    @property
    def most(self) -> int:
        return max(self.capacity // self.align * self.align, sum(map(len, self.segments)))

    @rule(target=taken, nbytes=st.one_of(st.integers(1, 2000), st.sampled_from([64, 256, 1000])), data=st.data())
    def take(self, nbytes: int, data: st.DataObject) -> Extents | None:
        needed = padded(nbytes, self.align)
        if needed > self.most:
            with pytest.raises(ZenFlowError, match=f"nbytes is {needed} .*{self.most}"):
                self.pool.take(nbytes, timeout_s=0)
            return None
        fits = self.most - self.pool.taken_bytes >= needed
        if not self.pool.ready(nbytes):
            assert not fits or self.promised
            with pytest.raises(TimeoutError, match=f"{needed} bytes"):
                self.pool.take(nbytes, timeout_s=0)
            return None
        assert fits
        extents = self.pool.take(nbytes, timeout_s=0)
        seed = data.draw(st.integers(0, 255))
        content = torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        for view, part in zip(extents.views, content.split(lengths(extents)), strict=True):
            view.copy_(part)
        self.contents[extents] = content
        return extents

    @rule(extents=consumes(taken))
    def give(self, extents: Extents | None) -> None:
        if extents is None:
            return
        self.pool.give(extents)
        del self.contents[extents]
        self.promised.discard(extents)
        self.trim()
        with pytest.raises(ValueError, match="given back"):
            self.pool.give(extents)

    def trim(self) -> None:
        """What is more than the capacity goes when all is free."""
        if not self.contents and sum(map(len, self.segments)) > max(self.capacity, self.reserved):
            self.segments.clear()

    @rule(extents=taken)
    def promise(self, extents: Extents | None) -> None:
        if extents is not None:
            self.pool.promise(extents)
            self.promised.add(extents)

    @rule(capacity=st.integers(0, 8000))
    def resize(self, capacity: int) -> None:
        self.capacity, self.reserved = capacity, 0
        self.pool.resize(capacity)
        self.trim()

    @rule(nbytes=st.integers(0, 8000))
    def reserve(self, nbytes: int) -> None:
        self.reserved = padded(nbytes, self.align)
        self.trim()
        self.pool.reserve(nbytes)
        assert self.pool.allocated_bytes >= nbytes

    @rule()
    def clear(self) -> None:
        if self.contents:
            with pytest.raises(ValueError, match="taken"):
                self.pool.clear()
        else:
            self.pool.clear()
            self.segments.clear()

    @invariant()
    def nothing_overlaps_or_is_lost(self) -> None:
        for extents, content in self.contents.items():
            assert torch.equal(torch.cat(extents.views), content)
            assert all(length % self.align == 0 for length in lengths(extents)[:-1])
            assert all(view.storage_offset() % self.align == 0 and view.numel() > 0 for view in extents.views)
        spans = sorted(span for extents in self.contents for span in ranges(extents))
        assert all(high <= low for (_, high), (low, _) in pairwise(spans))

    @invariant()
    def counts_agree(self) -> None:
        assert self.pool.capacity_bytes == self.capacity
        assert self.pool.allocated_bytes == sum(map(len, self.segments))
        assert self.pool.peak_allocated_bytes == self.most_allocated
        assert self.pool.taken_bytes == sum(padded(extents.nbytes, self.align) for extents in self.contents)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.resize(self.pool.allocated_bytes)  # no new segments, and none goes
        for extents in self.contents:
            self.pool.give(extents)
        assert self.pool.taken_bytes == 0
        whole = [self.pool.take(len(segment), timeout_s=0) for segment in self.segments]
        assert sorted(span for extents in whole for span in ranges(extents)) == sorted(
            (segment.data_ptr(), segment.data_ptr() + len(segment)) for segment in self.segments
        )
        assert all(len(extents.views) == 1 for extents in whole)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
