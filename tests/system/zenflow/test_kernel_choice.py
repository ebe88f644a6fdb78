"""Which kernels a device gets, each time in a process of its own: what is imported there is part of the answer."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from tests.support import forked

BEGIN = """
import os, sys, torch, warnings
import zenflow
from zenflow.errors import ConfigError
from zenflow.kernels import kernels_for
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
def show(device, mode):
    os.environ["ZENFLOW_KERNELS"] = mode
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            print(kernels_for(device).name)
        except ConfigError as error:
            print(error)
    for one in caught:
        print(one.message)
"""
WITHOUT = "import sys; sys.modules['triton'] = None\n"
NOT_LOADED = "print(not [name for name in sys.modules if name.partition('.')[0] == 'triton'])\n"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton cannot be imported here")


def said(script: str, **environment: str) -> list[str]:
    """The lines that a script prints."""
    others = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = forked.run(script, environment=others | environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.smoke
def test_those_of_the_cpu_import_no_triton() -> None:
    script = BEGIN + "show(CPU, ''); show(CPU, 'auto'); show(CPU, 'eager'); show(GPU, 'eager'); show(GPU, 'fast')\n"
    refused = "ZENFLOW_KERNELS is 'fast'; it must be auto or eager or native or triton"
    assert said(script + NOT_LOADED) == ["native", "native", "eager", "eager", refused, "True"]


def test_without_triton_they_are_eager_everywhere() -> None:
    """And a GPU is told so, but where that is what was asked for."""
    script = WITHOUT + BEGIN + "show(GPU, 'eager'); show(CPU, ''); show(GPU, ''); show(GPU, 'triton')"
    *names, slower, refused = said(script)
    assert names == ["eager", "native", "eager"]
    assert slower.startswith("device updates run in PyTorch, several times slower: No module named 'triton")
    assert refused.startswith("ZENFLOW_KERNELS is 'triton'; it must be auto or eager: No module named 'triton")


WITHOUT_NATIVE = "import sys; sys.modules['zenflow._native'] = None\n"


@pytest.mark.smoke
def test_without_the_native_module_they_are_eager_on_the_cpu() -> None:
    script = WITHOUT_NATIVE + BEGIN + "show(CPU, ''); show(CPU, 'native')"
    name, refused = said(script)
    assert name == "eager"
    assert refused.startswith(
        "ZENFLOW_KERNELS is 'native'; it must be auto or eager: zenflow's native module cannot be"
    )


@pytest.mark.smoke
def test_the_native_module_can_be_off_or_required() -> None:
    off = ["eager", "ZENFLOW_KERNELS is 'native'; it must be auto or eager: ZENFLOW_NATIVE is 'off'"]
    assert said(BEGIN + "show(CPU, ''); show(CPU, 'native')", ZENFLOW_NATIVE="off") == off
    script = (
        WITHOUT_NATIVE
        + BEGIN
        + "from zenflow.errors import HostEngineError\n"
        + ("try: show(CPU, '')\nexcept HostEngineError as error: print(error)\n")
    )
    (refused,) = said(script, ZENFLOW_NATIVE="require")
    assert refused.startswith("zenflow's native module cannot be loaded")


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here, on which Triton works")
def test_elsewhere_they_are_triton_where_it_launches_a_kernel() -> None:
    """On a GPU that is not there the launch fails for real, and says why."""
    script = BEGIN + "show(GPU, ''); show(GPU, 'triton'); show(CPU, 'triton')"
    name, slower, refused, on_cpu = said(script)
    why = "triton cannot launch a kernel on cuda:0: "
    assert name == "eager"
    assert slower.startswith(f"device updates run in PyTorch, several times slower: {why}")
    assert refused.startswith(f"ZENFLOW_KERNELS is 'triton'; it must be auto or eager: {why}")
    assert on_cpu == "ZENFLOW_KERNELS is 'triton'; on cpu it must be auto or eager"


LAUNCH = """
import os, torch
from zenflow.errors import UnsupportedError
from zenflow.kernels.base import EagerKernels
from zenflow.kernels.triton_launch import TritonKernels, require_launch
def launch(kernels, **environment):
    os.environ |= environment
    try:
        print(require_launch(kernels, torch.device("cpu")))
    except UnsupportedError as error:
        print(error)
"""


@needs_triton
def test_why_no_kernel_can_be_launched(tmp_path: Path) -> None:
    """Without a compiler, with one that fails, and without Python's headers."""
    script = """
import sysconfig
torch.cuda.is_available = lambda: True  # so that Triton takes its driver for CUDA, a C module that it builds first
launch(TritonKernels(), CC="/nowhere/cc")
launch(TritonKernels(), CC="false")
sysconfig.get_path = lambda *names: "/nowhere"
launch(TritonKernels())
del os.environ["CC"]
launch(TritonKernels(), PATH="/nowhere")
"""
    (tmp_path / "libcuda.so.1").touch()  # looked for, but not used before that module is there
    paths = {"TRITON_LIBCUDA_PATH": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    reasons = [
        "[Errno 2] No such file or directory: '/nowhere/cc'",
        "false failed to build a C module for Python",
        "false failed to build a C module for Python, and Python.h is not in /nowhere",
        "Failed to find C compiler. Please specify via CC environment variable",
    ]
    for line, why in zip(said(LAUNCH + script, **paths), reasons, strict=True):
        assert line.startswith(f"triton cannot launch a kernel on cpu: {why}")


@needs_triton
def test_a_kernel_that_does_something_else_was_not_launched() -> None:
    script = """
class Zero(EagerKernels):
    def pack(self, matrix, columns, into=None):
        return torch.zeros(len(columns), len(matrix))
launch(EagerKernels())
launch(Zero())
"""
    assert said(LAUNCH + script) == [
        "None",
        "eager's first kernel on cpu gave [0.0, 0.0, 1.0, 4.0], not what it should",
    ]
