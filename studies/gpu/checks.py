"""The project's own GPU tests, each outcome on disk as it comes; a test that fails is a broken invariant."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu.record import Record

if TYPE_CHECKING:
    from gpu.bench import Bench, Size

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "ZFTUNE_GPU_OUTCOMES"
"""Where outcomes are written in a run of pytest that has this module as its plugin."""
NO_VERDICT = ("OutOfMemoryError", "MemoryError", "HostMemoryError", "ImportError", "ModuleNotFoundError")
"""Exceptions that say that a test could not run."""
_KERNELS = "tests/system/gpu/test_kernels_gpu.py"
_ON_THE_STUB = "tests/system/zenflow/test_simulated_cuda.py::TestOnTheSimulatedGpu"
_SANITIZED = "repeats_bitwise and (windows or zero-offload or part)"
_POLL_S = 0.2


def invariants(record: Record, bench: Bench, _: Size) -> None:
    """Runtime and timeline; on the stub a few cases of each."""
    if bench.simulated:
        run_tests(record, [_ON_THE_STUB, "-k", "i1_synchronous or timed"], environment={"ZFTUNE_TESTS": ""})
    else:
        run_tests(record, _runtime_tests(), workers=8)


def sanitizer(record: Record, bench: Bench, _: Size) -> None:
    """Some of them again under torch's own checker of streams, which sees PyTorch's kernels and not Triton's."""
    if bench.simulated:
        record.refuse("TORCH_CUDA_SANITIZER knows CUDA alone; the simulated device has a checker of its own")
        return
    more = {"TORCH_CUDA_SANITIZER": "1", "ZENFLOW_KERNELS": "eager"}
    run_tests(record, [*_runtime_tests(), "-k", _SANITIZED], environment=more)


def kernel_tests(record: Record, bench: Bench, _: Size) -> None:
    """Every kernel beside its oracle; most of the time is the compiler's."""
    if bench.simulated:
        record.refuse("Triton compiles nothing for the simulated device")
        return
    run_tests(record, [_KERNELS], workers=12)


def _runtime_tests() -> list[str]:
    files = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "tests" / "gpu").glob("test_*.py"))
    return [file for file in files if file != _KERNELS]


def run_tests(
    record: Record, arguments: Sequence[str], *, workers: int = 1, environment: Mapping[str, str] | None = None
) -> None:
    """Run pytest in a process of its own, and keep each outcome when it is there.

    Args:
        record: of the part.
        arguments: for pytest: files, and which of their tests.
        workers: processes, where pytest-xdist is installed.
        environment: beside this process's.
    """
    if importlib.util.find_spec("pytest") is None:
        record.refuse("pytest is not installed")
        return
    outcomes = record.path.with_suffix(".jsonl")
    outcomes.write_text("", encoding="utf-8")
    # None of the project's own options: plugins may be missing, and a warning of a newer torch breaks no invariant.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "gpu.checks"]
    command += ["-o", "addopts=", "-o", "filterwarnings=", "--import-mode=importlib", *arguments]
    if workers > 1 and importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(workers)]
    began = time.monotonic()
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}  # of a worker
    process = subprocess.Popen(command, cwd=ROOT, env={**own, **(environment or {}), VARIABLE: str(outcomes)})
    counted = Counter[str]()
    with outcomes.open(encoding="utf-8") as lines:
        while True:
            over = process.poll() is not None  # before the last look
            if _keep(record, lines.read().splitlines(), counted):
                record.note("tests", dict(counted))
            if over:
                break
            time.sleep(_POLL_S)
    record.note("seconds", round(time.monotonic() - began, 1))
    if process.returncode not in (0, 1):
        record.failed("pytest", f"it ended with {process.returncode}; see {record.path.stem}.log")
    elif not counted:
        record.failed("pytest", "no test ran")


def _keep(record: Record, lines: Sequence[str], counted: Counter[str]) -> bool:
    """Judge what is new; whether there was something."""
    for line in lines:
        outcome = json.loads(line)
        counted[outcome["outcome"]] += 1
        if outcome["outcome"] != "failed":
            continue
        error = outcome["error"]
        if outcome["when"] == "call" and not error.partition(":")[0].endswith(NO_VERDICT):
            record.hold(outcome["id"], False, error)
        else:
            record.failed(outcome["id"], error)
    return bool(lines)


def pytest_runtest_logreport(report: Any) -> None:
    """A hook of pytest: write an outcome down. Workers leave it to the process that they report to."""
    path = os.environ.get(VARIABLE)
    if path is None or "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.outcome == "passed"):
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    error = str(report.longrepr or "") if crash is None else str(crash.message)
    outcome = {"id": report.nodeid, "when": report.when, "outcome": report.outcome, "error": error.partition("\n")[0]}
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps(outcome) + "\n")
