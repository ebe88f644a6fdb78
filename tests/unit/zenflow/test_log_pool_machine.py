"""The pool of the log's memory, used at random: nothing overlaps, nothing is lost, and the counts are right."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from torch import Tensor

from tests.support.zenflow.small import has_room
from tests.unit.zenflow.test_log_pool import host_bytes, lengths, ranges
from zenflow import ZenFlowError
from zenflow.host.log_pool import Extents, LogPool
from zenflow.host.places import padded


class PoolMachine(RuleBasedStateMachine):
    """Takes, gives, promises and resizes at random; every entry keeps what was written into it.

    What the pool is asked to do beside takes is done later, at random too.
    """

    taken = Bundle("taken")

    @initialize(
        capacity=st.integers(0, 6000),
        align=st.sampled_from([8, 64]),
        segment=st.sampled_from([None, 512, 1024]),
        later=st.booleans(),
    )
    def begin(self, capacity: int, align: int, segment: int | None, *, later: bool) -> None:
        self.segments: list[Tensor] = []
        self.align, self.segment = align, segment
        self.capacity = self.most_wanted = capacity
        self.later: list[Callable[[], None]] = []
        beside = self.later.append if later else lambda work: work()
        self.pool = LogPool(capacity, self.allocate, align=align, segment_bytes=segment, beside=beside)
        self.contents: dict[Extents, Tensor] = {}
        self.promised: set[Extents] = set()
        self.older: set[Extents] = set()

    def allocate(self, nbytes: int) -> Tensor:
        assert nbytes % self.align == 0
        assert nbytes <= (self.segment or nbytes)
        self.segments.append(host_bytes(nbytes))
        assert sum(map(len, self.segments)) <= self.most_wanted
        return self.segments[-1]

    @property
    def most(self) -> int:
        return self.capacity // self.align * self.align

    @property
    def unused(self) -> int:
        """Bytes that a take may have: of what is there or may be made for it, and within the capacity."""
        newer = sum(padded(extents.nbytes, self.align) for extents in self.contents if extents not in self.older)
        there = sum(map(len, self.segments)) + max(0, self.most - self.pool.allocated_bytes)
        return min(there - self.pool.taken_bytes, self.most - newer)

    @rule(target=taken, nbytes=st.one_of(st.integers(1, 2000), st.sampled_from([64, 256, 1000])), data=st.data())
    def take(self, nbytes: int, data: st.DataObject) -> Extents | None:
        needed = padded(nbytes, self.align)
        if needed > self.most:
            with pytest.raises(ZenFlowError, match=f"nbytes is {needed} .*{self.most}"):
                self.pool.take(nbytes, timeout_s=0)
            return None
        fits = self.unused >= needed
        if not has_room(self.pool, nbytes):
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
        self.older.discard(extents)
        with pytest.raises(ValueError, match="given back"):
            self.pool.give(extents)

    @rule(extents=taken)
    def promise(self, extents: Extents | None) -> None:
        if extents is not None:
            self.pool.promise(extents)
            self.promised.add(extents)

    @rule(capacity=st.integers(0, 8000))
    def resize(self, capacity: int) -> None:
        if capacity < self.capacity:
            self.older = set(self.contents)
        self.capacity = capacity
        self.most_wanted = max(self.most_wanted, capacity)
        self.pool.resize(capacity)

    @rule(nbytes=st.integers(0, 8000))
    def reserve(self, nbytes: int) -> None:
        self.most_wanted = max(self.most_wanted, padded(nbytes, self.align))
        self.pool.reserve(nbytes)
        assert self.pool.allocated_bytes >= nbytes

    @rule()
    def fill(self) -> None:
        self.pool.fill()
        assert self.pool.allocated_bytes >= self.most

    @rule()
    def do_later(self) -> None:
        if self.later:
            self.later.pop(0)()

    @rule()
    def give_up_spare(self) -> None:
        """Only whole segments go, in which nothing is taken, and nothing that is planned or reserved."""
        spare = self.pool.spare_bytes
        used = [span for extents in self.contents for span in ranges(extents)]
        kept = [
            segment
            for segment in self.segments
            if any(segment.data_ptr() <= low < segment.data_ptr() + len(segment) for low, _ in used)
        ]
        gone = self.pool.give_up_spare()
        assert gone <= spare
        assert self.pool.spare_bytes == spare - gone
        self.segments = [one for one in self.segments if any(one is own for own in self.pool._segments)]
        assert all(any(one is segment for segment in self.segments) for one in kept)
        left = self.pool.spare_bytes
        assert all(len(one) > left for one in self.segments if not any(one is other for other in kept))

    @rule()
    def clear(self) -> None:
        if self.contents or self.later:
            if self.contents:
                with pytest.raises(ValueError, match="in use"):
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
        there = sum(map(len, self.segments))
        assert self.pool.allocated_bytes == there if not self.later else self.pool.allocated_bytes >= there
        assert self.pool.peak_allocated_bytes <= self.most_wanted
        assert self.pool.taken_bytes == sum(padded(extents.nbytes, self.align) for extents in self.contents)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for work in self.later:
            work()
        for extents in self.contents:
            self.pool.give(extents)
        assert self.pool.taken_bytes == 0
        self.pool.resize(self.pool.allocated_bytes)  # no new segments
        whole = [self.pool.take(len(segment), timeout_s=0) for segment in self.segments]
        assert sorted(span for extents in whole for span in ranges(extents)) == sorted(
            (segment.data_ptr(), segment.data_ptr() + len(segment)) for segment in self.segments
        )
        assert all(len(extents.views) == 1 for extents in whole)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
