"""The threads of the native kernels and their process: one set of them, its end, and what a fork leaves."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support import forked

BEGIN = """
import os, sys, threading, time
from pathlib import Path
import numpy as np
import torch
torch.set_num_threads(4)
from zenflow.host.native import load_native
from zenflow.kernels.base import DevicePart, DeviceWeight
from zenflow.kernels.native import NativeKernels
from zenflow.rules import RULES
from zenflow.state import ColumnState
RULE = RULES["sgd"]
HYPER = RULE.hyper({"lr": 0.5, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False})
def ones(*shape):  # not by torch, whose own threads do not outlive a fork
    return torch.from_numpy(np.ones(shape, np.float32))
STATE = ColumnState(ones(1, 1), 1)
def update(kernels):
    master = ones(1, 1 << 17)
    state = ColumnState.over([master, master], STATE.count)
    weight = DeviceWeight([DevicePart(state, None, None)], 0, master.dtype, 1, torch.Tensor.detach, transposed=False)
    kernels.device_updates(RULE, [weight], torch.Tensor.clone).run([None], [ones(1 << 17)], [HYPER])
    return bool((master.numpy() == 0.5).all())
def helpers(wanted):
    # A new thread takes a moment until it has its name.
    until = time.monotonic() + 30
    while time.monotonic() < until:
        names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
        if names.count("zenflow-kernels") == wanted:
            return True
        time.sleep(0.01)
    return False
"""
MAKE = "one, other = NativeKernels(load_native()), NativeKernels(load_native())\n"
FORKS = 5
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")


def said(script: str, before: str = "", *, started: bool = False) -> list[str]:
    """The lines that a script prints, which ends well and soon. started: not forked, as it forks others itself."""
    script = BEGIN + before + MAKE + script
    if started:
        command = [sys.executable, "-W", "ignore", "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    else:
        done = forked.run(script, warnings="ignore")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.smoke
@needs_proc
def test_all_kernels_of_a_process_share_the_threads() -> None:
    assert said("print(helpers(0), update(one), helpers(3), update(other), helpers(3))") == ["True True True True True"]


@pytest.mark.smoke
@needs_proc
def test_a_forked_child_has_threads_of_its_own() -> None:
    script = """
update(one)
child = os.fork()
if child == 0:
    os._exit(0 if update(one) and helpers(3) else 1)
print(os.waitpid(child, 0)[1], update(one))
"""
    assert said(script) == ["0 True"]


def test_a_child_that_was_forked_while_they_work_ends_as_python_ends() -> None:
    script = f"""
ended = threading.Event()
def work():
    while not ended.is_set():
        update(one)
worker = threading.Thread(target=work)
worker.start()
codes = []
for _ in range({FORKS}):
    child = os.fork()
    if child == 0:
        worker = None
        sys.exit(0 if update(other) else 1)
    codes.append(os.waitpid(child, 0)[1])
ended.set()
worker.join()
print(codes)
"""
    assert said(script, started=True) == [str([0] * FORKS)]


@needs_proc
def test_they_end_with_the_interpreter() -> None:
    """What was registered before them is called after them."""
    before = "import atexit; atexit.register(lambda: print(helpers(0), update(one)))\n"
    assert said("update(one); print(helpers(3))", before) == ["True", "True True"]
