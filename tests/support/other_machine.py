"""Another machine, faked where `ZFTUNE_TEST_OTHER_MACHINE` is set. No test may notice it.

The processor's name is long, one of 96 cores is usable, memory is another, and so are the node, the user, the locale,
the time zone and the terminal's width. Forked children see all of it (`tests/support/fork_server_imports.py`), others
what they inherit.
"""

from __future__ import annotations

import importlib
import os
import socket
import time
from pathlib import Path
from typing import Any

import psutil

CPU_MODEL = "Fancy(R) Silicon(TM) Platinum 9999X+ 96-Core Processor (with Extras) @ 2.45GHz"
CORES = 96
RAM_BYTES = 7 * 10**12
ENVIRONMENT = {
    "COLUMNS": "211",
    "LANG": "de_DE.ISO-8859-1",
    "LC_ALL": "de_DE.ISO-8859-1",
    "LOGNAME": "somebody-else",
    "TZ": "Pacific/Chatham",
    "USER": "somebody-else",
}


def fake() -> None:
    fingerprint: Any = importlib.import_module("zftune.telemetry.fingerprint")  # the folder has a function of that name
    os.environ |= ENVIRONMENT
    time.tzset()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    os.cpu_count = lambda: CORES
    system, sysconf, memory, cpu_model = os.uname(), os.sysconf, psutil.virtual_memory, fingerprint._cpu_model
    socket.gethostname = lambda: "n"
    os.uname = lambda: os.uname_result((system[0], "n", *system[2:]))

    def other_sysconf(name: Any) -> int:
        return RAM_BYTES // sysconf("SC_PAGE_SIZE") if name == "SC_PHYS_PAGES" else sysconf(name)

    def other_model(root: Path) -> str | None:
        return CPU_MODEL if root == Path("/") else cpu_model(root)

    os.sysconf = other_sysconf
    psutil.virtual_memory = lambda: memory()._replace(total=RAM_BYTES)
    fingerprint._cpu_model = other_model


fake()
