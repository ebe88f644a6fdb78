"""`ensure_daemon()`: the daemon that answers, else a private one, whoever else asks at the same time."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.zftune.daemon.daemons import SOON_S, environment
from tests.support.zftune.daemon.hosted import Hosted
from tests.support.zftune.daemon.in_process import Client, answers, hosting
from zftune.daemon.client import autostart
from zftune.daemon.client.autostart import ensure_daemon, environment_of, log_of, revive_daemon
from zftune.daemon.client.http import DaemonClient
from zftune.daemon.client.location import locate
from zftune.errors import DaemonError, NoDaemonError

LIMITED = (
    "import os, resource as r; r.setrlimit(r.RLIMIT_NOFILE, (200, r.getrlimit(r.RLIMIT_NOFILE)[1])); "
    "os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])\n"
)
ENSURE = "from zftune.daemon.client.autostart import ensure_daemon; ensure_daemon()"


def pid_of(path: Path) -> int:
    with DaemonClient(path) as client:
        return int(client.get("/v1/health")["pid"])


def wait_for(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    """Ended; where nobody waits for orphans it stays as a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


@pytest.fixture
def private(folder: Path) -> Iterator[dict[str, str]]:
    """The environment of a private daemon, which is gone afterwards."""
    found = environment(folder)
    yield found
    path = folder / "z.sock"
    if path.exists():
        with DaemonClient(path) as client:
            client.post("/v1/stop")
        wait_for(lambda: not path.exists())


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("answer", "starts"),
    [
        ({"expecting": True}, False),
        (DaemonError("there is no '/v1/expect'", status=404), False),
        (NoDaemonError("it ended after it had told its health"), True),
    ],
)
def test_the_one_that_answers_hears_that_a_run_is_about_to_come(
    folder: Path, monkeypatch: pytest.MonkeyPatch, answer: object, starts: bool
) -> None:
    """It may be about to end for want of one."""
    asked: list[str] = []

    def post(_: DaemonClient, route: str) -> object:
        asked.append(route)
        if isinstance(answer, DaemonError):
            raise answer
        return answer

    def started(*_: object) -> int:
        raise DaemonError("one is started")

    monkeypatch.setenv("ZFTUNE_DB", "sqlite://")
    monkeypatch.setattr(DaemonClient, "post", post)
    monkeypatch.setattr(autostart, "_started", started)
    with hosting(Hosted()) as application:
        answers(application, monkeypatch)
        if starts:
            with pytest.raises(DaemonError, match="one is started"):
                ensure_daemon(environment(folder))
        else:
            assert not ensure_daemon(environment(folder))
    assert asked == [f"/v1/expect?pid={os.getpid()}"]


@pytest.mark.smoke
@pytest.mark.parametrize("private", [False, True])
def test_one_that_was_started_with_another_store_is_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, private: bool
) -> None:
    """Each run names its own."""
    given = environment(folder, HOME=str(folder), ZFTUNE_DB=str(folder / "other.db"))
    monkeypatch.setenv("ZFTUNE_DB", "sqlite://")
    with hosting(Hosted()) as application:
        answers(application, monkeypatch)
        application.state.private = private
        Client(application).post("/v1/test/runs/1")
        assert not ensure_daemon(given)
        assert application.stopped == []


@pytest.mark.smoke
def test_what_is_passed_on_to_a_private_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    given = {"PYTHONPATH": f"lib:{folder}/x:", "ZFTUNE_DB": "own.db", "ZFTUNE_SOCKET": "z.sock", "PATH": "/bin"}
    given |= {"PYTHONNOUSERSITE": "1"}  # else packages of the home folder would come before a container's
    secret = {"HF_TOKEN": "x", "RANK": "3", "OMP_NUM_THREADS": "1", "ZFTUNE_ONLINE": "daemon", "NOTIFY_SOCKET": "n"}
    assert environment_of(given | secret | {"LC_ALL": "C"}) == {
        "PYTHONPATH": f"{folder}/lib:{folder}/x",
        "ZFTUNE_DB": f"{folder}/own.db",
        "ZFTUNE_SOCKET": f"{folder}/z.sock",
        "PATH": "/bin",
        "PYTHONNOUSERSITE": "1",
        "LC_ALL": "C",
        "ZFTUNE_DISABLE": "1",
    }


@pytest.mark.smoke
def test_two_at_once_start_one_that_belongs_to_nobody(folder: Path, private: dict[str, str]) -> None:
    # what a daemon that was killed leaves behind
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(folder / "z.sock"))
    # somebody's file in the folder that it is started in is none of its modules
    (folder / "typer.py").write_text("open('taken', 'w')")
    asking = [
        subprocess.Popen(
            [sys.executable, "-c", LIMITED + ENSURE],
            env={**private, "ZFTUNE_SOCKET": "z.sock", "SECRET": "x"},
            cwd=folder,
        )
        for _ in range(2)
    ]
    assert [one.wait(SOON_S) for one in asking] == [0, 0]
    assert not (folder / "taken").exists()
    pid = pid_of(folder / "z.sock")
    assert os.getsid(pid) == pid  # no terminal's signal reaches it
    own = Path(f"/proc/{pid}")
    assert (own / "cwd").readlink() == Path("/")
    assert b"SECRET" not in (own / "environ").read_bytes()
    assert resource.prlimit(pid, resource.RLIMIT_NOFILE)[0] > 200
    assert os.sched_getaffinity(pid) >= os.sched_getaffinity(0)
    parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    assert int(parent) not in {os.getpid(), *(one.pid for one in asking)}
    assert f"(pid {pid})" in log_of(locate(private)).read_text()
    with DaemonClient(folder / "z.sock") as client:
        assert client.get("/v1/health")["private"] is True
        client.post("/v1/stop")
    wait_for(lambda: is_gone(pid))
    assert not (folder / "z.sock").exists()


def test_why_it_ended_is_said(folder: Path) -> None:
    (folder / "z.sock").write_text("mine")
    with pytest.raises(DaemonError, match=r"the private daemon ended at once \('.*z\.sock' is not a socket"):
        ensure_daemon(environment(folder))
    assert (folder / "z.sock").read_text() == "mine"


def test_one_that_died_is_started_again_and_one_that_was_ended_is_not(folder: Path, private: dict[str, str]) -> None:
    assert not revive_daemon(private)  # there was none
    assert ensure_daemon(private)
    first = pid_of(folder / "z.sock")
    assert not revive_daemon(private)
    os.kill(first, signal.SIGSTOP)
    assert not revive_daemon(private)
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: is_gone(first))
    wait_for(lambda: revive_daemon(private))  # the lock goes with its last thread
    second = pid_of(folder / "z.sock")
    assert second != first
    assert not ensure_daemon(private | {"ZFTUNE_DB": str(folder / "other.db")})  # it keeps runs in any store
    assert pid_of(folder / "z.sock") == second
    with DaemonClient(folder / "z.sock") as client:
        client.post("/v1/stop")
    wait_for(lambda: is_gone(second))
    assert not revive_daemon(private)
