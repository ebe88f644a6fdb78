"""What this process has mapped, as the kernel tells it (Linux)."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from pathlib import Path


def pages_kept_from_children() -> set[int]:
    """Addresses of the pages that a forked child would not have (`MADV_DONTFORK`)."""
    return {page for addresses, flags in _mappings() if "dc" in flags for page in addresses[:: mmap.PAGESIZE]}


def _mappings() -> Iterator[tuple[range, list[str]]]:
    addresses = range(0)
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            addresses = range(int(span[1], 16), int(span[2], 16))
        elif line.startswith("VmFlags:"):
            yield addresses, line.split()[1:]
