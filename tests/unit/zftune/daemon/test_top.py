"""`zftune top`: what is on the screen, and that it fits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from tests.support.zftune.daemon.in_process import Application, Client, answers, teller, trainings
from tests.support.zftune.daemon.scripted import EVIL, Training
from zftune.cli.top import Frame, frame, look
from zftune.daemon.client.http import DaemonClient


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Application, list[Training]]]:
    """One run that trains, and one that has ended."""
    with trainings(tmp_path_factory.mktemp("store"), "meta-llama/Llama-2-7b-hf", EVIL) as found:
        found[1][1].goodbye()
        yield found


@pytest.fixture
def runs(found: tuple[Application, list[Training]]) -> list[Training]:
    return found[1]


@pytest.fixture
def client(found: tuple[Application, list[Training]]) -> DaemonClient:
    return Client(found[0])


def drawn(found: Frame, width: int, height: int) -> list[str]:
    console = Console(file=StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    console.print(frame(found, width, height), end="")
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


def test_a_small_terminal_shows_what_matters(client: DaemonClient, runs: list[Training]) -> None:
    lines = drawn(look(client, None, 24), 80, 24)
    assert lines[0].startswith("zftune top  1 run and 1 ended on ")
    assert lines[1].split() == ["run", "state", "step", "ms", "stall", "gain", "settings"]
    assert lines[2].startswith(f"{runs[0].called} settled ")
    assert " █░░░░ 12% host " in lines[2]
    assert " ± " in lines[2]
    assert lines[2].split("% ")[-1].strip().startswith("k0.")
    assert lines[3].startswith("  ")  # the last decision's reason
    assert lines[4].startswith(f"{runs[1].called} ended ")
    below = "\n".join(lines[6:])
    for expected in (
        "meta-llama/Llama-2-7b-hf",
        "settled: ",
        "stall     █ host",
        "decisions",
        "adopted ",
        "settings",
        "◆ ",
    ):
        assert expected in below, below


def many(found: Frame) -> Frame:
    one: dict[str, Any] = json.loads(json.dumps(found.shown[0]))
    one["run"]["notices"] = ["\x1b a notice " * 40] * 2
    one["run"]["argv"] = ["\x1b]0;x" * 300]
    one["run"]["step"] = 123_456_789
    one["run"]["stall_ms"] = dict.fromkeys(("host", "h2d", "d2h", "select", "comm", "data", "other"), 900.0)
    one["decisions"] = [{**decision, "reason": "\x1b[2J because " * 60} for decision in one["decisions"] * 20]
    one["trials"] = one["trials"] * 30
    return Frame(
        source="/a/long/path" * 30, runs=[one["run"]] * 99, shown=[one] * 5, looked_at=one, trouble="lost " * 50
    )


@pytest.mark.parametrize("size", [(80, 24), (40, 24), (80, 10), (140, 24), (139, 50), (250, 70)])
def test_everything_fits(client: DaemonClient, size: tuple[int, int]) -> None:
    full = many(look(client, None, 24))
    for found in (look(client, None, size[1]), full, Frame(source="s", runs=[], shown=[], looked_at=None)):
        lines = drawn(found, *size)
        assert len(lines) <= size[1]
        assert max(map(len, lines)) <= size[0]
        assert "\x1b" not in "".join(lines)
    lines = drawn(full, 80, 50)
    assert any(line.startswith("and 94 more") for line in lines)
    assert len(lines) >= 48  # the room is used
    assert {"decisions", "settings"} <= {line.split("  ")[0] for line in lines}


def test_nothing_of_a_run_is_markup(client: DaemonClient) -> None:
    shown = "\n".join(drawn(look(client, "a2", 50), 200, 50))
    assert "</script><img src=x onerror=alert(1)>[red]\\x1b[2J" in shown


def test_a_page_is_printed_once_into_a_pipe(
    found: tuple[Application, list[Training]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers(found[0], monkeypatch)
    monkeypatch.setenv("COLUMNS", "80")
    tell = teller(capsys)
    for arguments in ([], ["--once"], ["a2"]):
        code, out, err = tell("top", *arguments)
        assert (code, err) == (0, "")
        assert out.startswith("zftune top  1 run and 1 ended on ")
        assert "\x1b" not in out
    assert f"{found[1][1].called}  </script>" in out
    document = json.loads(tell("top", "--json", "-")[1])
    assert document["schema"] == "zftune.top/1"
    assert [one["run"]["state"] for one in document["runs"]] == ["frozen", "ended"]
    assert len(json.loads(tell("top", "a1", "--json", "-")[1])["runs"]) == 1
    for arguments, sentence in (
        (["x"], "RUN 'x' is not there; the runs are "),
        (["--interval-s", "0"], "--interval-s is 0; it must be from 0.1 to 3600"),
        (["--json", "nonesuch/x"], "--json 'nonesuch/x'"),
    ):
        code, out, err = tell("top", *arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert sentence in err
