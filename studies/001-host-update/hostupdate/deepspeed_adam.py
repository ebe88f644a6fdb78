"""DeepSpeedCPUAdam. Its C++ part is compiled when it is first used, which takes a compiler and a minute."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import torch

from hostupdate.contenders import HYPERPARAMETERS, OptimizerKind, UnavailableError

NAME = "DeepSpeedCPUAdam"
_OPERATION = "cpu_adam"


def cpu_adam(build: Path, *, compile_it: bool, say: Callable[[str], None]) -> OptimizerKind:
    """DeepSpeedCPUAdam as its users get it: compiled for this machine's instruction set, with OpenMP.

    Args:
        build: folder for what is compiled; one folder below it for each pair of versions.
        compile_it: whether to compile, which takes a minute, if that was not done before.
        say: told before something takes long.

    Raises:
        UnavailableError: it is not installed, not compiled, or cannot be.
    """
    folder = _prepare(build)
    if not (folder / _OPERATION / f"{_OPERATION}.so").exists():
        _check_tools()
        if not compile_it:
            raise UnavailableError(
                f"{NAME} is left out: its C++ part is not compiled yet, and a short run does not; a full run does"
            )
        say(f"compiling {NAME} (once, about a minute)")
    else:
        say(f"loading {NAME}")
    if (lock := folder / _OPERATION / "lock").exists():
        say(f"waiting for another process that compiles {NAME}; if there is none, remove {lock}")
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        from deepspeed.ops.op_builder import CPUAdamBuilder

        CPUAdamBuilder().load(verbose=False)
    except Exception as error:
        raise UnavailableError(f"{NAME} is left out: {_one_line(error)}") from error

    def make(parameters: list[torch.nn.Parameter]) -> object:
        return DeepSpeedCPUAdam(parameters, **HYPERPARAMETERS, adamw_mode=True)

    return OptimizerKind(NAME, make, int)


def _prepare(build: Path) -> Path:
    """Set what its build reads from the environment: the folder, the tools, the kind of device."""
    try:
        versions = "-".join(f"{package}-{metadata.version(package)}" for package in ("deepspeed", "torch"))
    except metadata.PackageNotFoundError as error:
        raise UnavailableError(f"{NAME} is left out: {error.name} is not installed") from error
    folder = build / versions
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    tools = str(Path(sys.executable).parent)
    if tools not in os.environ["PATH"].split(os.pathsep):  # ninja, where the environment is not activated
        os.environ["PATH"] = os.pathsep.join((tools, os.environ["PATH"]))
    return folder


def _check_tools() -> None:
    compiler = os.environ.get("CXX", "c++")
    for tool in (compiler, "ninja"):
        if shutil.which(tool) is None:
            raise UnavailableError(f"{NAME} is left out: its C++ part has to be compiled, and there is no {tool}")


def _one_line(error: Exception) -> str:
    """Of a failed build, the compiler's first complaint."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = next((line for line in lines if "error:" in line), lines[0] if lines else type(error).__name__)
    return told[:200]
