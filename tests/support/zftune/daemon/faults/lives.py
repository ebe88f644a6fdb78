"""What is forked for a fault, in sessions of their own: a daemon, and a training that logs what its tuner did."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.support.zftune.daemon.runs.loops import ENDS_S, Loop
from zftune.daemon.client import session
from zftune.daemon.client.driver import DaemonDriver
from zftune.daemon.client.http import DaemonClient
from zftune.daemon.client.worker import RemoteWorker
from zftune.daemon.process import Options
from zftune.daemon.process import serve as serve_daemon
from zftune.daemon.runs.api import Runs
from zftune.daemon.runs.registry import Registry
from zftune.daemon.server.answers import Service
from zftune.store import open_store, opening
from zftune.tuner.search import SearchOptions
from zftune.tuner.setup import TuneRequest
from zftune.tuner.space import Setting
from zftune.tuner.states import Outcome
from zftune.tuner.tuner import Tuner

SLOW_S, FAST_S = 0.003, 0.0015
"""What a step takes at least under the knobs that training begins with, and under others: a search finds these."""


def serve(folder: str, environment: Mapping[str, str], lease_s: float, busy_s: float, most_bytes: int) -> None:
    """Be the daemon; no file that it writes grows beyond `most_bytes` (0: any)."""
    _leave(Path(folder) / "daemon.log", environment)
    if most_bytes:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    opening.BUSY_TIMEOUT_S = busy_s

    @contextmanager
    def host() -> Iterator[Sequence[Service]]:
        yield [Runs(Registry(open_store, lease_s=lease_s))]

    serve_daemon(Options(idle_exit_s=120.0), host)  # where the tests themselves are killed


def train(folder: str, name: str, environment: Mapping[str, str], given: Mapping[str, Any]) -> None:
    """Train until a file says that it is enough. `given`: `most` measurements, and whether `fresh`."""
    _leave(Path(folder) / f"{name}.log", environment)
    torch.set_num_threads(1)  # threads that spin for work take the cores that others need
    session._LONGEST_BACKOFF_S = 0.2
    session.QUICK_S = 0.02
    training = _Tuned(Path(folder) / name, given)
    try:
        training.run()
    finally:
        training.loop.close()


def replay(changes: Sequence[tuple[int, Mapping[str, Any]]], steps: int) -> list[torch.Tensor]:
    """The weights of the same training, untuned. `changes`: the step after which knobs hold, and these."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    loop = Loop(None)
    before = {step - 1: knobs for step, knobs in changes}  # `set_knobs` returns the step that comes next
    try:
        while loop.optimizer.steps < steps:
            if loop.optimizer.steps in before:
                loop.optimizer.set_knobs(**before[loop.optimizer.steps])
            loop.step()
        return weights(loop)
    finally:
        loop.close()
        torch.set_num_threads(threads)


def weights(loop: Loop) -> list[torch.Tensor]:
    """With all updates applied: until the next forward pass some may still be on their way."""
    loop.optimizer.flush()
    return [one.detach().clone() for one in loop.module.parameters()]


class _Tuned:
    """A training that is tuned by a daemon."""

    def __init__(self, path: Path, given: Mapping[str, Any]) -> None:
        self.loop, self._path = Loop(None), path
        self._own = Setting.of(self.loop.optimizer.config)
        self._stop = path.with_suffix(".stop")
        self._alive = os.open(path.with_suffix(".alive"), os.O_WRONLY | os.O_CREAT)
        self._changed = os.open(path.with_suffix(".changes"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._write_down_what_is_handed()
        self.loop.tuner = self._attached(given)

    def run(self) -> None:
        ends = time.monotonic() + ENDS_S
        while not self._stop.exists():
            assert time.monotonic() < ends, "nobody ends it"
            self.loop.step()
            self._say()
            time.sleep(SLOW_S if self.loop.knobs == self._own else FAST_S)
        assert self.loop.tuner is not None
        self._tuned_steps = self.loop.optimizer.steps
        self.loop.tuner.close()
        self.loop.step()  # the last change holds
        self._write()

    def _attached(self, given: Mapping[str, Any]) -> Tuner:
        # As `attach` does it, but with options of the search.
        search = SearchOptions(sampler="random", most_measurements=given["most"], hold=True)
        wishes = TuneRequest(quality="published", sequence=16, fresh=given["fresh"], search=search)
        counsel = DaemonDriver(self.loop.optimizer, wishes, 16, DaemonClient())
        return Tuner(self.loop.optimizer, counsel, tokens=16, on_change=self._change)

    def _change(self, step: int, knobs: Mapping[str, Any] | None) -> None:
        """Write down a change, or (None) that what was measured is handed over, and its knobs are about to go."""
        os.write(self._changed, (json.dumps([step, knobs and dict(knobs)]) + "\n").encode())

    def _write_down_what_is_handed(self) -> None:
        hand = RemoteWorker.hand

        def handed(worker: RemoteWorker, outcome: Outcome | None) -> None:
            if outcome is not None:
                self._change(self.loop.optimizer.steps, None)
            hand(worker, outcome)

        RemoteWorker.hand = handed  # type: ignore[assignment,method-assign]

    def _say(self) -> None:
        tuner = self.loop.tuner
        assert tuner is not None
        found = {
            "steps": self.loop.optimizer.steps,
            "role": self.loop.live_role,
            "searching": tuner.searching,
            "resting": tuner.live is not None and self.loop.knobs == tuner.incumbent,
        }
        os.pwrite(self._alive, json.dumps(found).ljust(200).encode(), 0)

    def _write(self) -> None:
        tuner = self.loop.tuner
        assert tuner is not None
        torch.save(weights(self.loop), self._path.with_suffix(".pt"))
        found = {
            "steps": self.loop.optimizer.steps,
            "tuned_steps": self._tuned_steps,
            "notices": tuner.notices,
            "incumbent": tuner.incumbent.knobs(),
            "knobs": self.loop.knobs.knobs(),
            "balanced": all(one.balanced for one in self.loop.optimizer.ledger().values()),
        }
        written = self._path.with_suffix(".new")
        written.write_text(json.dumps(found))
        written.rename(self._path.with_suffix(".json"))


def _leave(log: Path, environment: Mapping[str, str]) -> None:
    """Belong to nobody; what is said goes into a file."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - for as long as the process
