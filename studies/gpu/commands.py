"""What a user types, on a GPU: commands and examples, each in a process of its own, some of them at a time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu.bench import ROOT, Bench, Size
from gpu.record import Record
from gpu.training import extensions_folder

_ZFTUNE = (sys.executable, "-c", "from zftune.cli.main import main; main()")
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
_CONFIG = ROOT / "examples" / "ds_hf.json"
_AT_A_TIME = 6
_TIMEOUT_S = 75.0
_KEPT_LINES, _KEPT_OF_FAILED = 30, 200


def commands(record: Record, bench: Bench, _: Size) -> None:
    """Each one's exit code and the end of what it printed; one that does not end with 0 failed."""
    if bench.simulated:
        record.refuse("a command looks for a GPU itself")
        return
    folder = record.path.parent / "commands"
    folder.mkdir(parents=True, exist_ok=True)
    timeout_s = min(_TIMEOUT_S, record.remaining_s - 2)
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        found = {name: pool.submit(_run, command, folder, timeout_s) for name, command in _all(folder).items()}
        for name, one in found.items():
            figures = record.measure(name, one.result)
            if figures is not None and figures["returncode"] != 0:
                record.failed(name, f"it ended with {figures['returncode']}: {figures['output'][-1:]}")


def _all(folder: Path) -> dict[str, Sequence[str]]:
    def example(name: str, *arguments: str) -> list[str]:
        return [sys.executable, str(ROOT / "examples" / f"{name}.py"), *arguments]

    def profile(name: str) -> list[str]:
        return [
            *_ZFTUNE,
            "profile",
            "--steps",
            "40",
            *(f"--{kind}={folder / name}.{kind}" for kind in ("json", "html")),
        ]

    return {
        "profile": [*profile("workload"), "--topk-ratio=0.1", "--update-interval=4"],
        "profile -- DeepSpeed's ZeRO-Offload": [*profile("zero-offload"), "--", *example("deepspeed_zero_offload")],
        "profile -- DeepSpeed's ZenFlow": [*profile("deepspeed"), "--", *example("deepspeed_zenflow")],
        "profile -- run": [*profile("run"), "--", *_ZFTUNE, "run", "--", *example("deepspeed_zenflow")],
        "profile -- a loop": [*profile("loop"), "--", *example("plain_pytorch")],
        "run -- DeepSpeed": [*_ZFTUNE, "run", "--", *example("deepspeed_zenflow")],
        "run -- Trainer and DeepSpeed": [
            *_ZFTUNE, "run", "--", *_TORCHRUN, *example("hf_trainer", f"--deepspeed={_CONFIG}")[1:]
        ],
        "run --online": [*_ZFTUNE, "run", "--online", "--", *example("tune_plain_loop", "--steps=1500")],
        "tune": [*_ZFTUNE, "tune", "--measurements=6", "--quality=published", f"--json={folder / 'tune.json'}"],
        "Trainer": example("hf_trainer_zenflow", "--steps=60"),
        "Accelerate": example("accelerate_zenflow", "--steps=60", "--precision=bf16"),
        "FSDP2": [*_TORCHRUN, *example("fsdp2_zenflow", "--steps=60")[1:]],
    }  # fmt: skip


def _run(command: Sequence[str], folder: Path, timeout_s: float) -> dict[str, Any]:
    own = {"ZFTUNE_DB": f"sqlite:///{folder / 'zftune.db'}", "TORCH_EXTENSIONS_DIR": str(extensions_folder())}
    began = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **own, "NO_COLOR": "1", "COLUMNS": "120"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode(errors="replace")  # bytes, for all that text was asked for
        returncode: int | str = f"no end within {timeout_s:.0f} s"
    else:
        output, returncode = done.stdout, done.returncode
    seconds = round(time.monotonic() - began, 1)
    kept = _KEPT_OF_FAILED if returncode else _KEPT_LINES
    return {"returncode": returncode, "seconds": seconds, "output": output.splitlines()[-kept:]}
