"""One process that has imported everything, from which the processes of tests are forked: one for each worker.

`import torch` costs 2 seconds of a processor, with DeepSpeed 7; a fork costs a tenth of one. `run` and `Forked` stand
for `subprocess.run` and `Popen` where a test needs a training in a process of its own, `context()` is for functions.

A fork is no start of an interpreter: what is read while Python begins, or while torch or DeepSpeed are imported, is as
it was when the server began. Tests of that (flags of the interpreter, what `zftune run` becomes, lean imports) start
real ones. A `sitecustomize` on the PYTHONPATH that is asked for is run, since that is how the agent begins.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver, reduction
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import IO, Any, NoReturn

import psutil

from tests.support import upstream_ops

MAIN = "from zftune.cli.main import main; main()"
"""Code of the command line."""
_PRELOADED = "tests.support.fork_server_imports"
_OURS = ("ZFTUNE_", "ZENFLOW_", "XDG_")


def context() -> ForkServerContext:
    """Whose processes are forked from the fork_server, with its environment; it begins with the first of them.

    What `fork` has made forks from the same one.
    """
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload([_PRELOADED])
    server: Any = vars(forkserver)["_forkserver"]
    if server._forkserver_address is not None and server._forkserver_pid is None:
        server.ensure_running = lambda: None
    with _clean_environment():
        server.ensure_running()
    return made


def end() -> None:
    """End the fork_server, if it has begun, with what tests that failed have left, and wait for it."""
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        for process in psutil.Process(server._forkserver_pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    server._stop()


@contextlib.contextmanager
def _clean_environment() -> Iterator[None]:
    """What the fork_server begins with, whatever the test that is the first to need it has set."""
    before = dict(os.environ)
    try:
        for name in list(os.environ):
            if name.startswith(_OURS):
                del os.environ[name]
        os.environ.update(upstream_ops.environment())
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def fork(
    words: Sequence[str],
    descriptors: Sequence[int],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    exec_in_place: bool = False,
) -> ForkServerProcess:
    """Begin a process as `Forked` does, whose standard streams are these descriptors; it ends with this one."""
    given = (list(words), dict(os.environ if env is None else env), str(cwd or Path.cwd()))
    streams = [_Descriptor(number) for number in descriptors]
    made, server = context(), vars(forkserver)["_forkserver"]
    arguments = (*given, server._forkserver_address, streams, exec_in_place)
    process = made.Process(target=_become, args=arguments, daemon=True)
    process.start()
    return process


class Forked:
    """A process that runs Python code as if an interpreter had been started for it; much of `subprocess.Popen`.

    Its process group is its own. What it prints goes into files, so that nobody has to read while it runs.

    Args:
        command: as for an interpreter: `-c` and code, `-m` and a module, or a script; then arguments. It may begin with
            `sys.executable`.
        env: its environment, in place of this process's.
        cwd: where it runs.
        stdin: what it reads, or nothing.
        exec_in_place: an `exec` of this Python goes on in the same process, with its environment, instead of starting
            an interpreter; that of another program is one.
        log: an open file for all that it prints, in place of `stdout` and `stderr`.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdin: str = "",
        exec_in_place: bool = False,
        log: IO[bytes] | None = None,
    ) -> None:
        self.args = [str(part) for part in command]
        words = self.args[1:] if self.args[0] == sys.executable else self.args
        self._files = [tempfile.TemporaryFile() for _ in range(3)]  # noqa: SIM115 - closed by close()
        self._files[0].write(stdin.encode())
        self._files[0].seek(0)
        descriptors = [self._files[0].fileno(), *((log or file).fileno() for file in self._files[1:])]
        self._process = fork(words, descriptors, env=env, cwd=cwd, exec_in_place=exec_in_place)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end; what it printed."""
        self.wait(timeout)
        return self.stdout, self.stderr

    @property
    def stdout(self) -> str:
        """What it has printed so far."""
        return _content(self._files[1])

    @property
    def stderr(self) -> str:
        """What it has printed so far on its standard error."""
        return _content(self._files[2])

    def line(self, number: int = 0, timeout: float = 60.0) -> str:
        """A line of its standard output, once it is there."""
        until = time.monotonic() + timeout
        while self.stdout.count("\n") <= number:
            assert self.poll() is None or self.stdout.count("\n") > number, self.stderr
            assert time.monotonic() < until, self.stderr
            time.sleep(0.005)
        return self.stdout.splitlines()[number]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """End it and what is left of its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.join()
        for file in self._files:
            file.close()

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    stdin: str = "",
    timeout: float = 120.0,
    check: bool = False,
    exec_in_place: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run Python code to its end, as `subprocess.run` with captured text does.

    Raises:
        subprocess.TimeoutExpired: it has not ended in time, and was killed.
        subprocess.CalledProcessError: with `check`, its exit code is not 0.
    """
    with Forked(command, env=env, cwd=cwd, stdin=stdin, exec_in_place=exec_in_place) as begun:
        code = begun.wait(timeout)
        done = subprocess.CompletedProcess(begun.args, code, begun.stdout, begun.stderr)
    if check and code:
        raise subprocess.CalledProcessError(code, done.args, done.stdout, done.stderr)
    return done


def zftune(*words: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end, `more` as for `run`; a training that `zftune run` begins is the same process."""
    command = ["-c", MAIN, *words]
    return run(command, exec_in_place=True, **more)


def ranks(count: int, command: Sequence[str | Path], *, env: Mapping[str, str], **more: Any) -> list[Forked]:
    """The ranks of one training, as torchrun would start them; `more` as for `Forked`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**env, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    of_rank = ({"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count))
    return [Forked(command, env={**shared, **own}, **more) for own in of_rank]


def _content(file: IO[bytes]) -> str:
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


class _Descriptor:
    """One that goes with a process that is started."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (reduction.DupFd(self.number),)


def _arrived(sent: Any) -> _Descriptor:
    return _Descriptor(sent.detach())


# --- in the child ---------------------------------------------------------------------------------------------------


def _become(
    words: list[str],
    env: dict[str, str],
    cwd: str,
    address: str,
    streams: list[_Descriptor],
    exec_in_place: bool,
) -> NoReturn:
    vars(forkserver)["_forkserver"]._forkserver_address = address
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # even where the tests run under nohup
    for number, stream in enumerate(streams):
        os.dup2(stream.number, number)
        os.close(stream.number)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), line_buffering=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), errors="backslashreplace", write_through=True)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # TMPDIR may be another
    # As if nobody had forked: a script may use multiprocessing itself.
    process_module = vars(multiprocessing.process)
    process_module["_current_process"] = vars(sys.modules[_PRELOADED])["MAIN"]
    process_module["_parent_process"] = None
    multiprocessing.set_start_method(None, force=True)
    if exec_in_place:
        vars(os)["execvpe"] = _go_on_as
    _exit(_outcome(words))


def _go_on_as(program: str, words: list[str], env: dict[str, str]) -> NoReturn:
    """Stands for `os.execvpe`."""
    if program != sys.executable or (words[1].startswith("-") and words[1] not in ("-c", "-m")):
        os.execve(shutil.which(program, path=env.get("PATH")) or program, words, env)
    os.environ.clear()
    os.environ.update(env)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # as Python begins
        signal.signal(number, signal.SIG_IGN)
    sys.excepthook = sys.__excepthook__
    _exit(_outcome(words[1:]))


def _outcome(words: list[str]) -> int:
    """Run what an interpreter would; its exit code, below 0 for a signal."""
    try:
        _set_up(words)
        _execute(words)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException as error:  # noqa: BLE001 - an interpreter ends with it, too
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.excepthook(type(error), error, trace)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _set_up(words: list[str]) -> None:
    """Paths, threads and the site of a new interpreter."""
    import torch

    first = "" if words[0] == "-c" else str(Path.cwd()) if words[0] == "-m" else str(Path(words[0]).resolve().parent)
    path = [part or str(Path.cwd()) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    added = [part for part in path if os.environ.get("PYTHONPATH")]
    sys.path[:] = [first, *added, *(part for part in sys.path if part not in ("", first, *added))]
    sys.argv = words[:1] if words[0] not in ("-c", "-m") else [words[0]]
    sys.argv += words[2:] if words[0] in ("-c", "-m") else words[1:]
    for folder in {first, *added}:
        _forget_shadowed(Path(folder))
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit():
        torch.set_num_threads(int(threads))
    if any((Path(part) / "sitecustomize.py").is_file() for part in added):
        sys.modules.pop("sitecustomize", None)
        __import__("sitecustomize")


def _forget_shadowed(folder: Path) -> None:
    """Let what a folder of the path has be imported, and not what the fork_server has imported by that name."""
    found = {one.stem for one in folder.iterdir() if one.suffix in ("", ".py")} if folder.is_dir() else set()
    for name in found & set(sys.modules) - sys.stdlib_module_names:
        places = [str(folder / name), str(folder / f"{name}.py")]
        module = sys.modules[name]
        if not {*map(str, getattr(module, "__path__", ())), getattr(module, "__file__", None)} & {*places}:
            for loaded in [one for one in sys.modules if one == name or one.startswith(f"{name}.")]:
                del sys.modules[loaded]


def _execute(words: list[str]) -> None:
    """As `__main__`."""
    import runpy
    import types

    if words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=__builtins__, __spec__=None)
    sys.modules["__main__"] = main
    if words[0] == "-c":
        exec(compile(words[1], "<string>", "exec", dont_inherit=True), main.__dict__)
        return
    script = str(Path(words[0]).absolute())
    main.__dict__["__file__"] = script
    exec(compile(Path(script).read_bytes(), script, "exec", dont_inherit=True), main.__dict__)


def _exit(code: int) -> NoReturn:
    """As an interpreter ends: threads, `atexit`, streams."""
    import atexit
    import threading

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or nobody reads
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
