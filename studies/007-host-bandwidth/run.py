"""How does the host's memory bandwidth follow from thread count and update interval?

See README.md beside this file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from rich.console import Console  # noqa: E402
from rich.progress import track  # noqa: E402
from rich.table import Table  # noqa: E402
from studykit import Results, code_digest, parser, spread, write_json  # noqa: E402

from zftune.telemetry.bandwidth import host_bandwidth  # noqa: E402

INTERVALS = (1, 2, 4, 8)
ROUNDS, ELEMENTS = 9, 1 << 25
QUICK_ROUNDS, QUICK_ELEMENTS = 3, 1 << 23
CODE = ("zftune/telemetry/bandwidth.py", "csrc/bandwidth.cpp")


def thread_counts(cores: int) -> list[int]:
    """Powers of two below the number of cores, and all of them."""
    counts = [1 << i for i in range(cores.bit_length()) if 1 << i < cores]
    return [*counts, cores]


def measure(rounds: int, elements: int, threads: Sequence[int], intervals: Sequence[int]) -> list[dict[str, Any]]:
    """GB/s of every setting: one pass each, in turn, so that a slow moment of the machine does not hit one of them."""
    settings = [(count, interval) for count in threads for interval in intervals]
    gbps: dict[tuple[int, int], list[float]] = {setting: [] for setting in settings}
    for _ in track(range(rounds), "bandwidth", console=Console(stderr=True), transient=True):
        for count, interval in settings:
            result = host_bandwidth(elements=elements, update_interval=interval, threads=count, repeats=1)
            gbps[count, interval].append(result.gbps)
    return [{"threads": t, "update_interval": s, "gbps": spread(gbps[t, s])} for t, s in settings]


def updates_per_s(gbps: float, interval: int) -> float:
    """Elements whose window of S gradients a host at this rate can apply in a second, if arithmetic is free."""
    return gbps * 1e9 / (26 + 2 * interval)


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """GB/s, and what it means for an update."""
    table = Table(title="host bandwidth on the streams of one update: GB/s, median over interleaved rounds")
    for column in ("threads", "S", "GB/s", "p5 - p95", "10^6 elements/s", "10^6 gradients/s"):
        table.add_column(column, justify="right")
    for row in rows:
        gbps, interval = row["gbps"], row["update_interval"]
        windows = updates_per_s(gbps["median"], interval) / 1e6
        table.add_row(
            str(row["threads"]),
            str(interval),
            f"{gbps['median']:.2f}",
            f"{gbps['p5']:.2f} - {gbps['p95']:.2f}",
            f"{windows:.0f}",
            f"{windows * interval:.0f}",
        )
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Measure unless it is done, and print the table."""
    arguments = parser(__doc__ or "").parse_args(argv)
    results = Results.of(HERE, arguments)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    inputs: dict[str, Any] = {
        "rounds": QUICK_ROUNDS if arguments.quick else ROUNDS,
        "elements": QUICK_ELEMENTS if arguments.quick else ELEMENTS,
        "threads": thread_counts(cores),
        "update_intervals": list(INTERVALS),
        "code": code_digest(*CODE),
    }
    record = None if arguments.again else results.load("bandwidth", inputs)
    if record is None:
        rows = measure(inputs["rounds"], inputs["elements"], inputs["threads"], INTERVALS)
        record = results.save("bandwidth", inputs, {"rows": rows})
    Console(width=None if sys.stdout.isatty() else 100).print(table_of(record["figures"]["rows"]))
    if arguments.json:
        write_json(arguments.json, {"study": HERE.name, "quick": arguments.quick, **record})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
