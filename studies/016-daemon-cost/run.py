"""What do the agent and the daemon cost at steps of 50 ms of real work? See README.md beside this file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import torch  # noqa: E402
from measuring import TURNS, UNDER, measure  # noqa: E402
from rich.console import Console  # noqa: E402
from studykit import Results, code_digest, parser, write_json  # noqa: E402
from summary import costs_of, holds, table_of  # noqa: E402
from trainee import SIZE  # noqa: E402

MEASURED = tuple(f"studies/{HERE.name}/{name}.py" for name in ("measuring", "served", "trainee"))
CODE = (*MEASURED, "zftune/agent", "zftune/daemon", "zftune/tuner", "zftune/workload", "runtime/zenflow")
ROUNDS, BLOCKS = 12, 24
QUICK_ROUNDS, QUICK_BLOCKS = 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing and print it; 1 if a run costs more than it may."""
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"three minutes each ({ROUNDS})")
    arguments = options.parse_args(argv)
    results = Results.of(HERE, arguments)
    rounds, blocks = (QUICK_ROUNDS, QUICK_BLOCKS) if arguments.quick else (arguments.rounds, BLOCKS)
    inputs = {**SIZE, "blocks": blocks, "turns": TURNS, "under": UNDER, "torch": torch.__version__}
    inputs["code"] = code_digest(*CODE)
    records = []
    for number in range(1, rounds + 1):
        name = f"round-{number:02d}"
        record = None if arguments.again else results.load(name, inputs)
        if record is None:
            with Console(stderr=True).status(f"round {number} of {rounds}"):
                record = results.save(name, inputs, measure(blocks))
        records.append(record)
    costs = costs_of([record["figures"] for record in records])
    Console(width=None if sys.stdout.isatty() else 120).print(table_of(costs, len(records)))
    if arguments.json:
        write_json(arguments.json, {"study": HERE.name, "quick": arguments.quick, "records": records, "costs": costs})
    return 0 if holds(costs) or arguments.quick else 1


if __name__ == "__main__":
    sys.exit(main())
