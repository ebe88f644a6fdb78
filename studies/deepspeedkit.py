"""DeepSpeed on one CPU rank, in a process of its own: what the studies of it need around it.

The standard library alone: an environment that has another DeepSpeed has nothing of ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

BUILD = Path(__file__).parents[1] / "build" / "torch-extensions"
COMPILING_S = 900.0
"""What DeepSpeed may take to compile its operations, once, on a busy machine."""


def versions() -> str:
    """The installed DeepSpeed and torch, which name the folder of what DeepSpeed compiles."""
    return "-".join(f"{package}-{metadata.version(package)}" for package in ("deepspeed", "torch"))


def compiled(of: str | None = None) -> bool:
    """Whether DeepSpeed has its operations already.

    Args:
        of: as `versions` has them; None: the installed ones.
    """
    folder = BUILD / (of or versions())
    return all((folder / name / f"{name}.so").exists() for name in ("cpu_adam", "deepspeed_shm_comm"))


def environment() -> dict[str, str]:
    """Of a process that imports DeepSpeed: its CPU, where its operations are compiled, and the ninja for that."""
    folder = BUILD / versions()
    folder.mkdir(parents=True, exist_ok=True)
    tools, path = str(Path(sys.executable).parent), os.environ["PATH"]
    if tools not in path.split(os.pathsep):  # another ninja would compile everything again
        path = os.pathsep.join((tools, path))
    return {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(folder), "PATH": path}


def prepare(port: int | None = None) -> None:
    """Make this process the only rank of a gloo group.

    Args:
        port: on which it meets itself; None: a free one.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = port or free.getsockname()[1]
    of_rank = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ.update(environment() | of_rank)
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started: DeepSpeed leaves workers behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ended(command: Sequence[str | Path], folder: Path, limit_s: float, more: Mapping[str, str] | None = None) -> str:
    """Run a command in a session of its own, on one thread, and end all that it started.

    Args:
        command: what to run.
        folder: where it runs, and where `log` gets what it prints.
        limit_s: how long it may take.
        more: of its environment.

    Returns:
        How it ended, "" where that was well.
    """
    with (folder / "log").open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(more or {})},
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"no answer within {limit_s:.0f} s"
        finally:
            end(process)
    return f"exit status {code}" if code else ""


def last_lines(folder: Path, count: int) -> list[str]:
    """Of what a command printed that `ended` has run."""
    return (folder / "log").read_text(encoding="utf-8", errors="replace").splitlines()[-count:]


def run_apart(script: Path, ask: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """A run of a script, whose argument is a file: it holds what is asked for, and then the figures.

    Args:
        script: ends once it has written the figures.
        ask: as JSON.
        limit_s: how long it may take where nothing is to be compiled.

    Returns:
        The figures, and "seconds"; or "ended", how it ended without them, and its last lines as "log".
    """
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "run.json"
        file.write_text(json.dumps(ask), encoding="utf-8")
        how = ended([sys.executable, script, file], folder, limit_s if compiled() else max(limit_s, COMPILING_S))
        figures: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if figures == json.loads(json.dumps(ask)):
            return {"ended": how or "exit status 0", "log": last_lines(folder, 3)}
    return {**figures, "seconds": time.perf_counter() - began}
