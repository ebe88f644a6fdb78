"""Every way to end the native engine, an optimizer and a process with work in the queue."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import textwrap
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.tiers import fast
from tests.support.zenflow.engine_cases import (
    CONFIGS,
    SOON_S,
    Plain,
    engine_threads,
    every_thread_ends,
    make,
    os_threads,
    until,
)
from zenflow import ZenFlowConfig, training
from zenflow.host.eager import EagerBackend


@pytest.fixture(autouse=True)
def no_thread_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(training, "PATIENCE_S", 0.3)
    with every_thread_ends():
        yield


def held_up(**knobs: Any) -> Plain:
    """With windows in the queue behind a thread that is late for ten minutes."""
    plain = Plain(ZenFlowConfig(**{"update_interval": 2, "topk_ratio": 0.0, "host_threads": 3, **knobs}))
    for _ in range(3):
        plain.step()
    plain.optimizer._training.engine.drain()
    plain.inject("delay", 0, 600.0)
    plain.step()
    return plain


@pytest.mark.smoke
def test_ending_with_windows_in_the_queue() -> None:
    threads = os_threads()
    plain = held_up()
    assert engine_threads() == 3
    before, began_s = plain.values(), time.monotonic()
    plain.optimizer.abandon()
    assert time.monotonic() - began_s < SOON_S
    until(lambda: engine_threads() == 0 and os_threads() <= threads)
    assert all(torch.equal(a, b) for a, b in zip(before, plain.values(), strict=True))
    plain.optimizer.abandon()


@pytest.mark.smoke
def test_closing_applies_what_is_queued() -> None:
    results = []
    for late_s in (0.0, 0.2):
        plain = Plain(CONFIGS["windows"])
        for _ in range(7):
            plain.step()
        plain.inject("delay", 1, late_s)
        plain.optimizer.close()
        results.append(plain.values())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_an_optimizer_that_is_dropped_leaves_nothing_behind() -> None:
    threads = os_threads()
    plain = held_up()
    memory = plain.optimizer._training.runtime.memory
    memory._backend = EagerBackend()  # or our own reference would keep the state
    gone: list[weakref.ref[Any]] = [weakref.ref(plain.optimizer), weakref.ref(plain.optimizer._training.engine)]
    gone.append(weakref.ref(plain.optimizer._training.engine.backend))
    assert memory.bytes_by_use["log"] > 0
    del plain
    gc.collect()
    until(lambda: os_threads() <= threads)

    def all_gone() -> bool:
        gc.collect()  # a thread may have been the last to know a part
        return [reference() for reference in gone] == [None] * 3

    until(all_gone)
    assert set(memory.bytes_by_use.values()) == {0}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_many_optimizers_one_after_the_other_keep_no_memory() -> None:
    weight = nn.Parameter(torch.zeros(400, 600, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)

    def cycle(number: int) -> int:
        optimizer = make([weight], ZenFlowConfig(update_interval=2, topk_ratio=0.0, host_threads=2))
        for _ in range(5):
            optimizer.step()
        peak = optimizer.host_bytes()["peak"]
        ends: list[Callable[[], object]] = [optimizer.close, optimizer.abandon, gc.collect]
        ends[number % 3]()
        return peak

    peaks = [cycle(number) for number in range(3)]
    gc.collect()
    before = resident_bytes()
    for number in range(12):
        cycle(number)
    gc.collect()
    assert resident_bytes() - before < 4 * max(peaks)


# The end of a process. One interpreter that has imported everything is forked for each script, as imports are slow.

ZYGOTE = """
import atexit, gc, json, os, signal, sys, tempfile, threading, time
import torch
from torch import nn
from zenflow import CpuDevice, ZenFlowAdamW, ZenFlowConfig
from zenflow import signals, training
from zenflow.host.native import load_native

signals.PATIENCE_S = training.PATIENCE_S = 0.3
load_native()
torch.set_num_threads(1)
torch.optim.AdamW([nn.Parameter(torch.zeros(2))]).step()
gc.collect()
gc.freeze()  # else each end of an interpreter takes seconds

def optimizer_of(weights, interval=2):
    config = ZenFlowConfig(update_interval=interval, topk_ratio=0.0, host_threads=2)
    return ZenFlowAdamW(weights, config=config)

def weights_of(count=3):
    return [nn.Parameter(torch.ones(40, 30)) for _ in range(count)]

def step(optimizer, weights):
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()

def held_up(late_s=600.0):
    weights = weights_of()
    optimizer = optimizer_of(weights)
    for _ in range(3):
        step(optimizer, weights)
    optimizer._training.engine.drain()
    if optimizer.host_engine[0] == "native":
        optimizer._training.engine.backend.engine.inject("delay", 0, late_s)
    step(optimizer, weights)
    return optimizer, weights

running = {}
for name, script in json.load(sys.stdin).items():
    output = tempfile.TemporaryFile()
    child = os.fork()
    if child == 0:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        break
    running[child] = name, output
else:
    deadline, ended = time.monotonic() + 60, {}
    while running and time.monotonic() < deadline:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child == 0:
            time.sleep(0.005)
            continue
        name, output = running.pop(child)
        output.seek(0)
        ended[name] = [os.waitstatus_to_exitcode(status), output.read().decode()]
    for child in running:
        os.kill(child, signal.SIGKILL)
    print(json.dumps(ended))
    os._exit(0)
exec(compile(script, name, "exec"))
"""

IN_A_DAEMON = """
    started = threading.Event()

    def train():
        optimizer, weights = held_up()
        started.set()
        {then}

    threading.Thread(target=train, daemon=True).start()
    started.wait()
    time.sleep(0.1)
"""
FORKED = """
    optimizer, weights = held_up(1.0)
    held, forked = threading.Event(), threading.Event()

    def hold():  # the locks that a thread of the engine may hold just then
        with optimizer._training.engine._turnstile._changed, optimizer._training.runtime.memory._count._lock:
            held.set()
            forked.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    child = os.fork()
    if child == 0:
        {then}
        sys.exit(7)
    forked.set()
    holder.join()
    deadline = time.monotonic() + 30
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(ended[1]) == 7 and ended[0] == child
    undisturbed = weights_of()
    other = optimizer_of(undisturbed)
    for _ in range(4):
        step(other, undisturbed)
    for one, its in ((optimizer, weights), (other, undisturbed)):
        for _ in range(5):
            step(one, its)
        one.flush()
    assert all(torch.equal(a, b) for a, b in zip(weights, undisturbed)) and weights[0][0, 0] < 0.995
"""
SCRIPTS = {
    "queued": "optimizer, weights = held_up()",
    "dropped": "held_up()",
    "exit": "optimizer, weights = held_up(); sys.exit(7)",
    "exception": "optimizer, weights = held_up(); raise ValueError('a bad day')",
    "interrupt": """
        optimizer, weights = held_up()
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        while True:
            step(optimizer, weights)
    """,
    "failed": """
        optimizer, weights = held_up()
        optimizer._training.engine.backend.stop()
        time.sleep(0.1)
    """,
    "eager": "os.environ['ZENFLOW_NATIVE'] = 'off'; optimizer, weights = held_up()",
    "idle daemon": IN_A_DAEMON.format(then="time.sleep(600)"),
    "waiting daemon": IN_A_DAEMON.format(then="step(optimizer, weights); step(optimizer, weights)"),
    "fork": FORKED.format(then="pass"),
    "fork that drops it": FORKED.format(then="del optimizer"),
    "fork that ends it": FORKED.format(then="optimizer.abandon()"),
    "fork that uses it last": FORKED.format(then="atexit.register(optimizer.close)"),
    "loader": """
        from torch.utils.data import DataLoader

        weights = weights_of()
        optimizer = optimizer_of(weights)
        optimizer._training.engine.backend.engine.inject("jitter", 0, 2e-3, 1)
        for epoch in range(2):
            for batch in DataLoader(torch.ones(12, 30), batch_size=2, num_workers=2):
                (batch @ sum(weights).t()).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    """,
}
NAMES = fast(["queued", "fork that uses it last"], all_of=list(SCRIPTS))
CODES = {"exit": 7, "exception": 1, "interrupt": -2}
GIVEN_UP = r"updates were given up at the end: the host did not do them in 0\.3 s\n"
OUTPUTS = {
    **dict.fromkeys(("queued", "dropped", "exit", "idle daemon"), GIVEN_UP),
    "fork that uses it last": r"Exception ignored in atexit [^$]*UnsupportedError: process \d+ was forked [^\n]*\n",
    "exception": r"Traceback [^$]*\nValueError: a bad day\n",
    "interrupt": r"Traceback [^$]*\nKeyboardInterrupt\n",
    # A daemon thread that is still training when the process ends may live to tell why it could not go on.
    "waiting daemon": r"(Exception in thread Thread-1 [^$]*HostEngineError: [^\n]*(closed|gone)[^\n]*\n)?",
}


@pytest.fixture(scope="module")
def ended() -> Any:
    scripts = {name: textwrap.dedent(SCRIPTS[name]) for name in NAMES}
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "ZENFLOW_NATIVE": "require"}
    environment["PYTHONWARNINGS"] = "ignore:This process:DeprecationWarning"  # Python 3.12's, of forks beside threads
    done = subprocess.run(
        [sys.executable, "-c", ZYGOTE],
        input=json.dumps(scripts),
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


@pytest.mark.smoke
@pytest.mark.parametrize("name", NAMES)
def test_a_process_ends_with_work_in_the_queue(name: str, ended: dict[str, tuple[int, str]]) -> None:
    assert name in ended, "it hangs"
    code, output = ended[name]
    assert re.fullmatch(OUTPUTS.get(name, ""), output), output
    assert code == CODES.get(name, 0)
