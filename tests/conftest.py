"""What every test gets: a skip where its machine is missing, and no thread of a test before it."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import fork_server, forked, upstream_ops
from tests.support.seeds import VARIABLE, begin_run
from tests.support.tiers import everything

# Read when torch is imported, here and in children: its threads, two for each core where there are two workers, would
# spend most of a run's time spinning in wait for one another.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if not everything():
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Locks that somebody's trainings left in the user's own folder are no findings of a test.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(upstream_ops.folder()))

_THREADS = "zenflow-"
_JOIN_S = 30.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ)
_SYSTEM = Path(__file__).parent / "system"
_left_out = 0  # tests, in the workers


def _runtime_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith(_THREADS)}


@pytest.fixture(autouse=True)
def _every_thread_of_the_runtime_ends_with_its_test() -> Iterator[None]:
    before = _runtime_threads()
    yield
    if not _runtime_threads() - before:
        return
    gc.collect()  # an optimizer that a test dropped without close() ends with its last reference
    left = _runtime_threads() - before
    for thread in left:
        thread.join(_JOIN_S)
    names = sorted(thread.name for thread in left if thread.is_alive())
    assert not names, f"the test left {names}: close the optimizer or the device"


@pytest.fixture(autouse=True)
def _signals_are_handled_as_before_a_test() -> Iterator[None]:
    """A test that left SIGPIPE at its default would have the next write to a pipe that nobody reads end the worker."""
    before = [signal.getsignal(number) for number in _SIGNALS]
    yield
    assert [signal.getsignal(number) for number in _SIGNALS] == before, "the test left another signal handler"


@pytest.fixture(autouse=True)
def _torch_functions_work_after_a_test() -> Iterator[None]:
    """Without them late weights do not arrive: every later test that reads them would fail."""
    yield
    torch = sys.modules.get("torch")
    assert torch is None or torch._C._is_torch_function_enabled(), "the test left torch functions disabled"


@pytest.fixture(scope="session", autouse=True)
def _what_processes_are_forked_from_ends_with_the_session() -> Iterator[None]:
    yield
    forked.end()
    fork_server.end()


def pytest_configure() -> None:
    if importlib.util.find_spec("hypothesis"):  # tests/system/gpu runs without it, too
        from hypothesis import settings

        settings.register_profile("no clock", deadline=None)  # a machine may be busy
        settings.load_profile("no clock")
    if "ZFTUNE_TEST_OTHER_MACHINE" in os.environ:
        importlib.import_module("tests.support.other_machine")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as behind `nohup` or `&`; children inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    begin_run()


def pytest_report_header() -> list[str]:
    import torch

    seed = f"{VARIABLE}={os.environ[VARIABLE]}"
    gpu = [] if torch.cuda.is_available() else ["torch sees no CUDA device: tests/system/gpu is left out"]
    tier = (
        "all tests"
        if everything()
        else "unit tests and the smoke tests of tests/system; with ZFTUNE_TESTS=all (make test-all) all tests"
    )
    return [seed, *gpu, tier]


@pytest.fixture(autouse=True, scope="module")
def _collections_look_through_one_module_alone() -> Iterator[None]:
    """What is there after the tests of a module stays: mostly what they were the first to import."""
    yield
    _freeze()


def pytest_collection_finish() -> None:
    """What is there now stays: a collection in a test, of which many need one, looks through what came later alone."""
    _freeze()


def _freeze() -> None:
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    global _left_out
    _left_out = max(_left_out, getattr(node, "workeroutput", {}).get("left_out", 0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _left_out:
        terminalreporter.write_line(f"{_left_out} tests were left out for `make test-all` (ZFTUNE_TESTS=all)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    if not everything():
        left_out = [item for item in items if _SYSTEM in item.path.parents and not item.get_closest_marker("smoke")]
        config.hook.pytest_deselected(items=left_out)
        kept = set(items) - set(left_out)
        items[:] = [item for item in items if item in kept]
        getattr(config, "workeroutput", {})["left_out"] = len(left_out)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, torch sees none"))
