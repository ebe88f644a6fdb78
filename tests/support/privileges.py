"""The superuser for whom a file's mode counts: tests of what may not be read run as root, in containers, as well."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_VERSION = 0x20080522
_PASS_OVER_MODES = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
_Result = TypeVar("_Result")


def with_no_right_over_modes(call: Callable[[], _Result]) -> _Result:
    """What `call` returns, in a thread that gives up what lets the superuser read and write every file."""

    def do() -> _Result:
        libc = ctypes.CDLL(None, use_errno=True)
        header = (ctypes.c_uint32 * 2)(_VERSION, 0)
        sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable: bits 0 to 31, then the others
        assert libc.capget(header, sets) == 0, ctypes.get_errno()
        sets[0] &= ~_PASS_OVER_MODES
        sets[1] &= ~_PASS_OVER_MODES  # os.access() looks at what the superuser could take back
        assert libc.capset(header, sets) == 0, ctypes.get_errno()
        return call()

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(do).result()
