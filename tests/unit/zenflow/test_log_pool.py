"""The pool of the log's memory: whoever waits for room gets it, however fragmented the pool is."""

from __future__ import annotations

import queue
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from zenflow.host.log_pool import Extents, LogPool
from zenflow.host.places import ALIGN_BYTES

SOON_S = 30.0  # a hang, on however busy a machine
KB = 1024


def host_bytes(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


@pytest.mark.parametrize("seed", range(3))
def test_every_take_succeeds_in_the_end(seed: int) -> None:
    """Two threads give back in random order what one takes, now and then all of the capacity."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    pool = LogPool(32 * KB, host_bytes)
    given: queue.SimpleQueue[Extents | None] = queue.SimpleQueue()

    def giver(number: int) -> int:
        mine, held, count = random.Random(seed * 2 + number), list[Extents](), 0
        while (extents := given.get()) is not None or held:
            if extents is not None:
                held.append(extents)
            while held and (extents is None or given.empty() or mine.random() < 0.4):
                back = held.pop(mine.randrange(len(held)))
                (mark,) = {int(view[0]) for view in back.views} | {int(view[-1]) for view in back.views}
                assert mark == back.nbytes % 251
                pool.give(back)
                count += 1
            if extents is None:
                break
        return count

    with ThreadPoolExecutor(2) as threads:
        givers = [threads.submit(giver, number) for number in range(2)]
        try:
            for number in range(1500):
                nbytes = pool.capacity_bytes if number % 100 == 99 else chance.randrange(1, 6 * KB)
                extents = pool.take(nbytes, timeout_s=SOON_S)
                for view in extents.views:
                    view.fill_(nbytes % 251)
                if chance.random() < 0.5:
                    pool.promise(extents)
                given.put(extents)
        finally:
            given.put(None)
            given.put(None)
        assert sum(one.result(SOON_S) for one in givers) == 1500
    assert pool.taken_bytes == 0
    assert pool.peak_allocated_bytes <= pool.capacity_bytes
    assert len(pool.take(pool.capacity_bytes).views) <= 32 * KB // ALIGN_BYTES
