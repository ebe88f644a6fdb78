"""DeepSpeed's own host operations, compiled once for all tests and studies by `python -m tests.support.upstream_ops`.

torch's lock file outlives a killed process, and ninja compiles again where the one before had another version. So
`load_what_is_compiled` goes without both, and `environment` gives one ninja and removes what killed ones left.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

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
    """What a process needs to find them, and the ninja that torch asks for; no lock of a killed one is left."""
    remove_left_locks()
    tools = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    return {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(folder()), "PATH": tools}


def allow_fp16() -> None:
    """Let DeepSpeed train in fp16 in this process: torch computes in it on every CPU, DeepSpeed asks for a fast one."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True


def need() -> None:
    if not all(_library(name).exists() for name in _BUILDERS):
        pytest.skip("DeepSpeed's operations are not compiled: run `python -m tests.support.upstream_ops`")


def remove_left_locks() -> None:
    """Remove torch's locks that no living process holds: it keeps the file open, but for the moment before removal."""
    left = _unheld_locks()
    for lock in left & _unheld_locks() if left else ():
        lock.unlink(missing_ok=True)


def load_what_is_compiled() -> None:
    """Have torch load operations of this folder as they are, in this process and its forks."""
    from torch.utils import cpp_extension

    functions: Any = cpp_extension
    load = functions.load

    def load_or_compile(name: str, *given: Any, **more: Any) -> Any:
        library = _library(name)
        if library.exists() and os.environ.get("TORCH_EXTENSIONS_DIR") == str(folder()):
            return functions._import_module_from_library(name, str(library.parent), True)
        return load(name, *given, **more)

    functions.load = load_or_compile


def _unheld_locks() -> set[Path]:
    locks = set(folder().glob("*/lock"))
    for descriptor in Path("/proc").glob("[0-9]*/fd/*") if locks else ():
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            locks.discard(descriptor.readlink())
    return locks


def _library(name: str) -> Path:
    return folder() / name / f"{name}.so"


def main() -> None:
    for name, builder in _BUILDERS.items():
        if _library(name).exists():
            continue
        code = f"from deepspeed.ops.op_builder.cpu import {builder}; {builder}().load(verbose=False)"
        subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment()}, check=True)


if __name__ == "__main__":
    main()
