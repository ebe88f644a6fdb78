"""A wall clock that jumps, for one process: nobody can set the machine's own.

A library that is loaded before all others adds to what the system's calls answer, whoever asks: Python, SQLite, a log.
"""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.zftune.daemon.daemons import serving
from tests.zftune.daemon.faults.stage import Stage

COMPILER = shutil.which("cc") or shutil.which("gcc")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler is installed")

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long long *shift_s;

__attribute__((constructor)) static void open_shift(void) {
    int file = open(getenv("CLOCK_SHIFT"), O_RDONLY | O_CLOEXEC);
    if (file < 0) abort();
    shift_s = mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) && shift_s) now->tv_sec += *shift_s;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec found;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &found)) return -1;
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *where) {
    struct timespec found;
    if (clock_gettime(CLOCK_REALTIME, &found)) return -1;
    if (where) *where = found.tv_sec;
    return found.tv_sec;
}
"""


class WallClock:
    """A clock for daemons.

    Args:
        folder: of the library and of the seconds that it adds.
    """

    def __init__(self, folder: Path) -> None:
        assert COMPILER is not None
        self._library, self._shift = folder / "clock.so", folder / "shift"
        source = folder / "clock.c"
        source.write_text(_SOURCE)
        subprocess.run([COMPILER, "-O1", "-shared", "-fPIC", "-o", self._library, source, "-ldl"], check=True)
        self._shift.write_bytes(bytes(8))

    def jump(self, by_s: float) -> None:
        """Let it jump, forwards or backwards."""
        with self._shift.open("r+b") as file, mmap.mmap(file.fileno(), 8) as kept:
            (before,) = struct.unpack("q", kept[:])
            kept[:] = struct.pack("q", before + int(by_s))

    @contextmanager
    def daemon(self, world: Stage) -> Iterator[None]:
        """A daemon that lives by it; it ends in the end."""
        more = {"ZFTUNE_DB": str(world.database), "HOME": str(world.folder)}
        more |= {"LD_PRELOAD": str(self._library), "CLOCK_SHIFT": str(self._shift)}
        with serving(world.folder, module="tests.zftune.daemon.runs.hosted", more=more) as daemon:
            yield
            daemon.signal()
            assert daemon.ends() == 0
