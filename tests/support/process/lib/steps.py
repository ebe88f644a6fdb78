"""Stands for a training where a test needs its records and not torch: writes what the agent would write."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

PHASES = {"data": 1.0, "forward": 3.0, "backward": 4.0, "optimizer": 1.5, "other": 0.5}
STEP_NS = 10_000_000


def train(steps: int = 6, *, warmup: int = 1, rank: int = 0, world: int = 1, end: str | None = "measured") -> None:
    """Record steps of 10 ms; the first `warmup` are not measured. `end`: reason of the last line, None without one."""
    begin = time.monotonic_ns() - steps * STEP_NS
    rows: list[dict[str, Any]] = [_header(rank, world, begin), _model()]
    rows += [_step(index, begin + index * STEP_NS, measured=index >= warmup) for index in range(steps)]
    if end is not None:
        rows.append({"kind": "end", "reason": end, "ns": time.monotonic_ns()})
    write("".join(json.dumps(row) + "\n" for row in rows))


def write(text: str) -> None:
    with record_file().open("a") as file:
        file.write(text)


def record_file() -> Path:
    return Path(os.environ["ZFTUNE_AGENT_DIR"]) / f"agent-{os.getpid()}.jsonl"


def _header(rank: int, world: int, begin: int) -> dict[str, Any]:
    return {
        "kind": "header",
        "protocol": 1,
        "pid": os.getpid(),
        "rank": rank,
        "local_rank": rank,
        "world_size": world,
        "zftune": "0.1.0",
        "python": "3.12.4",
        "torch": "2.13.0",
        "script": "train.py",
        "device": "cpu",
        "device_uuid": None,
        "has_stream": False,
        "source": "wall clock",
        "began_ns": begin,
    }


def _model() -> dict[str, Any]:
    return {
        "kind": "model",
        "model": "Net",
        "parameters": 10,
        "trainable": 10,
        "dtype": "float32",
        "model_bytes": 40,
        "model_id": "0123456789abcdef",
        "optimizer": "SGD",
        "systems": [],
        "micro_batch": 1,
        "sequence": None,
        "tokens_per_step": None,
        "knobs": None,
    }


def _step(index: int, begin: int, *, measured: bool) -> dict[str, Any]:
    return {
        "kind": "step",
        "index": index,
        "measured": measured,
        "begin_ns": begin,
        "end_ns": begin + STEP_NS,
        "step_ms": STEP_NS / 1e6,
        "phases_ms": PHASES,
        "spans": [["data", 0.0, 1.0], ["forward", 1.0, 4.0], ["backward", 4.0, 8.0], ["optimizer", 8.0, 9.5]],
        "stall_ms": None,
        "hidden_ms": None,
        "waits_ms": {"data": 1.0},
        "overhead_ms": 0.02,
        "runtime": None,
    }
