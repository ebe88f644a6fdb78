"""A daemon that follows runs: `python -m tests.support.zftune.daemon.runs.hosted [LEASE_S]`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from zftune.daemon.process import Options, serve
from zftune.daemon.runs.api import Runs
from zftune.daemon.runs.registry import LEASE_S, Registry
from zftune.daemon.server.answers import Service
from zftune.store import open_store


@contextmanager
def _host() -> Iterator[Sequence[Service]]:
    lease_s = float(sys.argv[1]) if len(sys.argv) > 1 else LEASE_S
    yield [Runs(Registry(open_store, lease_s=lease_s))]


if __name__ == "__main__":
    serve(Options(), _host)
