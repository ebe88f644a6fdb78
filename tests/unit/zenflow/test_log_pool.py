"""The pool of the log's memory: nothing overlaps, nothing is lost, the plan is kept, and whoever waits is woken."""

from __future__ import annotations

import queue
import random
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from tests.support.zenflow.small import has_room
from zenflow import ZenFlowError
from zenflow.host.log_pool import Extents, LogPool
from zenflow.host.places import ALIGN_BYTES

SOON_S = 30.0  # a hang, on however busy a machine
A_WHILE_S = 0.05  # long enough that a thread which should not wait is through
KB = 1024


def host_bytes(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def lengths(extents: Extents) -> list[int]:
    return [view.numel() for view in extents.views]


def ranges(extents: Extents) -> list[tuple[int, int]]:
    return [(view.data_ptr(), view.data_ptr() + view.numel()) for view in extents.views]


# --- where an entry goes ---------------------------------------------------------------------------------------------


def test_more_than_the_capacity_is_refused_at_once() -> None:
    pool = LogPool(1000, host_bytes)  # 960 in multiples of 64
    with pytest.raises(ZenFlowError, match=r"nbytes is 1024 .* 960 bytes"):
        pool.take(1000)
    assert lengths(pool.take(960)) == [960]
    with pytest.raises(ZenFlowError, match="capacity_bytes is -1"):
        pool.resize(-1)


# --- allocation ------------------------------------------------------------------------------------------------------


def no_memory(nbytes: int) -> Tensor:
    raise MemoryError(f"no {nbytes} bytes")


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (no_memory, MemoryError),
        (lambda nbytes: host_bytes(nbytes + 64), ValueError),
        (lambda nbytes: torch.empty(nbytes, dtype=torch.int8), ValueError),
    ],
)
def test_a_failed_allocation_changes_nothing(bad: Callable[[int], Tensor], error: type[Exception]) -> None:
    makers = deque([host_bytes, bad, host_bytes])
    pool = LogPool(3 * KB, lambda nbytes: makers.popleft()(nbytes))
    pool.give(pool.take(KB))
    with pytest.raises(error):
        pool.take(3 * KB)  # the free segment and a new one
    assert (pool.taken_bytes, pool.allocated_bytes, pool.peak_allocated_bytes) == (0, KB, KB)
    assert sorted(lengths(pool.take(3 * KB))) == [KB, 2 * KB]


# --- waiting ---------------------------------------------------------------------------------------------------------


@dataclass
class Waiting:
    """A take in a thread of its own, which has to wait."""

    pool: LogPool
    nbytes: int
    result: Future[Extents] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
        self.thread.join(A_WHILE_S)
        assert not self.result.done()
        assert not has_room(self.pool, self.nbytes)

    def run(self) -> None:
        try:
            self.result.set_result(self.pool.take(self.nbytes))
        except Exception as error:  # noqa: BLE001 - for the test to see
            self.result.set_exception(error)


def test_a_give_wakes_a_waiting_take() -> None:
    pool = LogPool(3 * KB, host_bytes)
    first, second = pool.take(KB), pool.take(2 * KB)
    with pytest.raises(TimeoutError, match=r"2048 bytes in 0.01 s, 3072 bytes are taken"):
        pool.take(2 * KB, timeout_s=0.01)
    waiting = Waiting(pool, 2 * KB)
    pool.give(first)
    waiting.thread.join(A_WHILE_S)
    assert not waiting.result.done()  # too little
    pool.give(second)
    assert lengths(waiting.result.result(SOON_S)) == [2 * KB]


def test_a_failure_wakes_waiting_and_later_takes() -> None:
    pool = LogPool(2 * KB, host_bytes)
    first = pool.take(KB)
    waiting = Waiting(pool, 2 * KB)
    error = RuntimeError("the host is gone")
    pool.fail(error)
    pool.fail(RuntimeError("and again"))
    assert waiting.result.exception(SOON_S) is error
    for timeout_s in (None, 0):
        with pytest.raises(RuntimeError, match="the host is gone"):
            pool.take(64, timeout_s=timeout_s)
    pool.give(first)
    assert pool.taken_bytes == 0


def test_a_promise_makes_a_take_wait_for_few_pieces() -> None:
    pool = LogPool(256 * KB, host_bytes)
    parts = [pool.take(KB) for _ in range(256)]
    for extents in parts[:6]:
        pool.give(extents)
    assert has_room(pool, 5 * KB)
    pool.promise(parts[10])
    pool.promise(parts[10])
    waiting = Waiting(pool, 5 * KB)
    assert has_room(pool, 4 * KB)
    pool.give(parts[10])  # nothing is promised any more
    assert lengths(waiting.result.result(SOON_S)) == [KB] * 5


@pytest.mark.parametrize("seed", range(3))
def test_every_take_succeeds_in_the_end(seed: int) -> None:
    """However fragmented: two threads give back in random order what one takes, now and then all of the capacity."""
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
