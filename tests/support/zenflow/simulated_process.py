"""The process in which tests marked `simulated_cuda` run: one for each worker, forked from the fork_server.

A backend of torch is registered before the first backward of a process and stays, so the other tests are kept from it.
A marked test is sent there with its arguments, which have to be picklable; its fixtures and marks are this process's.
An argument `gpu` is a `SimulatedCuda` of its own; a test fails where problems are left in it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import os
import pickle
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from tests.support import fork_server

_JOIN_S = 30.0

_process: Any = None
_link: Connection | None = None


class FailedThereError(AssertionError):
    """A test failed in the other process; its message is what was raised there, with the traceback."""


def call(module: str, name: str, arguments: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Call a test function in the process.

    Args:
        module: that has the function.
        name: of the function, or of a class and its method with a dot in between.
        arguments: for the function, without `gpu`.
        settings: for `simulated_cuda`.

    Raises:
        FailedThereError: the test failed, or the process ended.
    """
    link = _begun()
    link.send((module, name, pickle.dumps(dict(arguments)), dict(settings)))
    try:
        failed = link.recv()
    except EOFError:
        end()
        raise FailedThereError("the process of the simulated device has ended") from None
    except BaseException:  # out of time: what it answers later is of this test
        end()
        raise
    if failed is not None:
        raise FailedThereError(failed)


def end() -> None:
    """End the process, if it has begun."""
    global _process, _link
    if _link is not None:
        _link.close()
        _process.kill()
        _process.join()
    _process = _link = None


def _begun() -> Connection:
    global _process, _link
    if _link is None:
        context = fork_server.context()
        _link, there = context.Pipe()
        _process = context.Process(target=_serve, args=(there,), daemon=True)
        _process.start()
        there.close()
    return _link


# --- in that process ------------------------------------------------------------------------------------------------


def _serve(link: Connection) -> None:
    os.environ.update(TRITON_INTERPRET="1", ZENFLOW_NATIVE="require")
    for name in [one for one in sys.modules if one.split(".")[0] == "triton" and not one.startswith("triton._C")]:
        del sys.modules[name]  # imported without its interpreter; the part in C++ is the same
    warnings.simplefilter("error")
    warnings.filterwarnings(
        "ignore", category=RuntimeWarning
    )  # Triton's interpreter is numpy, which tells of overflows
    while True:
        try:
            module, name, arguments, settings = link.recv()
        except EOFError:
            return
        failed = None
        with contextlib.redirect_stdout(io.StringIO()) as said:
            try:
                _run(_function(module, name), arguments, settings)
            except BaseException:  # noqa: BLE001 - the other process raises it
                failed = traceback.format_exc()
        link.send(failed and said.getvalue() + failed)


def _function(module: str, name: str) -> Callable[..., None]:
    owner: Any = importlib.import_module(module)
    *classes, function = name.split(".")
    for one in classes:
        owner = getattr(owner, one)()
    method: Callable[..., None] = getattr(owner, function)
    return method


def _run(function: Callable[..., None], pickled: bytes, settings: dict[str, Any]) -> None:
    from tests.support.zenflow.simulated_cuda import simulated_cuda

    takes = function.__code__.co_varnames[: function.__code__.co_argcount + function.__code__.co_kwonlyargcount]
    with simulated_cuda(**settings) as gpu:
        arguments = pickle.loads(pickled)  # here, since kernels are chosen by launching one
        function(**arguments, **({"gpu": gpu} if "gpu" in takes else {}))
        gc.collect()  # what ends with its last reference is looked at, too
        gpu.require_clean()
    for thread in (one for one in threading.enumerate() if one.name.startswith("zenflow-")):
        thread.join(_JOIN_S)
        assert not thread.is_alive(), f"the test left {thread.name}: close the optimizer"
