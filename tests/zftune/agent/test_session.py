"""The session by itself: graph capture, an older DeepSpeed, patches that somebody else has replaced since."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zftune.agent import arming
from zftune.agent.events import WallClock
from zftune.agent.facts import Facts
from zftune.agent.patches import Patches
from zftune.agent.records import Settings
from zftune.agent.session import Session
from zftune.integrations import deepspeed


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in folder.iterdir() for line in path.read_text().splitlines()]


def session_in(folder: Path, **more: Any) -> Session:
    return Session(Settings(folder, 1, 3), Facts(), lambda _: WallClock(), lambda _of, _index: None, **more)


def step(session: Session, optimizer: Any) -> None:
    if session.backward_begins():
        session.backward_ends()
    session.step_begins(optimizer)
    session.step_ends(optimizer)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_nothing_is_marked_while_a_stream_is_captured(tmp_path: Path) -> None:
    capturing = False
    session = session_in(tmp_path, is_capturing=lambda: capturing)
    optimizer = optimizer_of(nn.Linear(1, 1))
    step(session, optimizer)
    capturing = True
    for _ in range(9):
        step(session, optimizer)
        assert not session.data_begins()
        assert not session.wait_begins("comm")
    capturing = False
    step(session, optimizer)
    session.close()
    assert [line["index"] for line in lines_of(tmp_path) if line["kind"] == "step"] == [1]


def test_on_this_machine_nothing_is_captured() -> None:
    assert arming.capturing()() is False


def test_what_an_installed_deepspeed_lacks_is_a_reason(tmp_path: Path) -> None:
    session = session_in(tmp_path)
    modules = {
        "deepspeed.runtime.zenflow.zenflow_stage_1_and_2": types.SimpleNamespace(ZenFlowZeroOptimizer=object),
        "deepspeed.utils.timer": types.SimpleNamespace(),
        "deepspeed.runtime.zero.stage_1_and_2": types.SimpleNamespace(),
    }
    deepspeed.watch(session, lambda name, call: call(modules[name]) if name in modules else None)
    for _ in range(2):
        step(session, optimizer_of(nn.Linear(1, 1)))
    session.close()
    missing = {line["field"]: line["reason"] for line in lines_of(tmp_path) if line["kind"] == "missing"}
    assert "ZenFlowZeroOptimizerParallel._wait_for_optimizer_process" in missing["waits_ms.host"]
    assert "update_selected_channels" in missing["waits_ms.select"]
    assert "this DeepSpeed has no" in missing["waits_ms.h2d"]


def test_a_failure_is_written_once_and_switches_off(tmp_path: Path) -> None:
    def fails(_of: Any) -> Any:
        raise ValueError("two\nlines")

    session = Session(Settings(tmp_path, 1, 3), Facts(), fails, lambda _of, _index: None)
    optimizer = optimizer_of(nn.Linear(1, 1))
    for _ in range(3):
        step(session, optimizer)
    session.fail(RuntimeError("later"))
    session.close()
    assert session.off
    (end,) = [line for line in lines_of(tmp_path) if line["kind"] == "end"]
    assert end["reason"].startswith("failed: ValueError: two lines (test_session.py:")


def test_patches_put_back_what_was_there() -> None:
    class Base:
        def inherited(self) -> str:
            return "base"

        def overridden(self) -> str:
            return "base"

    class Child(Base):
        def overridden(self) -> str:
            return "child"

    patches = Patches()
    for name in ("inherited", "overridden"):
        assert patches.replace(Child, name, lambda original: lambda self: "ours: " + original(self))
    assert not patches.replace(Child, "absent", lambda original: original)
    assert (Child().inherited(), Child().overridden()) == ("ours: base", "ours: child")
    patches.undo()
    assert (Child().inherited(), Child().overridden()) == ("base", "child")
    assert "inherited" not in vars(Child)


def test_patches_leave_what_somebody_put_on_top() -> None:
    place = types.SimpleNamespace(call=lambda: 1)
    patches = Patches()
    patches.replace(place, "call", lambda original: lambda: original() + 10)
    ours = place.call
    place.call = lambda: ours() + 100
    patches.undo()
    assert place.call() == 111
