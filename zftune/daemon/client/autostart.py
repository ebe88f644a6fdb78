"""Have a daemon: the one that answers, else a private one that is started here and ends when no run needs it.

It belongs to nobody's session: not to the terminal, whose Ctrl-C is the training's, nor to the process that asks for
it, which becomes the training and may wait for all children that it has.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from zftune.daemon.client import location as sockets
from zftune.daemon.client.http import DaemonClient
from zftune.daemon.client.location import Location, locate, make_folder
from zftune.errors import DaemonError, StrangerError
from zftune.store import location as stores

_KEPT = frozenset(
    (
        *("HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TMP"),
        *("XDG_RUNTIME_DIR", "XDG_DATA_HOME", "ZFTUNE_SOCKET", "ZFTUNE_DB", "LD_LIBRARY_PATH"),
        *("PYTHONHOME", "PYTHONPATH", "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE", "PYTHONUTF8"),
        *("PYTHONNOUSERSITE", "PYTHONUSERBASE"),  # which packages there are
    )
)
_KEPT_PREFIXES = ("LC_", "PG", "MYSQL_", "ORACLE_")  # what a database server's driver reads
_LIMITS = {
    resource.RLIMIT_CPU: ("processor time", "s"),
    resource.RLIMIT_AS: ("address space", "bytes"),
    resource.RLIMIT_DATA: ("data", "bytes"),
    resource.RLIMIT_FSIZE: ("the size of a file", "bytes"),
}


def environment_of(starter: Mapping[str, str]) -> dict[str, str]:
    """The environment of a private daemon, with absolute paths, from that of the run that starts it. Raises
    BadInputError: $ZFTUNE_SOCKET cannot be a socket.
    """
    kept = {name: value for name, value in starter.items() if name in _KEPT or name.startswith(_KEPT_PREFIXES)}
    if "PYTHONPATH" in kept:
        kept["PYTHONPATH"] = _absolute(kept["PYTHONPATH"])
    return {**stores.settled(sockets.settled(kept)), "ZFTUNE_DISABLE": "1"}  # it is no training


def raise_limits() -> None:
    """Have as much as may be had: soft limits as high as hard ones, and all processors."""
    for kind in (*_LIMITS, resource.RLIMIT_NOFILE):
        with contextlib.suppress(OSError, ValueError):
            hard = resource.getrlimit(kind)[1]
            resource.setrlimit(kind, (hard, hard))
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def limits_left() -> list[str]:
    """A sentence for each limit that this process cannot raise."""
    found = []
    for kind, (of, unit) in _LIMITS.items():
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY:
            found.append(f"The daemon was started under a limit of {of} ({hard} {unit}), by which it may end.")
    return found


def _absolute(path: str) -> str:
    """Without empty parts, which are the working directory."""
    parts = [part for part in path.split(os.pathsep) if part]
    with contextlib.suppress(OSError):  # the working directory is gone, and with it what lies there
        return os.pathsep.join(str(Path(part).absolute()) for part in parts)
    return os.pathsep.join(part for part in parts if Path(part).is_absolute())


START_S = 30.0
"""How long a daemon may take to begin."""
_ASK_S = 2.0
_POLL_S = 0.05
_STARTS = 2
"""The first may find that another one is just ending."""
_MOST_LOG_BYTES = 1 << 20
# Not from the folder it is started in, which may be anybody's.
_COMMAND = (sys.executable, "-P", "-c", "from zftune.cli.main import main; main()", "daemon", "start", "--private")
# Starts a process that is a child of nobody here; the descriptor closes when that process ends.
_LAUNCH = (
    "import subprocess, sys; "
    "subprocess.Popen(sys.argv[2:], stdout=sys.stderr, start_new_session=True, pass_fds=(int(sys.argv[1]),))"
)


def ensure_daemon(environment: Mapping[str, str] | None = None) -> bool:
    """Have a daemon that answers, and knows that a run is about to come.

    Args:
        environment: says where the socket is; None: this process's. A daemon that is started here has its user and its
            software, and stands in the root folder.

    Returns:
        Whether one was started.

    Raises:
        BadInputError: no socket can be where the environment wants it.
        DaemonError: none answers, and none could be started; what it said is in the log beside the socket.
    """
    environment = os.environ if environment is None else environment
    location = locate(environment)
    with DaemonClient(location.socket, timeout_s=_ASK_S) as client:
        if _answers(client) and _waits_for_run(client):
            return False
        make_folder(location)
        until_s = time.monotonic() + START_S
        for _ in range(_STARTS):
            ended = _started(location, environment)
            try:
                if _comes(client, location, ended, until_s) and _waits_for_run(client):
                    return True
            finally:
                os.close(ended)
    raise DaemonError(f"the private daemon ended at once{_last_words(location)}")


def revive_daemon(environment: Mapping[str, str] | None = None) -> bool:
    """Start a daemon again where one has died; one that was ended took its socket with it, and stays ended. Returns
    whether one was started. Raises BadInputError: as `ensure_daemon`; DaemonError: as `ensure_daemon`.
    """
    environment = os.environ if environment is None else environment
    location = locate(environment)
    if not location.socket.is_socket() or _is_locked(location):
        return False
    return ensure_daemon(environment)


def log_of(location: Location) -> Path:
    """The log of a daemon that was started here."""
    return location.socket.with_name(f"{location.socket.name}.log")


def _answers(client: DaemonClient) -> bool:
    try:
        client.get("/v1/health")
    except StrangerError:
        raise
    except DaemonError:
        return False
    return True


def _waits_for_run(client: DaemonClient) -> bool:
    """Whether the daemon that answers has heard that a run is about to come; one that has just ended has not."""
    try:
        client.post(f"/v1/expect?pid={os.getpid()}")
    except DaemonError as error:
        return error.status is not None
    return True


def _started(location: Location, environment: Mapping[str, str]) -> int:
    """Start it; a descriptor that reaches its end when the daemon does."""
    ended, held = os.pipe()
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        log = os.open(log_of(location), flags, 0o600)
        try:
            if os.fstat(log).st_size > _MOST_LOG_BYTES:
                os.ftruncate(log, 0)
            subprocess.run(
                [sys.executable, "-I", "-S", "-c", _LAUNCH, str(held), *_COMMAND],
                env=environment_of(environment),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(held,),
                check=True,
            )
        finally:
            os.close(log)
    except (OSError, subprocess.SubprocessError) as error:
        os.close(ended)
        raise DaemonError(f"a private daemon cannot be started ({error})") from error
    finally:
        os.close(held)
    return ended


def _comes(client: DaemonClient, location: Location, ended: int, until_s: float) -> bool:
    """Wait until it answers, or another one that was started at the same time; whether one does."""
    while not _answers(client):
        gone = bool(select.select([ended], [], [], _POLL_S)[0])
        if gone and not _is_locked(location):
            return _answers(client)
        if gone:
            time.sleep(_POLL_S)  # another one has the lock, and begins or ends
        if time.monotonic() > until_s:
            raise DaemonError(f"no daemon answers at '{location.socket}', the log is '{log_of(location)}'")
    return True


def _is_locked(location: Location) -> bool:
    try:
        lock = os.open(location.lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _last_words(location: Location) -> str:
    with suppress(OSError):
        lines = log_of(location).read_text(errors="replace").splitlines()
        if lines:
            return f" ({lines[-1].removeprefix('zftune: ')})"
    return ""
