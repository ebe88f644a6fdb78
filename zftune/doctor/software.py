"""Python and packages, the native module, DeepSpeed with its known defects and stale locks, and the store."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

import zftune
from zftune.doctor.check import Check
from zftune.ds_config.facts import GOOD, TESTED, scrambles
from zftune.errors import EXTRAS, BadInputError
from zftune.store.location import check_server, exists, locate, network_file_system
from zftune.telemetry.fingerprint import installed

_FOLDER = "TORCH_EXTENSIONS_DIR"
_LOCKS_BY_FLOCK = "2.14"
"""The first torch whose lock of an extension's folder is not the file itself."""
_LONGEST_S = 600.0
"""That compiling an op takes."""
_UNITS = (("d", 86400), ("h", 3600), ("min", 60))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtensionLock:
    """A lock file of a compilation: torch before 2.14 waits as long as it is there, whoever made it."""

    shown: str
    """The file as a shell understands it, without the user's name."""
    age_s: float

    @property
    def is_left_over(self) -> bool:
        return self.age_s > _LONGEST_S

    @property
    def sentence(self) -> str:
        return f"the compilation lock {self.shown} is {_age(self.age_s)} old"

    @property
    def removal(self) -> str:
        return f"rm {self.shown}"


def extension_locks(environment: Mapping[str, str]) -> list[ExtensionLock]:
    """What the installed torch waits for in its folder of extensions, the oldest first.

    Since 2.14 the lock is an flock, which ends with its process.

    Args:
        environment: $TORCH_EXTENSIONS_DIR and $XDG_CACHE_HOME tell the folder, as they tell torch.
    """
    if at_least(installed("torch") or "", _LOCKS_BY_FLOCK):
        return []
    given = environment.get(_FOLDER)
    if given is not None:
        folder, shown = Path(given), f'"${_FOLDER}"'
    elif "XDG_CACHE_HOME" in environment:
        folder, shown = Path(environment["XDG_CACHE_HOME"]) / "torch_extensions", '"$XDG_CACHE_HOME"/torch_extensions'
    else:
        folder, shown = Path("~/.cache/torch_extensions").expanduser(), "~/.cache/torch_extensions"
    found = []
    for path in (*folder.glob("*/lock"), *folder.glob("*/*/lock")):  # by default a folder for each build of torch
        try:
            age_s = max(0.0, time.time() - path.stat().st_mtime)
        except OSError:  # just removed, or nobody but another user may look
            continue
        found.append(ExtensionLock(shown=f"{shown}/{shlex.quote(str(path.relative_to(folder)))}", age_s=age_s))
    return sorted(found, key=lambda lock: -lock.age_s)


def _age(seconds: float) -> str:
    """To the unit that matters: "40 s", "3 min", "5 h"."""
    for unit, length in _UNITS:
        if seconds >= 2 * length:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds:.0f} s"


def numbers(version: str) -> tuple[int, ...]:
    """The release as numbers: (2, 13, 0) of "2.13.0+cpu"."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def at_least(version: str, least: str) -> bool:
    """Whether a release is not before another: 2.10 is not before 2.4, nor 2 before 2.0."""
    a, b = numbers(version), numbers(least)
    length = max(len(a), len(b))
    return a + (0,) * (length - len(a)) >= b + (0,) * (length - len(b))


def requirements(distribution: str) -> dict[str, str | None]:
    """What a distribution always needs: names, and the least version of each or None."""
    try:
        lines = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return {}
    found = {}
    for line in lines:
        requirement, _, marker = line.partition(";")
        if "extra" in marker:
            continue
        name = re.match(r"[\w.-]+", requirement)
        least = re.search(r">=\s*([\w.]+)", requirement)
        if name is not None:
            found[name[0]] = least[1] if least else None
    return found


_LEAST_FREE_BYTES = 16_000_000
"""A database of a few runs, its journal and a backup."""
_IN_MEMORY = "Without it zftune keeps what it learns in memory, until it ends."


def store_checks() -> Iterator[Check]:
    """The location by the environment."""
    yield store_check(os.environ, Path.home())


def store_check(environment: Mapping[str, str], home: Path, root: Path = Path("/")) -> Check:
    """Whether the database can be written where it belongs.

    Args:
        environment: $ZFTUNE_DB is a path or a URL of SQLAlchemy; else $XDG_DATA_HOME counts.
        root: stands for "/" where the mounts are read.
    """
    name = "store"
    location = locate(environment.get("ZFTUNE_DB", ""), environment, home)
    if location.url is not None:
        try:
            check_server(location.url)
        except BadInputError as error:
            return Check(name=name, status="broken", finding=f"{error}.", fix="Set $ZFTUNE_DB to what is allowed.")
        kind = location.url.partition("://")[0].partition("+")[0]  # the rest may hold a password
        return Check(name=name, status="note", finding=f"$ZFTUNE_DB names a {kind} server, which was not tried.")
    path, shown = location.path, location.shown
    if path is None:
        return Check(name=name, status="note", finding="$ZFTUNE_DB asks for a database in memory: nothing is kept.")
    existing = next((folder for folder in (path, *path.parents) if exists(folder)), None)
    fix = "Set $ZFTUNE_DB to a file in a folder that you may write."
    if existing is None or not _writable(existing, path):
        return Check(name=name, status="broken", finding=f"{shown} cannot be written. {_IN_MEMORY}", fix=fix)
    network = network_file_system(existing, root)
    if network is not None:
        return Check(
            name=name,
            status="note",
            finding=f"{shown} is on a network file system ({network}), where SQLite's locks cannot be trusted.",
            fix="Set $ZFTUNE_DB to a local file, or to the URL of a database server.",
        )
    free = free_bytes(existing)
    if free is not None and free < _LEAST_FREE_BYTES:
        return Check(
            name=name,
            status="broken",
            finding=f"The disk with {shown} is full: {free / 1e6:.0f} MB are free. {_IN_MEMORY}",
            fix="Make room there, or set $ZFTUNE_DB to a file on another disk.",
            figures={"free_bytes": float(free)},
        )
    state = "is there and can be written" if existing == path else "can be created"
    return Check(name=name, status="ok", finding=f"{shown} {state}.")


def free_bytes(path: Path) -> int | None:
    """Room for this user on a path's file system; None: not known."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def _writable(existing: Path, path: Path) -> bool:
    if existing == path:
        return path.is_file() and os.access(path, os.W_OK) and os.access(path.parent, os.W_OK | os.X_OK)
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


_LAST_KNOWN = numbers(TESTED[-1])


def deepspeed_checks() -> Iterator[Check]:
    """The installed version, then a check for each defect that it has."""
    version = installed("deepspeed")
    if version is None:
        yield Check(
            name="DeepSpeed",
            status="absent",
            finding="It is not installed: nothing to compare with, and no ds_config to run.",
            fix=f"pip install 'zftune[deepspeed]'; to train with DeepSpeed's own ZenFlow too, add deepspeed=={GOOD}",
        )
        return
    yield _version(version)
    yield from map(_of_its_own_zenflow, defects(version))
    yield _builds(os.environ)
    yield from left_locks(os.environ)


def _version(version: str) -> Check:
    if numbers(version) > _LAST_KNOWN:
        return Check(
            name="DeepSpeed",
            status="note",
            finding=f"{version} is newer than the versions whose defects zftune lists.",
            fix=f"If training differs from what you expect, compare with deepspeed=={GOOD}.",
        )
    return Check(name="DeepSpeed", status="ok", finding=f"{version}.")


def defects(version: str) -> Iterator[Check]:
    """What is known to be wrong with a version of DeepSpeed where its own ZenFlow trains."""
    if scrambles(version):
        yield Check(
            name="ZenFlow weights",
            status="broken",
            finding=(
                f"DeepSpeed {version}'s own ZenFlow scrambles every 2-D weight at ZeRO stages 1 and 2: a pretrained"
                " model starts as noise."
            ),
            fix=f"pip install deepspeed=={GOOD}",
        )
    if numbers(version) <= _LAST_KNOWN:
        yield Check(
            name="ZenFlow 'auto'",
            status="note",
            finding='"update_interval": "auto", the default of DeepSpeed\'s own ZenFlow, turns weights into NaN there.',
            fix='Set a number in the "zenflow" section, such as "update_interval": 4.',
        )


def _of_its_own_zenflow(found: Check) -> Check:
    """A defect as what it is to most, who train with zenflow in its place."""
    finding = f"{found.finding} zenflow, with which `zftune run` trains in its place, does not."
    fix = f"Only to train with DeepSpeed's own ZenFlow: {found.fix}"
    return replace(found, status="note", finding=finding, fix=fix)


_ARCHITECTURE = re.compile(r"\d+\.\d+(\+PTX)?")


def _builds(environment: Mapping[str, str]) -> Check:
    if shutil.which("ninja") is None and installed("ninja") is None:
        return Check(
            name="CPU Adam",
            status="absent",
            finding="There is no ninja: DeepSpeed cannot build its CPU Adam on first use.",
            fix="pip install ninja",
        )
    if not any(shutil.which(compiler) for compiler in ("c++", "g++")):
        return Check(
            name="CPU Adam",
            status="absent",
            finding="There is no C++ compiler: DeepSpeed cannot build its CPU Adam on first use.",
            fix="apt install g++ (or your system's package of it)",
        )
    architectures = environment.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    if unread := [one for one in architectures if not _ARCHITECTURE.fullmatch(one)]:
        return Check(
            name="CPU Adam",
            status="note",
            finding=(
                f"DeepSpeed cannot read {', '.join(unread)} in $TORCH_CUDA_ARCH_LIST: where there is a GPU, it cannot "
                "build its CPU Adam. zenflow, with which `zftune run` trains in its place, does not need it."
            ),
            fix="Name architectures by numbers alone, such as TORCH_CUDA_ARCH_LIST=9.0.",
        )
    return Check(name="CPU Adam", status="ok", finding="A compiler and ninja are there to build it on first use.")


def left_locks(environment: Mapping[str, str]) -> Iterator[Check]:
    """The locks of ops that are, or seem to be, compiled."""
    for lock in extension_locks(environment):
        finding, figures = f"{lock.sentence[0].upper()}{lock.sentence[1:]}", {"age_s": lock.age_s}
        if lock.is_left_over:
            finding += ": every run that needs it waits without end."
            fix = f"{lock.removal} (unless a machine or container that shares the folder is compiling)"
            yield Check(name="op lock", status="broken", finding=finding, fix=fix, stops_training=True, figures=figures)
        else:
            finding += "; runs that need it wait until it is gone."
            yield Check(name="op lock", status="note", finding=finding, figures=figures)


_SHOWN = ("torch", "optuna", "sqlalchemy")
_COMPILERS = ("c++", "g++", "clang++")
_TIMEOUT_S = 5


def software_checks() -> Iterator[Check]:
    """Everything about the software but what belongs to a GPU or to DeepSpeed."""
    yield _python()
    yield from packages(requirements("zftune"))
    yield extras()
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
    """One check for the packages that are there, and one for each that is not, or is too old."""
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
        elif name == "torch" and (reason := _why_not(name)):
            finding = f"{name} {version} is installed and cannot be imported: {reason}."
            fix = f"pip install --force-reinstall '{name}=={version}'"
            yield Check(name=name, status="broken", finding=finding, fix=fix, required=True)
        else:
            good.append((name, version))
    shown = ", ".join(f"{name} {version}" for name, version in good if name in _SHOWN)
    rest = sum(name not in _SHOWN for name, _ in good)
    if good:
        more = f"{shown} and {rest} others" if shown else f"{rest} packages"
        yield Check(name="packages", status="ok", finding=f"{more} are recent enough.", required=True)


def _why_not(name: str) -> str:
    try:
        import_module(name)
    except Exception as error:  # noqa: BLE001 - a half-written file raises what it likes
        reason = str(error).partition("\n")[0].rstrip(".")
        return f"{type(error).__name__}{f': {reason}' if reason else ''}"
    return ""


def extras() -> Check:
    """One for all extras but DeepSpeed's, which has an area of its own, and PostgreSQL's where no server is named."""
    elsewhere = {"deepspeed"} if "://" in os.environ.get("ZFTUNE_DB", "") else {"deepspeed", "postgres"}
    here = {package: extra for package, extra in EXTRAS.items() if extra not in elsewhere}
    lacking = {extra for package, extra in here.items() if find_spec(package) is None}
    if not lacking:
        return Check(name="extras", status="ok", finding=f"Installed: {', '.join(sorted(set(here.values())))}.")
    names = sorted(lacking)
    return Check(
        name="extras",
        status="absent",
        finding=f"Not installed: {', '.join(names)}.",
        fix=f"pip install 'zftune[{','.join(names)}]'",
    )


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
