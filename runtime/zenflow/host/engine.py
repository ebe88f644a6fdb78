"""The host engine as the training thread sees it: jobs go in, results cross the link by themselves.

A job waits for its inputs, is done by the backend, and its result goes back over the link as soon as it is both
finished and asked for. One thread feeds the backend, so that it always has work whose inputs are there; another takes
what is finished, so that buckets become visible one by one. Neither works itself (but in the eager fallback).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from zenflow.clock import Event, Queue, Thread
from zenflow.device import Device, HostSpan, Mark, Transfer
from zenflow.errors import HostEngineError
from zenflow.host.backend import Backend
from zenflow.host.places import OwnProcess, finalize
from zenflow.host.tasks import StartGate, Task
from zenflow.signals import look_for_signals


class ReadyFirst:
    """An iterator over jobs that do not depend on each other, listed in the order in which their results are needed.

    It looks at the inputs only when the device has produced all of them, and when the job before the last one is
    finished: the engine then has one job to go on with, and inputs have had all the time that there is to arrive.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        *,
        last_arrives_first: bool,
        patience: Callable[[Sequence[Job]], bool] | None,
        produced: Callable[[], None],
        engine_works: Callable[[], bool],
    ) -> None:
        """`last_arrives_first`: the inputs of the last job arrive first; else those of the first.

        `patience` is asked once, in the beginning, whether the foremost is waited for in any case; None: it is not.
        `produced` blocks until the device has produced all inputs, which may still be on their way then.
        """
        self._left = list(jobs)
        self._otherwise = -1 if last_arrives_first else 0
        self._patience = patience
        self._patient = False
        self._produced: Callable[[], None] | None = produced
        self._engine_works = engine_works
        self._last: Job | None = None
        self._before_last: Job | None = None

    def __iter__(self) -> Iterator[Job]:
        return self

    def __next__(self) -> Job:
        if not self._left:
            raise StopIteration
        produced, self._produced = self._produced, None
        if produced is not None:
            self._begin(produced)
        if self._patient:
            return self._left.pop(0)
        if self._before_last is not None:
            self._before_last.join(self._engine_works)
        there = (place for place, job in enumerate(self._left) if inputs_are_there(job))
        job = self._left.pop(next(there, self._otherwise))
        self._before_last, self._last = self._last, job
        return job

    def _begin(self, produced: Callable[[], None]) -> None:
        try:
            produced()  # the training thread is ahead of the device by up to a step
            for transfer in _shared_by(self._left):  # such as the step's clipping factor, behind all gradients
                transfer.wait()
            self._patient = self._patience is not None and self._patience(self._left)
        except Exception:  # noqa: BLE001 - whoever starts the first job waits for its inputs, and is told then
            self._patient = True


def _shared_by(jobs: Sequence[Job]) -> list[Transfer]:
    """The inputs without which none of several jobs can begin."""
    first, *others = jobs
    return [one for one in first.inputs if all(one in job.inputs for job in others)]


def inputs_are_there(job: Job) -> bool:
    """Whether a job could begin."""
    try:
        return all(transfer.done() for transfer in job.inputs)
    except Exception:  # noqa: BLE001 - whoever starts the job waits for them, and is told then
        return True


_TOLD_S = 0.2


class Job:
    """A piece of host work; submitted by the training thread, finished by the engine."""

    def __init__(
        self,
        name: str,
        device: Device,
        tasks: Sequence[Task],
        *,
        nbytes: int,
        inputs: Sequence[Transfer],
        result: torch.Tensor | None = None,
        after: Callable[[], None] | None = None,
        not_before: int = 0,
    ) -> None:
        self.name = name
        self.nbytes = nbytes
        self.inputs = inputs
        self.tasks = tasks
        """Done in this order; none: nothing but a place in the order of jobs."""
        self.result = result
        """Host memory that the work writes and that `ask_result` sends to the device."""
        self.after = after
        """Called when the work is done, in a thread of the engine."""
        self.not_before = not_before
        """The step that must be over before it starts, unless somebody waits for it."""
        self.number = 0
        """Counted from 1 in the order of submission."""
        self.span = HostSpan()
        self.submitted: Mark = device.asked()
        self.delivered: torch.Tensor | None = None
        self.transfer: Transfer | None = None
        self._device = device
        self._is_asked = False
        self._asked: Mark = None
        self.over = device.clock.event(name)
        self._error: HostEngineError | None = None
        self._lock = threading.Lock()

    @property
    def finished(self) -> bool:
        """Whether the engine is through with this job."""
        return self.over.is_set()

    def ask_result(self) -> None:
        """Send the result to the device as soon as it is there."""
        with self._lock:
            if not self._is_asked:
                self._is_asked, self._asked = True, self._device.asked()
                if self.finished and self._error is None:
                    self._send()

    def finish(self, span: HostSpan) -> None:
        """Called by the engine when the work is done; may raise what sending the result raises."""
        self.span = span
        self.tasks = ()  # their memory may be needed elsewhere
        if self.after is not None:
            self.after()
        with self._lock:
            if self._is_asked:
                self._send()
            self.over.set()

    def fail(self, error: HostEngineError) -> None:
        """Called by the engine when the work, or any work before it, could not be done."""
        self._error = error
        self.over.set()

    def join(self, engine_works: Callable[[], bool]) -> None:
        """Block until the engine is through with this job, or does not work any more."""
        while not self.over.wait(self._device.clock.poll_s) and engine_works():
            look_for_signals()

    def wait(self, engine: HostEngine) -> None:
        """Block until the work is done; raises HostEngineError if it failed or the engine is gone."""
        engine.hurry(self)
        self.join(lambda: engine.alive)
        if not self.finished:
            raise HostEngineError(f"the host engine's thread is gone; {self.name} was not finished")
        if self._error is not None:
            raise HostEngineError(str(self._error)) from self._error.__cause__
        self._device.caught_up(self.span)

    def receive(self, engine: HostEngine) -> torch.Tensor:
        """The result on the device; blocks until it is queued and lets the compute stream wait for it.

        Raises HostEngineError if the work failed or the engine is gone, UnsupportedError in a forked child.
        """
        engine.process.require()
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
    """Owns the threads around a backend. Only the training thread submits; jobs run in order of submission.

    Those of a `foremost_first` block run in another order among themselves.

    After a failure nothing more is done: later jobs may build on what is missing, so all of them fail with it.
    """

    def __init__(self, device: Device, backend: Backend) -> None:
        self.backend = backend
        self.process = OwnProcess()
        self._device = device
        clock = device.clock
        self._turnstile = StartGate(clock)
        self._submitted = 0
        self._waiting: Queue[Iterable[Job] | None] = clock.queue("host work")
        self._gathered: list[Job] | None = None
        self._before: Event | None = None
        """That the job which was started last is finished."""
        self._started: Queue[tuple[Job, list[int], Exception | None] | None] = clock.queue("host work that has begun")
        self.last_span = HostSpan()
        self._s_per_byte = 0.0  # of that job
        self._closing = False
        self._failure: HostEngineError | None = None
        self._told = clock.event("the failure of host work")
        self._failed: list[Callable[[HostEngineError], None]] = []
        self._threads = [
            clock.thread(self._feed, "zenflow-feed"),
            clock.thread(self._finish, "zenflow-finish"),
        ]
        for thread in self._threads:
            thread.start()
        # A thread that comes back from native code when the interpreter is gone would end the process badly.
        self._at_exit = finalize(self, _end, self._waiting, self._turnstile, backend, self._threads)

    @property
    def alive(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    @property
    def failed(self) -> bool:
        """Whether a job could not be done."""
        return self._failure is not None

    def on_failure(self, tell: Callable[[HostEngineError], None]) -> None:
        """Have a function told of the first failure, in a thread of the engine."""
        self._failed.append(tell)

    def submit(self, job: Job) -> Job:
        """Queue a job; raises HostEngineError if an earlier one failed or the engine is gone."""
        self.check()
        if not self.alive:
            raise HostEngineError(f"the host engine's thread is gone; {job.name} cannot be submitted")
        self._submitted += 1
        job.number = self._submitted
        if self._gathered is None:
            self._waiting.put([job])
        else:
            self._gathered.append(job)
        return job

    @contextmanager
    def foremost_first(self, *, last_arrives_first: bool, patient: bool) -> Iterator[None]:
        """Run the jobs that are submitted within as their inputs arrive, and of those that could run the foremost.

        They start at the end of the block, and must not depend on each other. `last_arrives_first`: the inputs of the
        last job arrive first; else those of the first. `patient`: the foremost are waited for where the link brings
        them soon, since what is done instead is not interrupted for them.
        """
        gathered: list[Job] = []
        self._gathered = gathered
        try:
            yield
        finally:
            self._gathered = None
            submitted = self._device.asked()
            for job in gathered:
                job.submitted = submitted
            jobs = ReadyFirst(
                gathered,
                last_arrives_first=last_arrives_first,
                patience=self._rest_comes_soon if patient else None,
                produced=partial(self._device.wait_for, self._device.mark()),
                engine_works=self._works,
            )
            self._waiting.put(jobs)

    def _rest_comes_soon(self, jobs: Sequence[Job]) -> bool:
        """Whether all inputs are there before two jobs could be done; so many may be chosen too early."""
        # What is missing is the newest gradient, which is as large as the result.
        coming = sum(job.result.nbytes for job in jobs if job.result is not None and not inputs_are_there(job))
        past = [job.inputs[0] for job in jobs if job.inputs and job.inputs[0].done()]
        past_bytes = sum(transfer.nbytes for transfer in past)
        if not coming or not past_bytes:
            return not coming
        link_s = sum(self._device.elapsed_s(transfer.begin, transfer.end) for transfer in past) * coming / past_bytes
        host_s = self._s_per_byte * sum(job.nbytes for job in jobs) / len(jobs)
        return link_s <= 2 * host_s

    def reach(self, step: int) -> None:
        """Say which step is over: jobs that were to wait for it may start."""
        self._turnstile.reach(step)

    def hurry(self, job: Job | None = None) -> None:
        """Start a job and those before it as soon as possible; None: all that were submitted."""
        self._turnstile.hurry(self._submitted if job is None else job.number)

    def check(self) -> None:
        """Raise an earlier job's HostEngineError, even where nobody waits for it, and notice lost threads."""
        lost = self._failure is None and not self._closing and not self.backend.alive
        if lost and not self._told.wait(_TOLD_S):  # whoever waits for the job that the lost thread was at can name it
            self._fail("the host engine", RuntimeError("a thread of the host engine is gone"))
        if self._failure is not None:
            raise HostEngineError(str(self._failure)) from self._failure.__cause__

    def drain(self) -> None:
        """Block until all that was submitted is done; raises HostEngineError if a job failed or the engine is gone."""
        self.submit(Job("draining the host engine", self._device, (), nbytes=0, inputs=[])).wait(self)

    def drained_within(self, seconds: float) -> bool:
        """Whether all that was submitted is done after at most so long; raises HostEngineError if a job failed."""
        job = self.submit(Job("draining the host engine", self._device, (), nbytes=0, inputs=[]))
        self.hurry(job)
        return job.over.wait(seconds)

    def stop(self) -> None:
        """Ask the threads to end after the job that is being done; jobs behind it fail. Any thread may call it.

        Does nothing in a forked child, as `close`: there the locks of threads may be held for ever.
        """
        self._closing = True
        if not self.process.is_this:
            return
        self._waiting.put(None)
        self._turnstile.open()
        self.backend.stop()

    def close(self) -> None:
        """End the threads after the job that is being done, and wait for them."""
        self.stop()
        if self.process.is_this:
            for thread in self._threads:
                thread.join()
            self.backend.close()

    def _feed(self) -> None:
        self._enter_thread()
        while (jobs := self._waiting.get()) is not None:
            for job in jobs:
                self._turnstile.wait(job.number, job.not_before)
                self._guarded(job, self._start)
                del job  # while idle, the last job's tensors must not be kept
            del jobs
        self._started.put(None)

    def _works(self) -> bool:
        return not self._closing and self.alive

    def _start(self, job: Job) -> None:
        if self._failure is not None:
            job.fail(self._failure)
            return
        if self._closing:
            raise HostEngineError("the host engine was closed")
        for transfer in job.inputs:
            transfer.wait()
        if self._device.clock.simulated:  # the rig's host has not come to it, however fast this one is
            while self._before is not None and not self._before.wait(self._device.clock.poll_s) and self._works():
                pass
            self._before = job.over
        tickets: list[int] = []
        refused: Exception | None = None
        try:
            tickets.extend(self.backend.start(task) for task in job.tasks)  # those before a refusal are kept
        except RuntimeError as error:
            refused = error  # of a job before this one, which is to be told first
        self._started.put((job, tickets, refused))

    def _finish(self) -> None:
        self._enter_thread()
        while (started := self._started.get()) is not None:
            job, tickets, refused = started
            self._guarded(job, partial(self._complete, tickets, refused))
            del job, started

    def _complete(self, tickets: Sequence[int], refused: Exception | None, job: Job) -> None:
        failed = self._failure is not None
        span = HostSpan()
        if tickets:
            finish = partial(self._finished, tickets)
            # Even after a failure: until then the backend may be using the job's memory.
            span = finish() if failed else self._device.host_work(finish, job.nbytes, job.inputs, job.submitted)
        if refused is not None and not failed:
            raise refused
        if self._failure is not None:
            job.fail(self._failure)
            return
        if job.tasks:
            self.last_span = span
            self._s_per_byte = span.seconds / job.nbytes if job.nbytes else 0.0
            observer = self._device.observer  # the training thread may take it away
            if observer is not None:
                observer.worked(job.name, span)
        job.finish(span)

    def _finished(self, tickets: Sequence[int]) -> HostSpan:
        """Wait for all of a job's tasks, also where one fails; from the first one's begin to the last one's end."""
        spans: list[HostSpan] = []
        errors: list[RuntimeError] = []
        for ticket in tickets:
            try:
                spans.append(self.backend.finish(ticket))
            except RuntimeError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return HostSpan(spans[0].begin_s, spans[-1].end_s)

    def _guarded(self, job: Job, do: Callable[[Job], None]) -> None:
        try:
            do(job)
        except BaseException as error:  # noqa: BLE001 - raised again in the training thread
            job.fail(self._fail(job.name, error))

    def _enter_thread(self) -> None:
        try:
            self._device.enter_thread()
        except BaseException as error:  # noqa: BLE001 - raised again in the training thread
            self._fail("starting the host engine", error)

    def _fail(self, name: str, error: BaseException) -> HostEngineError:
        if self._failure is None:
            failure = HostEngineError(f"{name} failed: {error}")
            failure.__cause__ = error
            self._failure = failure
            self._told.set()
            for tell in self._failed:
                tell(failure)
        return self._failure


def _end(
    waiting: Queue[Iterable[Job] | None],
    turnstile: StartGate,
    backend: Backend,
    threads: list[Thread],
) -> None:
    waiting.put(None)
    turnstile.open()
    backend.stop()
    for thread in threads:
        if thread is not threading.current_thread():  # which may be the last to know the engine
            thread.join()
    backend.close()
