"""What happens once torch is imported in a process that is to be recorded."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from zftune.agent import systems
from zftune.agent.facts import Facts, device_of
from zftune.agent.hooks import hook_torch
from zftune.agent.recorder import DeviceEvents, StreamBackend, WallClock
from zftune.agent.records import Settings
from zftune.agent.session import Session
from zftune.agent.systems import runtime
from zftune.frames import FrameSampler, idle_question

WhenImported = Callable[[str, Callable[[Any], None]], None]


def arm(when_imported: WhenImported, stop: Callable[[], None]) -> None:
    """Install the hooks; torch must have been imported. Nothing is written before a training has taken a step."""
    settings = Settings.of(os.environ)
    session = make_session(settings)
    session.undo.append(stop)
    hook(session, when_imported)
    if settings.stop:
        end_in_order()
    atexit.register(session.close)
    os.register_at_fork(after_in_child=session.forked)


def end_in_order() -> None:
    """Let SIGTERM end a script that does nothing about it as `sys.exit()` does: what is buffered is written.

    Not one of several ranks, which would wait for those that have ended.
    """
    alone = os.environ.get("WORLD_SIZE", "1") == "1" and threading.current_thread() is threading.main_thread()
    if not alone or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    process, ending, others = os.getpid(), SystemExit(128 + signal.SIGTERM), sys.unraisablehook

    def end(signum: int, _: object) -> None:
        if os.getpid() != process:  # a forked child
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
            return
        signal.signal(signal.SIGCHLD, lambda *_: None)  # torch's would raise: data loaders' workers are ended, too
        sys.unraisablehook = again
        raise ending

    def again(swallowed: Any) -> None:
        """Where it cannot be raised, as in a `__del__` or beside a fork, it is a moment later."""
        if swallowed.exc_value is not ending:
            others(swallowed)
        elif signal.getsignal(signal.SIGALRM) in (signal.SIG_DFL, end):
            signal.signal(signal.SIGALRM, end)
            signal.setitimer(signal.ITIMER_REAL, 0.01)

    signal.signal(signal.SIGTERM, end)


def make_session(settings: Settings) -> Session:
    """A session that looks at the training as it is."""
    return Session(settings, Facts(), backend_for, runtime.rows_of, capturing(), sampler_for=sampler_for)


def hook(session: Session, when_imported: WhenImported) -> None:
    """Install every hook of a session; its `release()` removes them."""

    def when_there(name: str, callback: Callable[[Any], None]) -> None:
        def install(module: Any) -> None:
            try:
                callback(module)
            except Exception as error:  # noqa: BLE001 - the script's import is not to fail; fail() records it
                session.fail(error)

        when_imported(name, install)

    hook_torch(session)
    systems.install(session, when_there)


def backend_for(of: Any) -> StreamBackend:
    """Where the marks of a training come from."""
    accelerator = runtime.device_of(of)
    torch_device = device_of(of, systems.module_of(of))
    if accelerator is None and torch_device.type != "cpu":
        from zenflow.device import device_for
        from zenflow.errors import UnsupportedError

        try:
            accelerator = device_for(torch_device)
        except UnsupportedError:
            return WallClock()  # the facts say so
    return DeviceEvents(accelerator) if accelerator is not None and accelerator.has_streams else WallClock()


def sampler_for(backend: StreamBackend, is_waiting: Callable[[], bool]) -> FrameSampler | None:
    """A sampler of the calling thread's frames; None in simulated time, which Python takes none of."""
    if backend.device is None:
        return FrameSampler(None)
    return None if backend.device.clock.simulated else FrameSampler(idle_question(backend.device), is_waiting)


def capturing() -> Callable[[], bool]:
    """What tells whether the accelerator's current stream is being captured into a graph; initialises nothing."""
    module = torch.get_device_module()
    ask, begun = (getattr(module, name, None) for name in ("is_current_stream_capturing", "is_initialized"))
    if ask is None or begun is None:
        return bool
    return lambda: begun() and ask()
