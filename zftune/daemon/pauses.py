"""What would make agents wait for an answer: threads that hold the interpreter, and looking for garbage.

A full look at all objects of a daemon with many runs takes 0.3 s, in which nothing else happens. It is taken after the
start, for the modules that were imported, and from then on rarely: most garbage goes without it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

COLLECT_S = 600.0
"""Between two full looks for garbage."""
_SWITCH_S = 0.0005  # Python's own 5 ms are paid once for each thread that waits for its turn
_NEVER = 1_000_000


@contextmanager
def few_pauses() -> Iterator[None]:
    """Keep pauses of the interpreter short, in this process; call `gc.collect` every `COLLECT_S`."""
    switch_s, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(_SWITCH_S)
    gc.set_threshold(thresholds[0], thresholds[1], _NEVER)
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(switch_s)
