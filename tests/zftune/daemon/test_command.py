"""`zftune daemon start status stop`: what they print, and their exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.zftune.daemon.daemons import COMMAND, serving, zftune
from zftune import __version__
from zftune.daemon import PROTOCOL


def test_status_and_stop(folder: Path) -> None:
    with serving(folder, module=COMMAND, forked=False) as daemon:
        assert Path(f"/proc/{daemon.process.pid}/cwd").readlink() == Path("/")  # a folder may be removed
        told = zftune(folder, "daemon", "status")
        assert (told.returncode, told.stderr) == (0, "")
        assert re.fullmatch(
            rf"zftune {__version__} serves no run on {daemon.path} and began \d+ s ago \(pid {daemon.process.pid}\), "
            r"its store is memory\n\$ZFTUNE_DB asks for a database in memory: .* until it ends\.\n",
            told.stdout,
        )
        document = json.loads(zftune(folder, "daemon", "status", "--json", "-").stdout)
        assert document.pop("uptime_s") > 0
        assert document == {
            "schema": "zftune.daemon/1",
            "socket": str(daemon.path),
            "zftune": __version__,
            "protocol": PROTOCOL,
            "pid": daemon.process.pid,
            "runs": 0,
            "private": False,
            "store": "memory",
            "notices": [
                "$ZFTUNE_DB asks for a database in memory: what zftune learns is kept in memory until it ends."
            ],
        }
        stopped = zftune(folder, "daemon", "stop")
        assert (stopped.returncode, stopped.stdout, stopped.stderr) == (0, "The daemon has ended.\n", "")
        assert daemon.ends() == 0
    for command in ("status", "stop", "open"):
        ended = zftune(folder, "daemon", command)
        assert (ended.returncode, ended.stdout) == (1, "")
        assert ended.stderr == f"zftune: no daemon serves '{daemon.path}', start one with: zftune daemon start\n"


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
def test_a_wrong_command_line_is_one_sentence(folder: Path, arguments: str, words: list[str]) -> None:
    ended = zftune(folder, "daemon", *arguments.split())
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1), ended.stderr
    for word in words:
        assert word in ended.stderr
    assert list(folder.iterdir()) == []


def test_a_place_that_cannot_be_used_is_one_sentence(folder: Path) -> None:
    for place in (folder / "nonesuch" / "s", folder / ("x" * 120)):
        for command in (["daemon", "start"], ["daemon", "status"]):
            ended = zftune(folder, *command, ZFTUNE_SOCKET=str(place))
            assert ended.returncode in (1, 2)
            assert ended.stderr.count("\n") == 1
            assert str(place) in ended.stderr
    assert list(folder.iterdir()) == []


def test_a_port_that_is_taken_is_one_sentence(folder: Path) -> None:
    with serving(folder, "--port", "0") as daemon:
        found = re.search(r"127\.0\.0\.1:(\d+)", daemon.log.read_text())
        assert found is not None
        ended = zftune(folder, "daemon", "start", "--port", found[1], ZFTUNE_SOCKET=str(folder / "other"))
        assert (ended.returncode, ended.stdout) == (2, "")
        assert f"--port {found[1]} cannot be used (" in ended.stderr.splitlines()[-1]
        assert not (folder / "other").exists()
