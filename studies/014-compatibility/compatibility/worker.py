"""Tries cells, each in forks of this process: `python worker.py CELLS.json`; a line of JSON for each on stdout.

DeepSpeed is imported once. What a cell breaks, leaves behind or hangs in ends with its forks.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # an overlapped update's process begins by reading this file again
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[3])]

from compatibility.cells import Cell

_SHARED = (
    "compatibility.idioms.comparing",
    "compatibility.oracle",
    "zftune.integrations.deepspeed.backend",
    "zftune.integrations.deepspeed.upstream",
    "zftune.integrations.deepspeed.presets",
    "zftune.store.presets",
    "zftune.telemetry.fingerprint",
)


def _prepare(cells: Sequence[Cell]) -> None:
    """Import and load what forks share, so that they run the same code; nothing that starts a thread."""
    import torch
    from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, ShareMemCommBuilder

    from compatibility.idioms.listing import idiom

    for module in _SHARED:
        importlib.import_module(module)
    for cell in cells:
        if cell.setting:
            idiom(cell.row)  # some import transformers

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    CPUAdamBuilder().load(verbose=False)
    ShareMemCommBuilder().load(verbose=False)


def attempt(cell: Cell, rank: int, folder: Path) -> dict[str, Any]:
    """Train a cell in this process, by the side that it names."""
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    import zftune.integrations.deepspeed as zftune_deepspeed
    from compatibility.idioms.comparing import compared_idiom
    from compatibility.idioms.sides import slow_link
    from compatibility.oracle import compared
    from compatibility.training import trained

    # DeepSpeed asks for a CPU that is fast at fp16; torch computes in it on every one: the matrix is the same on all.
    get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    if cell.side in ("zenflow", "deepspeed"):
        zftune_deepspeed.enable(backend="zenflow" if cell.side == "zenflow" else "deepspeed")
    try:
        if cell.setting:
            slow_link()
            return compared_idiom(cell)
        seen = trained(cell, rank, folder)
    except Exception as error:  # noqa: BLE001 - it is the result
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"[:600]}
    if cell.ranks > 1:
        losses = torch.tensor(seen["losses"], dtype=torch.float64) / cell.ranks
        torch.distributed.all_reduce(losses)
        seen["losses"] = losses.tolist()
    return compared(cell, seen) if rank == 0 else {}


def _fork(cell: Cell, rank: int, port: int, folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": cell.ranks, "MASTER_PORT": port}.items():
            os.environ[name] = str(value)
        figures = attempt(cell, rank, folder)
        (folder / f"{rank}.json").write_text(json.dumps(figures), encoding="utf-8")
    except BaseException:  # noqa: BLE001 - a fork must not go on as its parent
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def repeated(cell: Cell) -> dict[str, Any]:
    """Figures of a cell; of one that is tried more than once "tries" has those of each time."""
    return tried(cell) if cell.tries == 1 else {"tries": [tried(cell) for _ in range(cell.tries)]}


def tried(cell: Cell) -> dict[str, Any]:
    """Figures of a cell; "ended" says how its process did, if it had none."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sys.stderr.write(f"==== {cell.name}\n")
        sys.stderr.flush()
        start = time.perf_counter()
        children = [_fork(cell, rank, port, folder) for rank in range(cell.ranks)]
        statuses = _wait(children, start + cell.limit_s)
        answers = [folder / f"{rank}.json" for rank in range(cell.ranks)]
        found = [json.loads(answer.read_text(encoding="utf-8")) for answer in answers if answer.exists()]
    figures: dict[str, Any] = next((one for one in found if "error" in one), found[0] if found else {})
    if len(found) < cell.ranks and "error" not in figures:
        figures["ended"] = (
            f"no answer within {cell.limit_s:.0f} s" if None in statuses else f"its process ended with {statuses}"
        )
    return {**figures, "seconds": round(time.perf_counter() - start, 2)}


def _wait(children: list[int], until: float) -> list[int | None]:
    """Exit codes; None: it had to be ended."""
    statuses: dict[int, int | None] = dict.fromkeys(children)
    try:
        while None in statuses.values() and time.perf_counter() < until:
            for child in [one for one, status in statuses.items() if status is None]:
                ended, code = os.waitpid(child, os.WNOHANG)
                if ended:
                    statuses[child] = os.waitstatus_to_exitcode(code)
            time.sleep(0.01)
    finally:
        for child in children:
            for kill in (os.killpg, os.kill):  # what it left behind too; itself, where it has no group of its own yet
                with contextlib.suppress(ProcessLookupError):
                    kill(child, signal.SIGKILL)
            if statuses[child] is None:
                os.waitpid(child, 0)
    return list(statuses.values())


def main(file: str) -> None:
    """Try every cell of a file."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)  # where DeepSpeed prints is no place for answers
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        cells = [Cell(**given) for given in json.loads(Path(file).read_text(encoding="utf-8"))]
        _prepare(cells)
        for cell in cells:
            answers.write(json.dumps({"name": cell.name, "figures": repeated(cell)}) + "\n")
            answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
