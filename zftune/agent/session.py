"""What the hooks tell: which optimizer makes the steps, when they begin and end, and when the agent is done.

Hooks run in the training's own call stack. Every method that they call is guarded: whatever fails in it is recorded
once and switches the agent off, and the training goes on.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from zftune.agent.facts import Facts, learning_rates
from zftune.agent.recorder import Cause, Phase, Recorder, Runtime, StepRow, StreamBackend
from zftune.agent.records import RecordFile, Settings
from zftune.frames import FrameSampler
from zftune.losses import Source, StepLosses

if TYPE_CHECKING:
    import torch


class Patches:
    """Remembers what was replaced, so that all of it can be undone."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any, Any, bool]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> bool:
        """Put `make(original)` in an attribute's place.

        Returns:
            Whether there is such an attribute.
        """
        if not hasattr(owner, name):
            return False
        original = getattr(owner, name)
        replacement = make(original)
        self._undo.append((owner, name, original, replacement, name in vars(owner)))
        setattr(owner, name, replacement)
        return True

    def undo(self) -> None:
        """Put the originals back, except where somebody else has replaced an attribute since."""
        while self._undo:
            owner, name, original, replacement, own = self._undo.pop()
            if vars(owner).get(name) is not replacement:
                continue
            if own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)


_P = ParamSpec("_P")
_T = TypeVar("_T")

_OTHERS = 20  # steps of another optimizer, without one of the primary's, until it is taken for the primary


def _guarded(
    method: Callable[Concatenate[Session, _P], _T],
) -> Callable[Concatenate[Session, int, _P], _T | None]:
    """Hooks call it with the time at which they began, by the session's clock: they are charged from then on."""

    @functools.wraps(method)
    def call(self: Session, began_ns: int, /, *args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        if self.off:
            return None
        recorder = self._recorder
        try:
            result = method(self, *args, **kwargs)
            # Another thread's hooks cost this training nothing; where a recording has just begun, it has no part in it.
            if recorder is not None and recorder is self._recorder and self._thread == threading.get_ident():
                recorder.charge(began_ns)
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach the training; fail() records it
            self.fail(error)
            return None
        return result

    return call


@dataclass(frozen=True, slots=True)
class _Step:
    of: Any
    owner: Any
    has_closure: bool
    is_wait: bool


class Session:
    """One process's recording.

    Args:
        runtime_for: what adds to the rows of whoever makes the steps.
        is_capturing: whether the stream only notes down what it is given: any mark would spoil that.
        sampler_for: makes the sampler of a backend's frames, given whether the device is not to be asked.
    """

    def __init__(
        self,
        settings: Settings,
        facts: Facts,
        backend_for: Callable[[Any], StreamBackend],
        runtime_for: Callable[[Any], Runtime | None],
        is_capturing: Callable[[], bool] = bool,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        sampler_for: Callable[[StreamBackend, Callable[[], bool]], FrameSampler | None] = lambda *_: None,
    ) -> None:
        self.off = False
        """Whether nothing is recorded any more; hooks then only pass calls on."""
        self.patches = Patches()
        self.undo: list[Callable[[], None]] = []
        self.host_optimizers: set[type] = set()
        """Whose `step()` inside another one's is a wait for the host."""
        self.absent: dict[str, str] = {}
        """Fields that stay empty because an installed package lacks what a hook needs, and what that is."""
        self.captures = 0
        """CUDA graphs that are being captured, in any thread: another one's question to the stream would spoil that."""
        self.sums_losses = False
        """Whether a step's loss is the sum of what its backward passes begin from, rather than their mean."""
        self._settings = settings
        self._facts = facts
        self._backend_for = backend_for
        self._runtime_for = runtime_for
        self._is_capturing = is_capturing
        self._sampler_for = sampler_for
        self.clock_ns = clock_ns
        self._released = False
        self._inherited: list[Recorder | None] = []
        self._start()

    def _start(self) -> None:
        self._records = RecordFile(self._settings.folder, self._facts.header)
        self._recorder: Recorder | None = None
        self._sampler: FrameSampler | None = None
        self._backend: StreamBackend | None = None
        self._runtime: Runtime | None = None
        self._losses: StepLosses | None = None
        self._thread: int | None = None
        self._primary: weakref.ref[Any] | None = None
        self._others: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._patience = _OTHERS
        self._tokens: dict[int, int | None] = {}
        self._steps: list[_Step] = []
        self._in_phase = False  # the recorder is in the phase "optimizer" because of _steps
        self._backwards = 0
        self._backward_seen = False
        self._described = False
        self._rates: list[float] = []
        self._emitted = 0
        self._closing = False

    @property
    def steps(self) -> int:
        """Of the training, that this has seen since it began to record."""
        return 0 if self._recorder is None else self._recorder.index

    # --- phases and waits ------------------------------------------------------------------------------------------

    @_guarded
    def data_begins(self) -> bool:
        if not self._is_mine():
            return False
        self._drop_steps(0)  # a step() that raised was never left
        if self._recorder is not None:
            self._recorder.enter("data")
        return True

    @_guarded
    def data_ends(self) -> None:
        if self._recorder is not None:
            self._recorder.leave("data")

    @_guarded
    def batch(self, batch: Any, workers: int | None = None) -> None:
        if self._is_mine():
            self._facts.batch(batch, workers)

    @_guarded
    def backward_begins(self, loss: Any = None) -> bool:
        if not self._is_mine():
            return False
        self._backward_seen = True
        self._backwards += 1
        if self._backwards == 1:
            self._facts.backward_begins()
            self._add_loss(loss, "backward")
            if self._steps and self._steps[0].has_closure:
                self._leave_phase()
            self._enter("backward")
        return True

    @_guarded
    def backward_ends(self) -> None:
        self._backwards -= 1
        if self._backwards == 0:
            if self._recorder is not None:
                self._recorder.leave("backward")
            if self._steps and self._steps[0].has_closure:
                self._enter_phase()

    @_guarded
    def wait_begins(self, cause: Cause) -> bool:
        """The training thread, or its stream, begins to wait; what other streams are given is not waited for."""
        if self._recorder is None or self._backend is None or not self._is_mine():
            return False
        if not self._backend.on_compute_stream():
            return False
        self._recorder.enter_wait(cause)
        return True

    @_guarded
    def wait_ends(self) -> None:
        if self._recorder is not None:
            self._recorder.leave_wait()

    # --- losses ----------------------------------------------------------------------------------------------------

    @_guarded
    def loss_scaled(self, result: Any, loss: Any) -> None:
        if self._losses is not None and self._is_mine():
            self._losses.scaled(result, loss)

    def log_loss(self, loss: torch.Tensor | float) -> None:
        self._log_loss(self.clock_ns(), loss)

    @_guarded
    def _log_loss(self, loss: torch.Tensor | float) -> None:
        if self._is_mine():
            self._add_loss(loss, "log_loss")

    def _add_loss(self, loss: Any, source: Source) -> None:
        if self._losses is None:
            return
        try:
            self._losses.add(loss, source)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:  # a kind of tensor of its own
            self._losses = None
            self.absent["loss"] = f"it could not be read ({type(error).__name__})"

    # --- steps -----------------------------------------------------------------------------------------------------

    @_guarded
    def step_begins(self, of: Any, owner: Any = None, *, has_closure: bool = False) -> bool:
        """A `step()` is entered: of an optimizer, or of what steps optimizers.

        Only the outermost counts, and none inside backward, where some optimizers update each parameter.

        Args:
            owner: whose steps these are, if somebody else's.
            has_closure: whether forward and backward run inside it.
        """
        owner = of if owner is None else owner
        if self._backwards or not self._is_mine(owner):
            return False
        entered = [step.of for step in self._steps]
        if any(of is step for step in entered):  # it raised the last time and was never left
            self._drop_steps(next(at for at, step in enumerate(entered) if step is of))
        is_wait = bool(self._steps) and type(of) in self.host_optimizers
        self._steps.append(_Step(of, owner, has_closure, is_wait))
        if is_wait and self._recorder is not None:
            self._recorder.enter_wait("host")
        if len(self._steps) == 1:
            if self._recorder is not None and self._recorder.index == self._recorder.first_index:
                self._rates = learning_rates(owner)  # before a scheduler changes them
            if not has_closure:
                self._enter_phase()
        return True

    @_guarded
    def step_ends(self, of: Any, *, counts: bool = True) -> None:
        """A `step()` is left.

        Args:
            counts: whether it made a step of the training.
        """
        at = next((at for at, step in enumerate(self._steps) if step.of is of), None)
        if at is None or not self._is_mine():
            return
        owner = self._steps[at].owner
        self._drop_steps(at)
        if at == 0 and counts:
            self._boundary(owner)

    def _enter(self, name: Phase) -> None:
        if self._recorder is not None:
            self._recorder.enter(name)

    def _enter_phase(self) -> None:
        if not self._in_phase:
            self._in_phase = True
            self._enter("optimizer")

    def _leave_phase(self) -> None:
        if self._in_phase:
            self._in_phase = False
            if self._recorder is not None:
                self._recorder.leave("optimizer")

    def _drop_steps(self, at: int) -> None:
        while len(self._steps) > at:
            step = self._steps.pop()
            if step.is_wait and self._recorder is not None:
                self._recorder.leave_wait()
        if not self._steps:
            self._leave_phase()

    def _is_mine(self, stepping: Any = None) -> bool:
        """Whether this is the training thread, which is the one that steps the primary optimizer."""
        if self._is_capturing():
            return False
        if self._thread is None or self._thread == threading.get_ident():
            return True
        if stepping is not None and self._primary is not None and self._primary() is stepping:
            self._adopt(stepping)
            return True
        return False

    def _boundary(self, of: Any) -> None:
        if self._recorder is None:
            if self._backward_seen:
                self._begin(of)
                Finalize(None, self.close, exitpriority=0)  # forked children of multiprocessing run no atexit
        elif self._primary is not None and self._primary() is of:
            self._others.clear()
            self._tokens[self._recorder.index] = self._facts.step_ended()
            if self._losses is not None:
                self._losses.end_step(self._recorder.index)
            if self._runtime is not None:
                self._runtime.end_step(self._recorder.index)
            self._recorder.end_step()
            self._sample(self._backend, self._recorder)
            if self._emitted >= self._last_index():
                self._end("measured")
        else:
            self._other_stepped(of)

    def _sample(self, backend: StreamBackend | None, recorder: Recorder) -> None:
        """Sample frames in the measured steps."""
        if recorder.index == recorder.first_index and backend is not None:
            self._sampler = self._sampler_for(backend, lambda: self.captures > 0 or recorder.waits)
            if self._sampler is not None:
                self._sampler.start()
        elif recorder.index > recorder.last_index:
            self._end_samples()

    def _end_samples(self) -> dict[str, Any] | None:
        if self._sampler is None:
            return None
        self._sampler.stop()
        return self._sampler.document()

    def _begin(self, of: Any) -> None:
        self._end_samples()
        self._recorder = self._sampler = None
        self._adopt(of)
        self._backend = backend = self._backend_for(of)
        self._runtime = self._runtime_for(of)
        self._losses = StepLosses(backend.on_compute_stream)
        self._facts.look(of, backend)
        settings = self._settings
        self._recorder = Recorder(
            backend, self._emit, clock_ns=self.clock_ns, warmup=settings.warmup, steps=settings.steps
        )
        self._recorder.end_step()
        self._sample(backend, self._recorder)

    def _other_stepped(self, of: Any) -> None:
        """It may be the primary's successor, with the same training or with another one, or only take turns with it."""
        self._others[of] = self._others.get(of, 0) + 1
        gone = self._primary is None or self._primary() is None
        enough = self._others[of] > self._patience
        if (gone or enough) and self._facts.are_of(of):
            self._adopt(of)
        elif enough:
            self._patience *= 2  # those that take turns soon do so within it
            self._facts.forget()
            self._tokens.clear()
            self._described, self._emitted = False, 0
            self._begin(of)
            self._records.restart(**self._facts.device())

    def _adopt(self, of: Any) -> None:
        self._primary, self._thread = weakref.ref(of), threading.get_ident()
        self._others.clear()
        self._backwards, self._in_phase = 0, False
        self._steps.clear()
        if self._recorder is not None:
            self._recorder.forget()
            if self._sampler is not None:
                self._sampler.thread = self._thread
            self._facts.forget_batches()
            if self._losses is not None:
                self._losses.forget()
            self._runtime = self._runtime_for(of)

    def _describe(self) -> None:
        self._described = True
        self._records.write("model", **self._facts.model(self._rates))
        for field, reason in {**self.absent, **self._facts.missing}.items():
            self._records.missing(field, reason)

    def _emit(self, row: StepRow) -> None:
        if row.measured and not self._described:
            self._describe()
        row.tokens = self._tokens.pop(row.index, None)
        if self._losses is not None:
            row.loss = self._losses.take(row.index, summed=self.sums_losses)
            row.loss_source = self._losses.source
        if self._runtime is not None:
            newest = 0 if self._recorder is None else self._recorder.index - 1
            self._runtime(row, last=row.index == (newest if self._closing else self._last_index()))
        self._records.step(row)
        self._emitted = row.index

    def _last_index(self) -> float:
        return 0 if self._recorder is None else self._recorder.last_index

    # --- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """The interpreter ends: write what is there."""
        if self.off:
            return
        try:
            self._closing = True
            if self._recorder is not None:
                self._recorder.drain()
                self._end("measured" if self._emitted >= self._last_index() else "exit")
            elif self._backward_seen:
                self._records.missing(
                    "step_ms",
                    "backward ran, but no optimizer stepped outside of it: the steps are compiled, fused into "
                    "backward, or made by something that is no torch.optim.Optimizer",
                )
                self._end("exit")
        except Exception as error:  # noqa: BLE001 - as in _guarded
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Record what went wrong in the agent, once, and record nothing else."""
        if self.off:
            return
        self.off = True
        self._end_samples()
        where = traceback.extract_tb(error.__traceback__)[-1:]
        place = "".join(f" ({os.path.basename(frame.filename)}:{frame.lineno})" for frame in where)  # noqa: PTH119
        with contextlib.suppress(Exception):  # a full disk, say: then the file ends without its last line
            self._records.end("failed", f"{type(error).__name__}: {error}{place}")

    def forked(self) -> None:
        """This is a new process: it has taken no steps, and its parent's file is not its own."""
        self._records.close()
        if not self.off:
            self._inherited.append(self._recorder)  # its CUDA events must not be destroyed where CUDA is not
            self._facts.forget()
            self._start()

    def release(self) -> None:
        """Remove every hook. Not from a hook on an optimizer: torch goes through a dictionary of them then."""
        if self._released:
            return
        self._released = True
        with contextlib.suppress(Exception):  # the file is closed; what stays installed only passes calls on
            self.patches.undo()
            for undo in self.undo:
                undo()

    def _end(self, reason: str) -> None:
        self.off = True
        lines = self._end_samples()
        if lines is not None:
            self._records.write("lines", **lines)
        self._records.end(reason)
