"""The host engine: applies windows to the deferred columns on a worker thread, in eager PyTorch.

One thread runs jobs in the order in which they were submitted. A job waits for its inputs, does its work, and its
result goes back over the link as soon as it is both finished and asked for.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from zenflow.device import Device, HostSpan, Mark, Transfer
from zenflow.errors import HostEngineError
from zenflow.rules import AdamW, AdamWHyper
from zenflow.state import ColumnState

_POLL_S = 0.2


@dataclass(slots=True)
class Control:
    """A step's device scalars on the host: factor on the gradient, and whether the step is skipped."""

    values: torch.Tensor
    """[2] fp32 in host memory: factor, skip (0 or 1)."""
    transfer: Transfer


@dataclass(slots=True)
class LogEntry:
    """One step's gradient of one bucket, on its way to the host or there."""

    step: int
    rows: torch.Tensor
    """[slots, rows] in the gradient's dtype, in host memory."""
    transfer: Transfer
    hyper: AdamWHyper
    control: Control | None
    """None: factor 1, not skipped."""


class Job:
    """A piece of host work; submitted by the training thread, finished by the worker."""

    def __init__(
        self,
        name: str,
        device: Device,
        work: Callable[[], None],
        *,
        nbytes: int,
        inputs: Sequence[Transfer],
        result: torch.Tensor | None = None,
    ) -> None:
        self.name = name
        self.nbytes = nbytes
        self.inputs = inputs
        self.work = work
        self.result = result
        """Host memory that the work writes and that `ask_result` sends to the device."""
        self.span = HostSpan()
        self.submitted: Mark = device.mark()
        self.delivered: torch.Tensor | None = None
        """Device memory that the result arrives in, once the copy was queued."""
        self.transfer: Transfer | None = None
        self._device = device
        self._asked: Mark | None = None
        self._finished = threading.Event()
        self._error: HostEngineError | None = None
        self._lock = threading.Lock()

    @property
    def finished(self) -> bool:
        """Whether the worker is through with this job."""
        return self._finished.is_set()

    def ask_result(self) -> None:
        """Send the result to the device as soon as it is there."""
        with self._lock:
            if self._asked is None:
                self._asked = self._device.mark()
                if self.finished and self._error is None:
                    self._send()

    def finish(self) -> None:
        """Called by the worker when the work is done; may raise what sending the result raises."""
        with self._lock:
            if self._asked is not None:
                self._send()
            self._finished.set()

    def fail(self, error: HostEngineError) -> None:
        """Called by the worker when the work, or any work before it, could not be done."""
        self._error = error
        self._finished.set()

    def wait(self, engine: HostEngine) -> None:
        """Block until the work is done.

        Raises:
            HostEngineError: the work failed, or the worker is gone.
        """
        while not self._finished.wait(_POLL_S):
            if not engine.alive and not self.finished:
                raise HostEngineError(f"the host engine's thread is gone; {self.name} was not finished")
        if self._error is not None:
            raise HostEngineError(str(self._error)) from self._error.__cause__
        self._device.caught_up(self.span)

    def receive(self, engine: HostEngine) -> torch.Tensor:
        """The result on the device; blocks until it is queued and lets the compute stream wait for it.

        Raises:
            HostEngineError: the work failed, or the worker is gone.
        """
        self.ask_result()
        self.wait(engine)
        if self.transfer is None or self.delivered is None:
            raise HostEngineError(f"{self.name} has no result to send")
        self._device.join(self.transfer, self.delivered)
        return self.delivered

    def _send(self) -> None:
        if self.result is not None:
            self.transfer, self.delivered = self._device.h2d(self.result, self.span, self._asked)


class HostEngine:
    """Owns the worker thread. Only the training thread submits; jobs run in order of submission.

    After a failure nothing more is done: later jobs may build on what is missing, so all of them fail with it.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._closing = False
        self._failure: HostEngineError | None = None
        self._thread = threading.Thread(target=self._run, name="zenflow-host", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the worker runs."""
        return self._thread.is_alive()

    def submit(self, job: Job) -> Job:
        """Queue a job.

        Raises:
            HostEngineError: an earlier job failed, or the worker is gone.
        """
        self.check()
        if not self.alive:
            raise HostEngineError(f"the host engine's thread is gone; {job.name} cannot be submitted")
        self._queue.put(job)
        return job

    def check(self) -> None:
        """Raise the failure of an earlier job, even where nobody waits for it.

        Raises:
            HostEngineError: naming the job and its cause.
        """
        if self._failure is not None:
            raise HostEngineError(str(self._failure)) from self._failure.__cause__

    def drain(self) -> None:
        """Block until all that was submitted is done.

        Raises:
            HostEngineError: a job failed, or the worker is gone.
        """
        self.submit(Job("draining the host engine", self._device, lambda: None, nbytes=0, inputs=[])).wait(self)

    def stop(self) -> None:
        """Ask the worker to end after the job that it is at; jobs behind it fail. Any thread may call it."""
        self._closing = True
        self._queue.put(None)

    def close(self) -> None:
        """End the worker after the job that it is at, and wait for it."""
        self.stop()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._device.enter_thread()
        except BaseException as error:  # noqa: BLE001 - raised again in the training thread
            self._fail("starting the host engine", error)
        while (job := self._queue.get()) is not None:
            if self._failure is None:
                try:
                    self._do(job)
                except BaseException as error:  # noqa: BLE001 - raised again in the training thread
                    self._fail(job.name, error)
            if self._failure is not None:
                job.fail(self._failure)
            del job  # while idle, the last job's tensors must not be kept

    def _do(self, job: Job) -> None:
        if self._closing:
            raise HostEngineError("the host engine was closed")
        for transfer in job.inputs:
            transfer.wait()
        with torch.no_grad(), self._device.host_work(job.nbytes, job.inputs, job.submitted) as span:
            job.work()
        job.span = span
        job.finish()

    def _fail(self, name: str, error: BaseException) -> None:
        failure = HostEngineError(f"{name} failed: {error}")
        failure.__cause__ = error
        self._failure = failure


def apply_entries(
    state: ColumnState,
    rule: AdamW,
    entries: Sequence[LogEntry],
    rows: Sequence[torch.Tensor],
    closing: AdamWHyper,
    deferred_update: str,
) -> None:
    """Apply a window's entries to columns on the host, in place.

    Args:
        state: n columns.
        rule: the update rule.
        entries: the entries in order of their steps; those of skipped steps are passed over.
        rows: for each entry, its gradient of these columns, [n, rows].
        closing: hyperparameters of the step that closed the window.
        deferred_update: "replay" or "mean" (one update with the mean gradient, ZenFlow paper).
    """
    live: list[tuple[torch.Tensor, AdamWHyper, float | None]] = []
    for entry, gradient in zip(entries, rows, strict=True):
        factor, skip = (None, 0.0) if entry.control is None else entry.control.values.tolist()
        if not skip:
            live.append((gradient, entry.hyper, factor))
    if not live:
        return

    def replay(part: ColumnState, low: int, high: int) -> None:
        for gradient, hyper, factor in live:
            part.update(rule, _gradient(gradient[low:high], factor), hyper)

    def mean(part: ColumnState, low: int, high: int) -> None:
        total = _gradient(live[0][0][low:high], live[0][2]).clone()
        decay = live[0][1].decay
        for gradient, hyper, factor in live[1:]:
            total.add_(_gradient(gradient[low:high], factor))
            decay *= hyper.decay
        part.update(rule, total.div_(len(live)), closing, decay=decay)

    state.each_chunk(mean if deferred_update == "mean" else replay)


def _gradient(rows: torch.Tensor, factor: float | None) -> torch.Tensor:
    gradient = rows.float()
    return gradient if factor is None else gradient.mul(factor)
