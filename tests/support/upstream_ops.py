"""DeepSpeed's own host operations, compiled once for all tests and studies.

`python -m tests.support.upstream_ops` compiles what is missing (`make test` does), a minute or two on two cores.
DeepSpeed itself would do so inside the first test that needs them, and leave a lock behind where that test's time ran
out.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_BUILDERS = {
    "deepspeed_shm_comm": "ShareMemCommBuilder",
    "cpu_adam": "CPUAdamBuilder",
    "fused_adam": "FusedAdamBuilder",  # of the twins without offloading
}


def folder() -> Path:
    """Where they are, for the installed versions; study 002 keeps them there too."""
    versions = "-".join(f"{package}-{metadata.version(package)}" for package in ("deepspeed", "torch"))
    return ROOT / "build" / "torch-extensions" / versions


def environment() -> dict[str, str]:
    """What a process needs to find them, and the ninja that torch asks for."""
    tools = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    return {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(folder()), "PATH": tools}


def allow_fp16() -> None:
    """Let DeepSpeed train in fp16 in this process: torch computes in it on every CPU, DeepSpeed asks for a fast one."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True


def need() -> None:
    """Skip the test that calls this where they are not compiled."""
    if not all(_library(name).exists() for name in _BUILDERS):
        pytest.skip("DeepSpeed's operations are not compiled: run `python -m tests.support.upstream_ops`")


def _library(name: str) -> Path:
    return folder() / name / f"{name}.so"


def main() -> None:
    """Compile what is missing."""
    for name, builder in _BUILDERS.items():
        if _library(name).exists():
            continue
        (folder() / name).mkdir(parents=True, exist_ok=True)
        (folder() / name / "lock").unlink(missing_ok=True)  # of a compilation that was killed
        code = f"from deepspeed.ops.op_builder.cpu import {builder}; {builder}().load(verbose=False)"
        subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment()}, check=True)


if __name__ == "__main__":
    main()
