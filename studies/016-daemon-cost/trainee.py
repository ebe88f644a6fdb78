"""A process that trains a small model on one thread, a step when it is told to, and stands still otherwise."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

import zftune
from zenflow import ZenFlowAdamW, ZenFlowConfig
from zftune.tuner.space import Setting
from zftune.workload import batches, build_model, load_text

CONFIG = ZenFlowConfig(topk_ratio=0.1, update_interval=4, select_interval=32, host_threads=1)
SIZE: dict[str, Any] = {"model": "tiny", "micro_batch": 4, "sequence": 88}  # some 50 ms a step on one thread
_ANSWER_S = 120.0


class Clocked(ZenFlowAdamW):
    """Knows how long changes of its knobs have taken."""

    changing_s = 0.0

    def set_knobs(self, **knobs: Any) -> int:
        begin_s = time.perf_counter()
        try:
            return super().set_knobs(**knobs)
        finally:
            self.changing_s += time.perf_counter() - begin_s


class Training:
    """A model that trains on one thread, under a tuner or not; it lives in the trainee's process."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        workload = build_model(SIZE["model"], dtype=torch.float32, seed=0)
        self._module = workload.module
        self._optimizer = Clocked(self._module.parameters(), lr=1e-5, config=CONFIG, module=self._module)
        tokens = workload.encode(load_text(None))
        self._feed = batches(tokens, micro_batch=SIZE["micro_batch"], sequence=SIZE["sequence"], seed=0)
        self._cores = os.sched_getaffinity(0)
        self._tuner: zftune.Tuner | None = None
        self._begun_s = self._taken_s = 0.0
        self._optimizer.register_step_post_hook(self._begin)
        self._last_hook: RemovableHandle | None = None
        self._changes = 0
        self._own = True

    def attach(self, most_measurements: int) -> None:
        """Let the daemon tune it."""
        first = Setting.of(CONFIG).knobs()

        def changed(_: int, knobs: Mapping[str, Any]) -> None:
            self._changes += 1
            self._own = all(first[name] == value for name, value in knobs.items() if name in first)

        self._tuner = zftune.attach(
            self._optimizer, daemon=True, fresh=True, most_measurements=most_measurements, on_change=changed
        )
        self._last_hook = self._optimizer.register_step_post_hook(self._end)  # the tuner's own is between the two

    def _begin(self, *_: Any) -> None:
        self._optimizer.history(after=self._optimizer.steps)  # resolves what is left to the next step without a tuner
        self._begun_s = time.perf_counter()

    def _end(self, *_: Any) -> None:
        self._taken_s += time.perf_counter() - self._begun_s

    def detach(self) -> None:
        """Take leave of the daemon, if it is tuned; the knobs are those that it began with."""
        if self._tuner is not None:
            self._tuner.close()
            self._tuner = None
        if self._last_hook is not None:
            self._last_hook.remove()
            self._last_hook = None
        if not self._own:
            self._optimizer.set_knobs(**Setting.of(CONFIG).knobs())
            self._own = True

    def train(self, steps: int) -> None:
        """So many steps."""
        for _ in range(steps):
            ids = next(self._feed).input_ids
            loss = self._module(input_ids=ids, labels=ids).loss
            loss.backward()
            begin_s = time.perf_counter()
            zftune.log_loss(loss)  # to whatever tuner is there
            self._taken_s += time.perf_counter() - begin_s if self._tuner else 0.0
            self._optimizer.step()
            self._optimizer.zero_grad()

    def knobs(self) -> tuple[int, bool]:
        """How often they have changed, and whether they are those that it began with."""
        return self._changes, self._own

    def pin(self, first: bool) -> None:
        """Keep the thread that trains on the first core, or let it go: another core has other neighbours."""
        os.sched_setaffinity(threading.main_thread().native_id or 0, {min(self._cores)} if first else self._cores)

    def taken_s(self) -> float:
        """That the thread that trains has spent in the tuner so far, waiting for others and changing knobs included."""
        return self._taken_s

    def changing_s(self) -> float:
        """Of that, what changes of knobs have taken."""
        return self._optimizer.changing_s

    def agent_s(self) -> float:
        """Processor time of the agent's thread so far."""
        found = [thread for thread in threading.enumerate() if thread.name == "zftune-agent" and thread.ident]
        return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0)) for thread in found)


class Trainee:
    """The other end: a training in a process of its own, which can be held still, agent and all."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self.ask("knobs")  # it is there

    def ask(self, what: str, *arguments: Any) -> Any:
        """Call a method of its `Training`.

        Args:
            what: its name.
            arguments: of it.

        Raises:
            TimeoutError: no answer for two minutes.
            EOFError: the process has ended.
        """
        self._pipe.send((what, arguments))
        if not self._pipe.poll(_ANSWER_S):
            raise TimeoutError(f"{what}: no answer for {_ANSWER_S:.0f} s")
        return self._pipe.recv()

    def hold(self, still: bool) -> None:
        """Hold it still, with all its threads, or let it go on."""
        os.kill(self._process.pid or 0, signal.SIGSTOP if still else signal.SIGCONT)

    def close(self) -> None:
        """End it."""
        self.hold(still=False)
        self._pipe.close()  # its end of the pipe is its end
        self._process.join(_ANSWER_S)


def _serve(pipe: Connection) -> None:
    training = Training()
    while True:
        try:
            what, arguments = pipe.recv()
        except EOFError:
            training.detach()
            return
        pipe.send(getattr(training, what)(*arguments))
