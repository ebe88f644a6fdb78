"""A process of low priority that thinks for the training process, so that no step waits for the interpreter's lock.

Questions and answers are pickles over the pipes of its standard input and output, each behind its length. It ends where
its input does, and so with its parent, in the midst of a thought too. A script may lack the guard that
`multiprocessing` asks for, so it is not used.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

from zftune.errors import ZftuneError
from zftune.tuner.messages import LONG_WAIT_S, waits_for_core

if TYPE_CHECKING:
    from zftune.tuner.forecast import Judge, Observation, Proposal
    from zftune.tuner.space import Space
    from zftune.tuner.states import Sampler

ANSWER_S = 300.0
"""An answer takes no longer than that, or there is none."""
_NICE = 10
_AT_ONCE = "--at-once"
_SLICE_S = 0.01
_FEW_CORES = 8
_GENTLE_SHARE = 0.15
_LENGTH = 8  # bytes
_ALONE = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "CUDA_VISIBLE_DEVICES": "",
    "ZFTUNE_DISABLE": "1",  # it is no training: nobody profiles it
}


class SamplerError(ZftuneError):
    """There is no answer; the message says why."""


class SamplerProcess:
    """The process, as its parent sees it. One thread asks at a time; any may close it.

    Args:
        share: of a core that it may use once it has loaded: what it uses is missing elsewhere where cores are few.
        gives_way: whether it has a low priority; not where time is simulated and so waits.
        core_wait_s: how long a process has waited for a core; None: that is not known.
    """

    def __init__(
        self,
        answer_s: float = ANSWER_S,
        share: float = 1.0,
        *,
        gives_way: bool = True,
        core_wait_s: Callable[[int], float | None] | None = None,
    ) -> None:
        self.notices: list[str] = []
        """Sentences: what takes long."""
        self._answer_s = answer_s
        self._core_wait_s = core_wait_s or _core_wait_s
        self._waited_s = 0.0
        self._waited_before_s: float | None = None
        self._share = share
        self._arguments = [] if gives_way else [_AT_ONCE]
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._closed = False
        self._late = False
        self._lock = threading.Lock()

    @property
    def closed(self) -> bool:
        """Whether nothing can be asked any more."""
        return self._closed

    @property
    def died(self) -> bool:
        """Whether it has ended though nobody closed it, such as by the kernel where memory ran out."""
        return not self._closed and self._process is not None and self._process.poll() is not None

    @property
    def waited_s(self) -> float:
        """For how long questions have waited for a core, the one that is thought about included; 0 if not known.

        The first time that it is long, that becomes a notice.
        """
        with self._lock:
            self._look()
            return self._heeded(self._waited_s)

    def _heeded(self, waited_s: float) -> float:
        if waited_s >= LONG_WAIT_S and not self.notices:
            self.notices.append(f"{waits_for_core(waited_s, 'so far').capitalize()}.")
        return waited_s

    def _look(self) -> None:
        """Count what the question has waited since this was called last; under the lock."""
        if self._waited_before_s is None or self._process is None:
            return
        now_s = self._core_wait_s(self._process.pid)
        if now_s is not None:
            self._waited_s += now_s - self._waited_before_s
            self._waited_before_s = now_s

    def start(self) -> None:
        """Start the process, unless it runs; returns at once.

        Raises:
            SamplerError: it cannot be started, or was closed.
        """
        with self._lock:
            if self._closed:
                raise SamplerError("the search process was ended")
            if self._process is not None:
                return
            try:
                self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "zftune.tuner.sampler_process", *self._arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._errors,
                    env={**os.environ, **_ALONE},
                )
            except OSError as error:
                if self._errors is not None:
                    self._errors.close()
                raise SamplerError(f"the search process cannot be started: {error}") from error
            weakref.finalize(self, _end_process, self._process, self._errors, os.getpid())

    def ready(self) -> None:
        """Wait until it has loaded what it thinks with.

        Raises:
            SamplerError: it cannot.
        """
        self.ask(_load)
        if self._share < 1:
            self.ask(_rest, self._share)

    def ask(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        """The result of a module's function, called there; function, arguments and result must be picklable.

        Raises:
            SamplerError: it failed, took too long, or cannot be sent.
        """
        self.start()
        process = self._process
        assert process is not None
        try:
            question = pickle.dumps((function, args, named))
        except Exception as error:  # pickle raises whatever an object's own methods do
            raise SamplerError(f"the question cannot be sent: {error}") from error
        timer = threading.Timer(self._answer_s, self._give_up)
        timer.daemon = True
        timer.start()
        with self._lock:
            self._waited_before_s = self._core_wait_s(process.pid)
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            _send(process.stdin, question)
            done, answer = pickle.loads(_receive(process.stdout))
        except (EOFError, OSError, ValueError, pickle.UnpicklingError) as error:
            raise SamplerError(self._end()) from error
        finally:
            timer.cancel()
            with self._lock:
                self._look()
                self._waited_before_s = None
        if not done:
            raise SamplerError(f"the search process failed: {answer}")
        return answer

    def propose(
        self, space: Space, told: Sequence[Observation], judge: Judge, *, sampler: Sampler, seed: int
    ) -> Proposal:
        """As `zftune.tuner.forecast.propose`, which it calls there.

        Raises:
            SamplerError: there is no answer.
        """
        from zftune.tuner.forecast import propose

        answer: Proposal = self.ask(propose, space, told, judge, sampler=sampler, seed=seed)
        return answer

    def close(self) -> None:
        """End it; who waits for an answer gets none."""
        with self._lock:
            self._look()  # once it has ended nobody knows
            self._closed = True
            process = self._process
        if process is not None and self._errors is not None:
            _end_process(process, self._errors, os.getpid())

    def _give_up(self) -> None:
        self._late = True
        if self._process is not None:
            self._process.kill()

    def _end(self) -> str:
        """Why there is no answer."""
        if self._closed:
            return "the search process was ended"
        if self._late:
            return f"the search process took longer than {self._answer_s:g} s"
        assert self._process is not None
        assert self._errors is not None
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"the search process ended with exit code {code}" + (f" ({lines[-1]})" if lines else "")


def _end_process(process: subprocess.Popen[bytes], errors: IO[bytes], pid: int) -> None:
    """Also called where its owner was thrown away; in a fork's child it is not the child's to end."""
    if os.getpid() != pid:
        return
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, errors):
        if pipe is not None:
            _close(pipe)


def main() -> NoReturn:
    """Answer questions until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    if _AT_ONCE not in sys.argv:
        _give_way()
    questions: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    pipe = os.fdopen(sys.stdin.fileno(), "rb", buffering=0, closefd=False)  # a buffer's lock could be held at the exit
    threading.Thread(target=_listen, args=(pipe, questions), daemon=True).start()
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what anything prints is no answer
        while True:
            _send(answers, pickle.dumps(_answer(questions.get())))


def _listen(pipe: IO[bytes], questions: queue.SimpleQueue[bytes]) -> None:
    """Hand over the questions; nobody wants the answer of one that is thought about when the input ends."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            questions.put(_receive(pipe))
    os._exit(0)


def _give_way() -> None:
    """Have a tenth of a core that others want, and interrupt nobody; under SCHED_IDLE it would get next to nothing."""
    os.nice(_NICE)
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # it has the low priority
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _core_wait_s(pid: int) -> float | None:
    """How long a process's first thread was ready to run and had no core, in all; None: the kernel does not tell."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return None


def _answer(question: bytes) -> tuple[bool, Any]:
    try:
        function, args, named = pickle.loads(question)
        return True, function(*args, **named)
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent says it
        return False, f"{type(error).__name__}: {error}"


def _load() -> None:
    for name in ("torch", "scipy.optimize", "optuna", "zftune.tuner.forecast", "zftune.tuner.search"):
        importlib.import_module(name)


def gentle_share() -> float:
    """What of a core may be used beside a user's training."""
    from zftune.telemetry import hardware

    return _GENTLE_SHARE if (hardware()["usable_cores"] or 1) < _FEW_CORES else 1.0


def _rest(share: float) -> None:
    """From now on, sleep after every slice of work, so that work is only a share of the time."""
    signal.signal(signal.SIGPROF, lambda *_: time.sleep(_SLICE_S * (1 / share - 1)))
    signal.setitimer(signal.ITIMER_PROF, _SLICE_S, _SLICE_S)


def _send(pipe: IO[bytes], message: bytes) -> None:
    pipe.write(len(message).to_bytes(_LENGTH, "little"))
    pipe.write(message)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes:
    length = int.from_bytes(_read(pipe, _LENGTH), "little")
    return _read(pipe, length)


def _read(pipe: IO[bytes], count: int) -> bytes:
    found = io.BytesIO()
    while found.tell() < count:
        part = pipe.read(count - found.tell())
        if not part:
            raise EOFError
        found.write(part)
    return found.getvalue()


def _close(pipe: IO[bytes]) -> None:
    try:
        pipe.close()
    except BrokenPipeError:
        return  # what was not sent is not needed


if __name__ == "__main__":
    main()
