"""From its start to its end: signals, the service manager, idleness, and what the log says."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.routing import APIRoute

from tests.support.tiers import fast
from tests.support.zftune.daemon.daemons import SOON_S, Daemon, begun, exchange, get, serving, status_of
from tests.support.zftune.daemon.hosted import Hosted
from zftune.daemon import process
from zftune.daemon.client.http import DaemonClient
from zftune.daemon.server import app
from zftune.daemon.server.answers import DaemonState


def held(daemon: Daemon) -> socket.socket:
    """A connection whose request is under way in the daemon: its handler has begun and waits."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(SOON_S)
    connection.connect(str(daemon.path))
    connection.sendall(get("/v1/test/held"))
    until_logged(daemon, "held")
    return connection


def until_logged(daemon: Daemon, words: str) -> None:
    until_s = time.monotonic() + SOON_S
    while words not in daemon.log.read_text():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def half_a_request(daemon: Daemon) -> socket.socket:
    """A connection whose request is under way in the daemon, which has its head and waits for its body."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(SOON_S)
    connection.connect(str(daemon.path))
    connection.sendall(
        b"POST /v1/test/release HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\nexpect: 100-continue\r\n\r\n"
    )
    assert connection.recv(4096).startswith(b"HTTP/1.1 100 ")
    return connection


def until_refused(daemon: Daemon) -> None:
    """Come again until the daemon accepts no more."""
    until_s = time.monotonic() + SOON_S
    while time.monotonic() < until_s:
        try:
            with socket.socket(socket.AF_UNIX) as late:
                late.connect(str(daemon.path))
        except ConnectionRefusedError:
            return
    raise AssertionError("it still accepts")


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"log", "n"}


@pytest.mark.smoke
@pytest.mark.parametrize("number", fast([signal.SIGTERM], all_of=[signal.SIGTERM, signal.SIGINT, signal.SIGHUP]))
def test_a_signal_drains_and_ends_with_0(folder: Path, number: signal.Signals) -> None:
    with serving(folder) as daemon, DaemonClient(daemon.path) as before:
        before.get("/v1/health")
        with socket.socket(socket.AF_UNIX) as silent, held(daemon) as waiting:
            silent.connect(str(daemon.path))  # holds nothing up
            half = half_a_request(daemon)
            daemon.signal(number)
            assert daemon.told() == "STOPPING=1"
            until_refused(daemon)
            with half:
                half.sendall(b"{}")  # releases the other, too
                assert half.recv(4096).startswith(b"HTTP/1.1 200")
            answer = b"".join(iter(lambda: waiting.recv(4096), b""))
        assert status_of(answer) == 200
        assert answer.endswith(b'"released"')
        assert daemon.ends() == 0
    log = daemon.log.read_text()
    lines = [json.loads(line) for line in log.splitlines()]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"]) for line in lines)
    assert f"stopping: {number.name}" in [line["message"] for line in lines]
    assert log.index("service starts") < log.index("serves /") < log.index("service stops") < log.index("ended")
    assert left(folder) == set()


def test_a_second_signal_ends_it_at_once(folder: Path) -> None:
    with serving(folder) as daemon, held(daemon) as waiting:
        daemon.signal()
        assert daemon.told() == "STOPPING=1"
        daemon.signal()
        assert daemon.ends() == 128 + signal.SIGTERM
        assert waiting.recv(4096) == b""
    assert "service stops" not in daemon.log.read_text()
    assert left(folder) == set()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_it_is_ready_leaves_nothing_either(folder: Path, number: signal.Signals) -> None:
    with begun(folder, "--slow") as daemon:
        until_logged(daemon, "is slow")
        assert daemon.path.exists()
        with pytest.raises(ConnectionRefusedError):
            exchange(daemon.path, b"")
        daemon.signal(number)
        assert daemon.ends() == 0
    assert left(folder) == set()


def test_a_signal_that_nohup_ignores_stays_ignored(folder: Path) -> None:
    with serving(folder, hangs_up=False) as daemon:
        daemon.signal(signal.SIGHUP)
        assert status_of(exchange(daemon.path, get("/v1/health"))) == 200
        daemon.signal()
        assert daemon.ends() == 0
    assert "SIGHUP" not in daemon.log.read_text()


@pytest.mark.smoke
def test_a_private_one_ends_with_its_last_run(folder: Path) -> None:
    with serving(folder, "--private", "--idle-exit-s", "0.2") as daemon, DaemonClient(daemon.path) as client:
        client.post("/v1/test/runs/2")
        assert client.get("/v1/health")["private"] is True
        client.post("/v1/test/runs/0")
        assert daemon.told() == "STOPPING=1"
        assert daemon.ends() == 0
    assert "stopping: no run for 0.2 s" in daemon.log.read_text()
    assert left(folder) == set()


@pytest.mark.smoke
def test_who_announces_a_run_is_given_the_whole_time_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    service, now_s = Hosted(), [0.0]
    state = DaemonState(services=(service,), clock=lambda: now_s[0])
    routes = app._own_router(state).routes
    expect = next(one.endpoint for one in routes if isinstance(one, APIRoute) and one.path == "/v1/expect")
    now_s[0] = 59.0
    assert state.unneeded_s() == 59.0
    with subprocess.Popen(["sleep", "1000"]) as starting:
        asyncio.run(expect(starting.pid))
        assert state.unneeded_s() == 0.0
        now_s[0] = 500.0  # it is still importing
        assert state.unneeded_s() == 0.0
        starting.kill()
    now_s[0] = 541.0
    assert state.unneeded_s() == 41.0
    state.expect_run(starting.pid)  # which is no more
    assert state.unneeded_s() == 0.0
    now_s[0] = 600.0
    assert state.unneeded_s() == 59.0
    monkeypatch.setattr(service, "live_runs", lambda: 1)
    assert state.unneeded_s() == 0.0
    monkeypatch.undo()
    now_s[0] = 630.0
    assert state.unneeded_s() == 30.0


@pytest.mark.smoke
def test_the_watchdog_is_fed_three_times_while_it_waits() -> None:
    periods_s: list[float] = []
    sent: list[str] = []

    async def stops_within(period_s: float) -> bool:
        periods_s.append(period_s)
        return len(periods_s) > 2

    stands: Any = SimpleNamespace(
        _state=SimpleNamespace(stops_within=stops_within), _notifier=SimpleNamespace(send=sent.append)
    )
    asyncio.run(process._Daemon._feed_watchdog(stands, 0.3))
    assert periods_s == pytest.approx([0.1] * 3)
    assert sent == ["WATCHDOG=1"] * 2


@pytest.mark.smoke
def test_what_the_service_manager_is_told(caplog: pytest.LogCaptureFixture, folder: Path) -> None:
    name = f"zftune-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(SOON_S)
        manager.bind(f"\0{name}")
        process.Notifier({"NOTIFY_SOCKET": f"@{name}"}).send("READY=1", "STATUS=x")  # an abstract name
        assert manager.recv(4096) == b"READY=1\nSTATUS=x"
    watched = {"NOTIFY_SOCKET": str(folder / "gone"), "WATCHDOG_USEC": "300000"}
    assert process.Notifier(watched).watchdog_s == 0.3
    assert process.Notifier(watched | {"WATCHDOG_PID": "1"}).watchdog_s is None
    process.Notifier(watched).send("STOPPING=1")
    assert "the service manager was not told STOPPING=1" in caplog.text
