"""What would make agents wait for an answer: threads that hold the interpreter, and looking for garbage.

Python looks for garbage once there are 700 more objects than before. A daemon whose runs have filled their histories
drops an object for each one that comes: what is young then grows to tens of thousands before somebody looks, for 0.2 s.
A full look at all of a daemon with many runs takes 0.3 s. So one looks here: at little and often, and at everything
rarely, as most garbage goes without it.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

COLLECT_S = 0.2
"""Between two calls of `collect_garbage`; 200 runs make 1,000 objects in this time."""
_ALL_S = 600.0
_SWITCH_S = 0.0005  # Python's own 5 ms are paid once for each thread that waits for its turn
_AT_MOST = 100_000  # young objects: who blocks the loop that collects must not fill the memory
_NEVER = 1_000_000


class Garbage:
    """Looks for garbage; call `collect` every `COLLECT_S`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._all_at_s = clock() + _ALL_S

    def collect(self) -> None:
        """Look at what has come since the last call, and now and then at everything."""
        if self._clock() < self._all_at_s:
            gc.collect(1)
            return
        gc.collect()
        self._all_at_s = self._clock() + _ALL_S


@contextmanager
def few_pauses() -> Iterator[None]:
    """Keep pauses of the interpreter short, in this process; let `Garbage` look while this holds."""
    switch_s, thresholds, frozen = sys.getswitchinterval(), gc.get_threshold(), gc.get_freeze_count()
    sys.setswitchinterval(_SWITCH_S)
    gc.set_threshold(_AT_MOST, _NEVER, _NEVER)
    gc.collect()
    if not frozen:  # else by somebody else, and who thaws thaws everything
        gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(switch_s)
