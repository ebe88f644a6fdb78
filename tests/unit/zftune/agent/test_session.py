"""The session by itself: graph capture, an older DeepSpeed, patches that somebody else has replaced since."""

from __future__ import annotations

import gc
import json
import threading
import time
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zenflow import ZenFlowAdamW, ZenFlowConfig
from zenflow.device import CpuDevice
from zftune.agent import arming
from zftune.agent.facts import Facts
from zftune.agent.hooks import _capture, hook_torch
from zftune.agent.recorder import DeviceEvents, StreamBackend, WallClock
from zftune.agent.records import Settings
from zftune.agent.session import Patches, Session
from zftune.agent.systems import deepspeed, runtime
from zftune.frames import FrameSampler
from zftune.profile.command.document import runtime_of
from zftune.profile.command.records import read_records


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in folder.iterdir() for line in path.read_text().splitlines()]


def session_in(folder: Path, *, steps: int = 3, backend: StreamBackend | None = None, **more: Any) -> Session:
    backend = backend or WallClock()
    return Session(Settings(folder, 1, steps), Facts(), lambda _: backend, lambda _of: None, **more)


def step(session: Session, optimizer: Any) -> None:
    if session.backward_begins(session.clock_ns()):
        session.backward_ends(session.clock_ns())
    session.step_begins(session.clock_ns(), optimizer)
    session.step_ends(session.clock_ns(), optimizer)


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
        assert not session.data_begins(0)
        assert not session.wait_begins(0, "comm")
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
    optimizer = optimizer_of(nn.Linear(1, 1))
    for _ in range(2):
        step(session, optimizer)
    session.close()
    missing = {line["field"]: line["reason"] for line in lines_of(tmp_path) if line["kind"] == "missing"}
    assert "ZenFlowZeroOptimizerParallel._wait_for_optimizer_process" in missing["waits_ms.host"]
    assert "update_selected_channels" in missing["waits_ms.select"]
    assert "this DeepSpeed has no" in missing["waits_ms.h2d"]


def test_what_a_side_stream_is_given_is_no_wait_of_the_compute_stream(tmp_path: Path) -> None:
    """A prefetch: a collective that the training thread calls inside `with torch.cuda.stream(side)`."""

    class Streams(CpuDevice):
        current = 7

        def current_stream(self) -> int:
            return self.current

    streams = Streams()
    session = session_in(tmp_path, backend=DeviceEvents(streams))
    optimizer = optimizer_of(nn.Linear(1, 1))
    step(session, optimizer)
    begun = []
    for streams.current in (7, 8, 7):
        begun.append(session.wait_begins(session.clock_ns(), "comm"))
        if begun[-1]:
            session.wait_ends(session.clock_ns())
    assert begun == [True, False, True]


@pytest.mark.parametrize("make", [WallClock, lambda: DeviceEvents(CpuDevice())])
def test_with_one_stream_every_wait_is_its_own(make: Any) -> None:
    assert make().on_compute_stream()


def test_the_learning_rate_is_that_of_the_first_measured_step(tmp_path: Path) -> None:
    """Though it is told when that step's marks have been passed, and a scheduler has been called meanwhile."""
    session = session_in(tmp_path, steps=5)
    optimizer = optimizer_of(nn.Linear(1, 1))
    for number in range(10):
        optimizer.param_groups[0]["lr"] = float(number)
        step(session, optimizer)
    (model,) = [line for line in lines_of(tmp_path) if line["kind"] == "model"]
    measured = [line["index"] for line in lines_of(tmp_path) if line["kind"] == "step" and line["measured"]]
    assert model["learning_rates"] == [float(measured[0])]


def last_recording(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a reader takes: the lines since the last restart."""
    begins = [at for at, line in enumerate(lines) if line["kind"] == "restart"]
    return lines[begins[-1] :] if begins else lines


def test_another_training_replaces_what_was_measured_of_the_first(tmp_path: Path) -> None:
    session = session_in(tmp_path, steps=30)
    models = [nn.Linear(size, 1) for size in (1, 2)]
    first, second = map(optimizer_of, models)
    for _ in range(20):
        step(session, first)
    for _ in range(60):
        step(session, second)
    lines = last_recording(lines_of(tmp_path))
    assert (lines[0]["kind"], lines[0]["device"], lines[0]["has_stream"]) == ("restart", "cpu", False)
    (model,) = [line for line in lines if line["kind"] == "model"]
    assert model["parameters"] == 3
    measured = [line["index"] for line in lines if line["kind"] == "step" and line["measured"]]
    assert measured == list(range(1, 31))
    assert lines[-1] == {"kind": "end", "reason": "measured", "ns": lines[-1]["ns"]}
    assert session.off


def zenflow_training() -> tuple[nn.Module, ZenFlowAdamW]:
    model = nn.Linear(64, 64)
    return model, ZenFlowAdamW(model.parameters(), config=ZenFlowConfig(topk_ratio=0, update_interval=1))


def train(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        session.backward_begins(session.clock_ns())
        model(torch.ones(1, 64)).sum().backward()
        session.backward_ends(session.clock_ns())
        session.step_begins(session.clock_ns(), optimizer)
        optimizer.step()
        session.step_ends(session.clock_ns(), optimizer)
        optimizer.zero_grad()


@pytest.mark.parametrize("gone", [False, True])
def test_a_training_that_ends_early_keeps_zenflows_figures(tmp_path: Path, gone: bool) -> None:
    """The rows of the last steps are made at the end, where the optimizer may be no more."""
    session = Session(Settings(tmp_path, 1, 30), Facts(), arming.backend_for, runtime.rows_of)
    model, optimizer = zenflow_training()
    train(session, model, optimizer, 9)
    if gone:
        weights = weakref.ref(model.weight)
        del model, optimizer
        gc.collect()
        assert weights() is None  # nothing of ours kept it
    session.close()
    (rank,) = read_records(tmp_path)
    assert [row["runtime"]["step"] for row in rank.steps] == list(range(2, 10))
    assert "timeline" in rank.steps[-1]["runtime"]
    assert all("timeline" not in row["runtime"] for row in rank.steps[:-1])
    found = runtime_of(rank, {})
    assert found is not None
    assert found.host_bytes["state"] > 0
    assert found.timeline is not None


def test_zenflows_figures_survive_a_kill_and_a_resume(tmp_path: Path) -> None:
    session = Session(Settings(tmp_path, 1, 30), Facts(), arming.backend_for, runtime.rows_of)
    model, optimizer = zenflow_training()
    train(session, model, optimizer, 5)
    state = optimizer.state_dict()
    train(session, model, optimizer, 1)
    optimizer.load_state_dict(state)
    train(session, model, optimizer, 4)
    (rank,) = read_records(tmp_path)  # nobody has closed the session
    assert [row["runtime"]["step"] for row in rank.steps] == [2, 3, 4, 5, 6, 6, 7]
    assert runtime_of(rank, {}) is not None


def test_what_no_module_holds_is_measured_too() -> None:
    facts = Facts()
    facts.look(torch.optim.SGD([nn.Parameter(torch.ones(3, 2))], lr=0.1), WallClock())
    assert facts.model()["model_bytes"] == 24


def test_a_short_second_training_replaces_nothing(tmp_path: Path) -> None:
    session = session_in(tmp_path, steps=90)
    models = [nn.Linear(size, 1) for size in (1, 2)]
    first, second = map(optimizer_of, models)
    for _ in range(30):
        step(session, first)
    for _ in range(40):
        step(session, second)
    session.close()
    lines = lines_of(tmp_path)
    assert lines == last_recording(lines)
    assert [line["parameters"] for line in lines if line["kind"] == "model"] == [2]
    assert lines[-1]["reason"] == "exit"


@pytest.mark.parametrize("turns", [(1, 25), (40, 40), (3, 30, 30), (1,) * 40])
def test_optimizers_that_take_turns_do_not_begin_again_and_again(tmp_path: Path, turns: tuple[int, ...]) -> None:
    """As those of a GAN, of an actor and its critic, or one for each layer."""
    session = session_in(tmp_path, steps=50)
    optimizers = [optimizer_of(nn.Linear(size, 1)) for size in range(1, len(turns) + 1)]
    for _ in range(60):
        for optimizer, count in zip(optimizers, turns, strict=True):
            for _ in range(count):
                step(session, optimizer)
    lines = last_recording(lines_of(tmp_path))
    measured = [line["index"] for line in lines if line["kind"] == "step" and line["measured"]]
    assert measured == list(range(1, 51))
    assert lines[-1]["reason"] == "measured"
    assert sum(line["kind"] == "restart" for line in lines_of(tmp_path)) <= 1


def test_inner_optimizers_that_come_and_go_give_way_to_the_one_that_stays(tmp_path: Path) -> None:
    session = session_in(tmp_path, steps=10)
    model = nn.Linear(9, 1)
    outer = optimizer_of(model)
    for _ in range(60):
        inner = optimizer_of(nn.Linear(1, 1))
        for _ in range(8):
            step(session, inner)
        step(session, outer)
    lines = last_recording(lines_of(tmp_path))
    assert [line["parameters"] for line in lines if line["kind"] == "model"] == [10]
    assert lines[-1]["reason"] == "measured"


def test_an_optimizer_made_anew_for_the_same_parameters_goes_on(tmp_path: Path) -> None:
    session = session_in(tmp_path, steps=50)
    model = nn.Linear(1, 1)
    for _ in range(12):
        optimizer = optimizer_of(model)
        for _ in range(6):
            step(session, optimizer)
    lines = lines_of(tmp_path)
    assert not any(line["kind"] == "restart" for line in lines)
    assert [line["index"] for line in lines if line["kind"] == "step" and line["measured"]] == list(range(1, 51))


def test_the_hooks_time_is_all_that_they_take(tmp_path: Path) -> None:
    """Each look at the clock takes a microsecond: what is charged spans a hook's first and last one."""
    looks = 0

    def clock_ns() -> int:
        nonlocal looks
        looks += 1
        return 1000 * looks

    session = session_in(tmp_path, clock_ns=clock_ns, backend=WallClock(clock_ns))
    optimizer = optimizer_of(nn.Linear(1, 1))
    for _ in range(3):
        before = looks
        step(session, optimizer)
    all_of_a_step = looks - before
    session.close()
    second = [line for line in lines_of(tmp_path) if line["kind"] == "step"][1]
    hooks = 4  # backward's and step's, which begin and end: n looks are n - 1 microseconds
    assert 1e3 * second["overhead_ms"] == pytest.approx(all_of_a_step - hooks)


def test_another_threads_hooks_are_not_charged(tmp_path: Path) -> None:
    session = session_in(tmp_path)
    optimizer = optimizer_of(nn.Linear(1, 1))
    step(session, optimizer)
    for begun in range(9):
        thread = threading.Thread(target=session.data_begins, args=(-(10**12) - begun,))
        thread.start()
        thread.join()
    step(session, optimizer)
    session.close()
    (line,) = [line for line in lines_of(tmp_path) if line["kind"] == "step"]
    assert line["overhead_ms"] < 1e5


def test_what_comes_of_a_batch_is_charged_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_in(tmp_path)
    monkeypatch.setattr(session._facts, "batch", lambda *_: time.sleep(0.01))
    hook_torch(session)
    try:
        loader: DataLoader[Any] = DataLoader(TensorDataset(torch.zeros(4, 1)))
        model = nn.Linear(1, 1)
        optimizer = optimizer_of(model)
        for (batch,) in loader:
            model(batch).sum().backward()
            optimizer.step()
    finally:
        session.close()
        session.release()
    steps = [line for line in lines_of(tmp_path) if line["kind"] == "step"]
    assert len(steps) == 3
    assert all(10 <= line["overhead_ms"] <= line["step_ms"] for line in steps)


def test_a_fork_keeps_the_marks_that_it_inherits(tmp_path: Path) -> None:
    """Where CUDA is not initialised its events cannot be destroyed."""

    class Mark:
        pass

    def mark() -> Any:
        made.append(weakref.ref(new := Mark()))
        return new

    made: list[weakref.ref[Mark]] = []
    session = session_in(tmp_path, backend=WallClock(mark))
    optimizer = optimizer_of(nn.Linear(1, 1))
    step(session, optimizer)
    step(session, optimizer)
    held = [mark for mark in made if mark() is not None]
    assert held
    session.forked()  # as os.fork() calls it in the child
    gc.collect()
    assert all(mark() is not None for mark in held)


def test_a_failure_is_written_once_and_switches_off(tmp_path: Path) -> None:
    def fails(_of: Any) -> Any:
        raise ValueError("two\nlines")

    session = Session(Settings(tmp_path, 1, 3), Facts(), fails, lambda _of: None)
    optimizer = optimizer_of(nn.Linear(1, 1))
    for _ in range(3):
        step(session, optimizer)
    session.fail(RuntimeError("later"))
    session.close()
    assert session.off
    (end,) = [line for line in lines_of(tmp_path) if line["kind"] == "end"]
    assert end["error"].startswith("ValueError: two lines (test_session.py:")


class Sampler(FrameSampler):
    def __init__(self, may_not_ask: Callable[[], bool], log: list[str]) -> None:
        super().__init__(None)
        self.may_not_ask, self.log = may_not_ask, log

    def start(self) -> None:
        self.log.append("start")

    def stop(self) -> None:
        self.log.append("stop")

    def document(self) -> dict[str, Any]:
        return {"of": "step", "samples": 3}


def sampling_in(folder: Path, warmup: int, log: list[str]) -> tuple[Session, list[Sampler]]:
    made: list[Sampler] = []

    def sampler_for(_backend: StreamBackend, may_not_ask: Callable[[], bool]) -> Sampler:
        made.append(Sampler(may_not_ask, log))
        return made[-1]

    settings = Settings(folder, warmup, 3)
    return Session(settings, Facts(), lambda _: WallClock(), lambda _of: None, sampler_for=sampler_for), made


def test_frames_are_sampled_in_the_measured_steps(tmp_path: Path) -> None:
    log: list[str] = []
    session, made = sampling_in(tmp_path, 2, log)
    optimizer = optimizer_of(nn.Linear(1, 1))
    seen = []
    for _ in range(8):
        step(session, optimizer)
        seen.append(list(log))
    begins = seen.index(["start"])
    assert begins == 1  # between the last warm-up step's end and the first measured one's beginning
    assert seen[begins + 3][:2] == ["start", "stop"]
    assert len(made) == 1
    (lines,) = [line for line in lines_of(tmp_path) if line["kind"] == "lines"]
    assert lines["samples"] == 3


def test_the_device_is_not_asked_in_waits_and_while_a_graph_is_captured(tmp_path: Path) -> None:
    session, made = sampling_in(tmp_path, 1, [])
    optimizer = optimizer_of(nn.Linear(1, 1))
    for _ in range(2):
        step(session, optimizer)
    (sampler,) = made
    graph = types.SimpleNamespace(begin=sampler.may_not_ask, end=sampler.may_not_ask)
    begin, end = (_capture(session, change, call) for change, call in ((1, graph.begin), (-1, graph.end)))
    asked = [sampler.may_not_ask(), begin(), sampler.may_not_ask(), end(), sampler.may_not_ask()]
    assert asked == [False, True, True, True, False]
    assert session.wait_begins(session.clock_ns(), "comm")
    assert sampler.may_not_ask()
    session.wait_ends(session.clock_ns())
    assert not sampler.may_not_ask()


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
