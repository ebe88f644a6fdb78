"""Which kernels a device gets, each time in a process of its own: what is imported there is part of the answer."""

from __future__ import annotations

import importlib.util
import os

import pytest

from tests import forked

BEGIN = """
import os, sys, torch
import zenflow
from zenflow.errors import ConfigError
from zenflow.kernels import kernels_for
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
def show(device, mode):
    os.environ["ZENFLOW_KERNELS"] = mode
    try:
        print(kernels_for(device).name)
    except ConfigError as error:
        print(error)
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


def test_those_of_the_cpu_import_no_triton() -> None:
    script = BEGIN + "show(CPU, ''); show(CPU, 'auto'); show(CPU, 'eager'); show(GPU, 'eager'); show(GPU, 'fast')\n"
    refused = "ZENFLOW_KERNELS is 'fast', allowed is auto, eager, native, triton"
    assert said(script + NOT_LOADED) == ["native", "native", "eager", "eager", refused, "True"]


def test_without_triton_they_are_eager_everywhere() -> None:
    *names, refused = said(WITHOUT + BEGIN + "show(GPU, ''); show(GPU, 'auto'); show(CPU, ''); show(GPU, 'triton')")
    assert names == ["eager", "eager", "native"]
    assert refused.startswith("ZENFLOW_KERNELS is 'triton', allowed is auto or eager: ")


WITHOUT_NATIVE = "import sys; sys.modules['zenflow._native'] = None\n"


def test_native_ones_where_they_can_be() -> None:
    refused = "ZENFLOW_KERNELS is 'native' on cuda:0, allowed is auto or eager there"
    assert said(BEGIN + "show(CPU, 'native'); show(GPU, 'native')") == ["native", refused]


def test_without_the_native_module_they_are_eager_on_the_cpu() -> None:
    script = WITHOUT_NATIVE + BEGIN + "show(CPU, ''); show(CPU, 'native')"
    name, refused = said(script)
    assert name == "eager"
    assert refused.startswith(
        "ZENFLOW_KERNELS is 'native', allowed is auto or eager: zenflow's native module cannot be"
    )


def test_the_native_module_can_be_off_or_required() -> None:
    off = ["eager", "ZENFLOW_KERNELS is 'native', allowed is auto or eager: ZENFLOW_NATIVE is 'off'"]
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
def test_elsewhere_they_are_triton() -> None:
    refused = "ZENFLOW_KERNELS is 'triton' on cpu, allowed is auto or eager there"
    script = BEGIN + "show(GPU, ''); show(GPU, 'triton'); show(CPU, 'triton')"
    assert said(script) == ["triton", "triton", refused]


@needs_triton
def test_in_its_interpreter_triton_runs_on_the_cpu() -> None:
    assert said(BEGIN + "show(CPU, ''); show(CPU, 'triton')", TRITON_INTERPRET="1") == ["native", "triton"]
