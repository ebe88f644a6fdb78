"""`zftune daemon start status stop`: what they print, and their exit codes."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest

from tests.support.zftune.daemon.daemons import COMMAND, serving, zftune
from tests.support.zftune.daemon.hosted import Hosted
from tests.support.zftune.daemon.in_process import Tell, answers, hosting, teller
from zftune import __version__
from zftune.daemon import PROTOCOL
from zftune.daemon.server.guard import PageServer
from zftune.errors import BadInputError

pytestmark = pytest.mark.smoke


@pytest.fixture
def tell(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tell:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("ZFTUNE_SOCKET", str(folder / "z.sock"))
    return teller(capsys)


def test_a_daemon_is_started_looked_at_and_stopped(folder: Path) -> None:
    with serving(folder, module=COMMAND) as daemon:
        assert Path(f"/proc/{daemon.process.pid}/cwd").readlink() == Path("/")  # a folder may be removed
        told = zftune(folder, "daemon", "status")
        assert (told.returncode, told.stderr) == (0, "")
        assert re.fullmatch(
            rf"zftune {__version__} serves no run on {daemon.path} and began \d+ s ago \(pid {daemon.process.pid}\), "
            r"no run has named a store yet\n",
            told.stdout,
        )
        stopped = zftune(folder, "daemon", "stop")
        assert (stopped.returncode, stopped.stdout, stopped.stderr) == (0, "The daemon has ended.\n", "")
        assert daemon.ends() == 0


def test_status_and_open(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    with hosting(Hosted()) as application:
        answers(application, monkeypatch)
        code, out, err = tell("daemon", "status", "--json", "-")
        assert (code, err) == (0, "")
        document = json.loads(out)
        assert (document["schema"], document["protocol"], document["runs"]) == ("zftune.daemon/1", PROTOCOL, 0)
        code, out, err = tell("daemon", "open")
        assert (code, err) == (0, "")
        assert re.fullmatch(r"http://127\.0\.0\.1:(\d+)(/open\?token=.+)\n", out)


def test_no_daemon(tell: Tell, folder: Path) -> None:
    absent = f"zftune: no daemon serves '{folder / 'z.sock'}', start one with: zftune daemon start\n"
    for command in ("status", "stop", "open"):
        assert tell("daemon", command) == (1, "", absent)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("start --idle-exit-s 0", ["--idle-exit-s is 0", "above 0"]),
        ("start --idle-exit-s nan", ["--idle-exit-s is nan", "above 0"]),
        ("start --idle-exit-s soon", ["--idle-exit-s is 'soon'", "it must be a number"]),
        ("start --port 65536", ["--port is 65536", "it must be from 0 to 65535"]),
        ("start --port 1 --metrics-textfile nonesuch/x", ["--metrics-textfile 'nonesuch/x'", "a folder that exists"]),
        ("start --metrics-textfile -", ["--metrics-textfile '-'", "give a file"]),
        ("status --json nonesuch/x", ["--json 'nonesuch/x'"]),
        ("nonesuch", ["No such command", "nonesuch"]),
    ],
)
def test_a_wrong_command_line_is_one_sentence(tell: Tell, folder: Path, arguments: str, words: list[str]) -> None:
    code, out, err = tell("daemon", *arguments.split())
    assert (code, out, err.count("\n")) == (2, "", 1), err
    for word in words:
        assert word in err
    assert list(folder.iterdir()) == []


def test_a_place_that_cannot_be_used_is_one_sentence(tell: Tell, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (folder / "nonesuch" / "s", folder / ("x" * 120)):
        monkeypatch.setenv("ZFTUNE_SOCKET", str(place))
        code, _, err = tell("daemon", "status")
        assert code in (1, 2)
        assert err.count("\n") == 1
        assert str(place) in err


def test_a_port_that_is_taken_is_one_sentence(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, hosting() as application:
        port = other.getsockname()[1]
        with pytest.raises(BadInputError, match=rf"--port {port} cannot be used \("):
            application.run(PageServer.serve(application.app, port, folder / "token"))
