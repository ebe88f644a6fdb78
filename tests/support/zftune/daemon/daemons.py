"""Real daemons in processes of their own, and other users' programs."""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import fork_server
from zftune.daemon.client.http import DaemonClient

OTHER_UID = 65534
ROOT = Path(__file__).parents[4]
SOON_S = 60.0
HOSTED = "tests.support.zftune.daemon.hosted"
COMMAND = None
"""In place of a module: `zftune daemon start` itself, which takes seconds to begin."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")

_BECOME = f"import os; os.setgroups([]); os.setgid({OTHER_UID}); os.setuid({OTHER_UID})\n"


@contextmanager
def short_folder() -> Iterator[Path]:
    """With a path that is short enough for a socket's 107 bytes; other users may enter it, as they may enter /tmp."""
    made = Path(tempfile.mkdtemp(prefix="zft-"))
    made.chmod(0o755)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)  # a browser's last processes may still write


def end_private(folder: Path) -> None:
    """End the private daemon of a folder, if there is one; wait until it has."""
    path = folder / "z.sock"
    if not path.exists():
        return
    with DaemonClient(path) as client:
        client.post("/v1/stop")
    ends_s = time.monotonic() + SOON_S
    while path.exists():
        assert time.monotonic() < ends_s
        time.sleep(0.02)


@dataclass
class Daemon:
    """A daemon that runs; what it told the service manager comes in by `told`."""

    process: subprocess.Popen[bytes] | fork_server.Forked
    path: Path
    log: Path
    manager: socket.socket

    def told(self) -> str:
        """The next thing that the service manager is told; fails after a while."""
        return self.manager.recv(4096).decode()

    def ends(self) -> int:
        """Its exit code."""
        return self.process.wait(SOON_S)

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)


def environment(folder: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ZFTUNE_", "XDG_"))}
    return {**kept, "ZFTUNE_SOCKET": str(folder / "z.sock"), "ZFTUNE_DB": "sqlite://", "COLUMNS": "200", **more}


def zftune(folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the command line until it ends."""
    return fork_server.zftune(*arguments, env=environment(folder, **more), timeout=SOON_S)


@contextmanager
def begun(
    folder: Path,
    *arguments: str,
    module: str | None = HOSTED,
    more: Mapping[str, str] | None = None,
    hangs_up: bool = True,
) -> Iterator[Daemon]:
    """A daemon, from its first moment on, killed in the end; without `hangs_up` it is started as under nohup."""
    command = ["-c", fork_server.MAIN, "daemon", "start"] if module is None else ["-m", module]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, (folder / "log").open("ab") as log:
        manager.settimeout(SOON_S)
        address = folder / "n"
        address.unlink(missing_ok=True)
        manager.bind(str(address))
        env = environment(folder, **{"NOTIFY_SOCKET": str(address), **(more or {})})
        process: subprocess.Popen[bytes] | fork_server.Forked
        if hangs_up:
            process = fork_server.Forked([*command, *arguments], cwd=ROOT, env=env, log=log)
        else:
            process = subprocess.Popen(
                [sys.executable, *command, *arguments],
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=functools.partial(signal.signal, signal.SIGHUP, signal.SIG_IGN),
            )
        try:
            yield Daemon(process, folder / "z.sock", folder / "log", manager)
        finally:
            process.kill()
            process.wait()
            if isinstance(process, fork_server.Forked):
                process.close()


@contextmanager
def serving(folder: Path, *arguments: str, **given: Any) -> Iterator[Daemon]:
    """A daemon that is ready, `given` as for `begun`; what it must not leave is looked at by the tests."""
    with begun(folder, *arguments, **given) as daemon:
        assert daemon.told().startswith("READY=1"), daemon.log.read_text()
        yield daemon


def as_other_user(script: str, *arguments: str) -> subprocess.Popen[str]:
    """A program of another user. It has no package but the standard library."""
    return subprocess.Popen(
        [sys.executable, "-I", "-c", "import json, socket, sys\n" + _BECOME + script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def exchange(path: Path, request: bytes, *, timeout_s: float = 20.0) -> bytes:
    """Send bytes, and read until the other side closes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def answer_on(connection: socket.socket) -> bytes:
    """One whole answer of known length; what came until then where the other side closes before."""
    text = b""
    while True:
        head, blank, body = text.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        if blank and length is not None and len(body) >= int(length[1]):
            return text
        part = connection.recv(1 << 16)
        if not part:
            return text
        text += part


def get(route: str) -> bytes:
    """A request that closes its connection."""
    return f"GET {route} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode()


def page_of(daemon: Daemon) -> tuple[int, str]:
    """The page's port, and a cookie for it."""
    with DaemonClient(daemon.path) as client:
        url = client.post("/v1/page")["url"]
    found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)(/open\?token=.+)", url)
    assert found is not None
    request = f"GET {found[2]} HTTP/1.1\r\nhost: 127.0.0.1:{found[1]}\r\nconnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(found[1])), SOON_S) as connection:
        connection.sendall(request.encode())
        cookie = re.search(rb"\r\nset-cookie: ([^;]+);", answer_on(connection))
    assert cookie is not None
    return int(found[1]), cookie[1].decode()


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])
