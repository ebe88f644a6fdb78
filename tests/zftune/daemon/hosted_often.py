"""`hosted` that writes its metrics file as fast as it can."""

from __future__ import annotations

import runpy

from zftune.daemon.server.sampling import Metrics

if __name__ == "__main__":
    Metrics.keep_textfile.__defaults__ = (0.001,)
    runpy.run_module("tests.zftune.daemon.hosted", run_name="__main__")
