"""Python, the packages that zftune needs, the native module, and a compiler for those that build at run time."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator

import zftune
from zftune.doctor.check import Check
from zftune.doctor.versions import at_least, installed, requirements

_SHOWN = ("torch", "optuna", "sqlalchemy", "plotly")
_COMPILERS = ("c++", "g++", "clang++")
_TIMEOUT_S = 5


def checks() -> Iterator[Check]:
    """Everything about the software but what belongs to a GPU or to DeepSpeed."""
    yield _python()
    yield from packages(requirements("zftune"))
    yield _native_module()
    yield _compiler()


def _python() -> Check:
    system = platform.system()
    known = f"zftune {zftune.__version__} on Python {platform.python_version()}, {system} {platform.machine()}"
    if sys.platform != "linux":
        return Check(
            name="Python",
            status="note",
            finding=f"{known}; what is not Linux lacks control groups, pressure figures and core binding.",
            fix="Measure on Linux.",
        )
    return Check(name="Python", status="ok", finding=f"{known}.", required=True)


def packages(needed: dict[str, str | None]) -> Iterator[Check]:
    """One check for the packages that are there, and one for each that is not, or is too old.

    Args:
        needed: names and least versions.
    """
    good = []
    for name, least in needed.items():
        version = installed(name)
        wanted = f"{name}>={least}" if least else name
        if version is None:
            finding = f"{wanted} is not installed."
            yield Check(name=name, status="absent", finding=finding, fix=f"pip install '{wanted}'", required=True)
        elif least is not None and not at_least(version, least):
            finding = f"{name} {version} is too old: {least} is the least that works."
            yield Check(name=name, status="broken", finding=finding, fix=f"pip install '{wanted}'", required=True)
        else:
            good.append((name, version))
    shown = ", ".join(f"{name} {version}" for name, version in good if name in _SHOWN)
    rest = sum(name not in _SHOWN for name, _ in good)
    if good:
        more = f"{shown} and {rest} others" if shown else f"{rest} packages"
        yield Check(name="packages", status="ok", finding=f"{more} are recent enough.", required=True)


def _native_module() -> Check:
    name = "native module"
    from zenflow import HostEngineError
    from zenflow.host.native import load_native

    try:
        load_native()
    except HostEngineError as error:
        return Check(
            name=name,
            status="broken",
            finding=f"{error}.",
            fix="pip install --force-reinstall zftune (in a checkout: make setup)",
            required=True,
        )
    mode = os.environ.get("ZENFLOW_NATIVE")
    if mode == "off":
        return Check(
            name=name,
            status="note",
            finding="It loads, and ZENFLOW_NATIVE=off keeps it from being used: the host update is many times slower.",
            fix="unset ZENFLOW_NATIVE",
        )
    return Check(name=name, status="ok", finding="The host engine loads.", required=True)


def _compiler() -> Check:
    """Of no use to zftune itself; Triton and DeepSpeed build parts of themselves on first use."""
    name = "compiler"
    found = next((path for compiler in _COMPILERS if (path := shutil.which(compiler))), None)
    if found is None:
        return Check(
            name=name,
            status="absent",
            finding="There is no C++ compiler: Triton's kernels and DeepSpeed's CPU Adam cannot be built on first use.",
            fix="apt install g++ (or your system's package of it)",
        )
    try:
        done = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        version = done.stdout.partition("\n")[0].strip() if done.returncode == 0 else ""
    except (OSError, subprocess.TimeoutExpired):
        version = ""
    if not version:
        return Check(
            name=name,
            status="broken",
            finding="The C++ compiler does not run.",
            fix="Run c++ --version and repair what it reports.",
        )
    return Check(name=name, status="ok", finding=f"{version}, for what Triton and DeepSpeed build on first use.")
