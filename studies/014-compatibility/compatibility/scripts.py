"""The scripts of `examples/`, unchanged, under `zftune run` with either backend, and without zftune."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from studykit import ROOT

STEPS = 21
LIMIT_S = 300.0
_LOSS = re.compile(r"(?:step \d+: loss |'loss': '?)([0-9.naif]+)")
EXAMPLES = {
    "deepspeed_minimal.py": ("--deepspeed", "--deepspeed_config", "examples/ds_config.json"),
    "deepspeed_zero_offload.py": (),
    "deepspeed_zenflow.py": (),
    "hf_trainer.py": ("--deepspeed", "examples/ds_hf.json"),
}
OVERLAPPED = "deepspeed_zenflow.py"


def command_of(name: str, side: str) -> list[str]:
    """As a user would type it.

    Args:
        name: of a script.
        side: a backend of zftune, or "plain".
    """
    launch = ["torchrun", "--standalone", "--nproc-per-node", "1", f"examples/{name}", "--steps", str(STEPS)]
    own = [*launch, *EXAMPLES[name]]
    return own if side == "plain" else ["zftune", "run", "--backend", side, "--", *own]


def run_script(name: str, side: str, environment: Mapping[str, str], log: Path) -> dict[str, Any]:
    """Its exit status, the losses that it prints, and what it says at its end if it fails."""
    start = time.perf_counter()
    with log.open("w+", encoding="utf-8") as output:
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name(command_of(name, side)[0])), *command_of(name, side)[1:]],
            cwd=ROOT,
            env=dict(environment),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the workers too, which DeepSpeed leaves behind
            process.wait()
    text = log.read_text(encoding="utf-8", errors="replace")
    return {
        "status": status,
        "losses": [float(one) for one in _LOSS.findall(text)],
        "said": [line for line in text.splitlines() if re.match(r"zftune: |\w*(Error|Exception)\b", line)][-2:],
        "seconds": round(time.perf_counter() - start, 2),
    }
