"""What `look_ahead="coast"` adds to a window on the host: engine with it and without, by turns.

.venv/bin/python studies/001-host-update/coast.py
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from hostupdate.engine import EngineContender  # noqa: E402
from hostupdate.machine import Machine  # noqa: E402
from hostupdate.oracle import random_inputs  # noqa: E402

INTERVALS, ROUNDS, SHARE_OF_CACHE, FACTOR = (1, 4, 8), 41, 4.0, 2.08


def main() -> None:
    """Print the ratio of processor time, median with 5th and 95th percentile."""
    machine = Machine.here()
    inputs = random_inputs(machine.elements(SHARE_OF_CACHE), max(INTERVALS), 1)
    engine = EngineContender(machine.cores)
    engine.prepare(inputs)

    def seconds(interval: int, coast: float) -> float:
        engine.coast = coast
        began = time.process_time()
        engine.apply(interval, replay=True)
        return time.process_time() - began

    for interval in INTERVALS:
        ratios = []
        for number in range(ROUNDS):
            order = (0.0, FACTOR) if number % 2 else (FACTOR, 0.0)
            found = {coast: seconds(interval, coast) for coast in order}
            ratios.append(found[FACTOR] / found[0.0])
        low, *_, high = statistics.quantiles(ratios, n=20)
        sys.stdout.write(f"S = {interval}: {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})\n")
    engine.close()


if __name__ == "__main__":
    main()
