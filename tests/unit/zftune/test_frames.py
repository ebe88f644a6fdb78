"""Samples of made-up frames by a clock that is moved by hand."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from zenflow.device import CpuDevice
from zftune.frames import MAX_LINES, FrameSampler, idle_question

MS = 1_000_000
ENGINE = ("torch.autograd.graph", "/site/torch/autograd/graph.py", "_engine_run_backward", 979)


def frames_of(*places: tuple[str, str, str, int]) -> Any:
    """A stack, the innermost frame first."""
    frame = None
    for module, file, function, line in reversed(places):
        code = SimpleNamespace(co_filename=file, co_qualname=function)
        frame = SimpleNamespace(f_globals={"__name__": module}, f_code=code, f_lineno=line, f_back=frame)
    return frame


def main(line: int, function: str = "main") -> tuple[str, str, str, int]:
    return ("__main__", "/home/me/train.py", function, line)


class World:
    """A training thread, other threads, a device and the time, as a test sets them."""

    def __init__(self, *, has_stream: bool = True) -> None:
        self.stacks: dict[int, Any] = {}
        self.idle, self.waiting, self.ns = True, False, 0
        self.sampler = FrameSampler(
            (lambda: self.idle) if has_stream else None,
            lambda: self.waiting,
            thread=1,
            frames=lambda: self.stacks,
            clock_ns=lambda: self.ns,
        )

    def sample(self, *places: tuple[str, str, str, int], after_ms: int = 10) -> None:
        self.stacks[1] = frames_of(*places)
        self.ns += after_ms * MS
        self.sampler.sample()

    def lines(self) -> list[dict[str, Any]]:
        found = self.sampler.document()
        assert found is not None
        return list(found["lines"])


def test_lines_hold_the_thread_for_the_time_since_the_last_sample_while_the_device_idles() -> None:
    world = World()
    world.sample(main(3), after_ms=30)
    world.sample(main(5), after_ms=10)
    world.idle = False
    world.sample(main(7), after_ms=40)
    world.idle, world.waiting = True, True
    world.sample(main(8), after_ms=20)
    found = world.sampler.document()
    assert found is not None
    assert (found["of"], found["samples"], found["fraction"]) == ("idle", 2, 0.4)
    assert [(line["line"], line["share"]) for line in found["lines"]] == [(3, 0.75), (5, 0.25)]


def test_every_moment_counts_without_a_stream() -> None:
    world = World(has_stream=False)
    world.waiting = True
    world.sample(main(3))
    found = world.sampler.document()
    assert found is not None
    assert (found["of"], found["fraction"]) == ("step", 1.0)


def test_a_device_that_never_idles_has_no_lines() -> None:
    world = World()
    assert world.sampler.document() is None
    world.idle = False
    world.sample(main(3))
    found = world.sampler.document()
    assert found is not None
    assert (found["fraction"], found["lines"]) == (0.0, [])


def test_time_in_libraries_is_that_of_the_line_that_called_them() -> None:
    world = World()
    linear = ("torch.nn.modules.linear", "/site/torch/nn/modules/linear.py", "Linear.forward", 134)
    package = ("torch.nn.utils", "/site/torch/nn/utils/__init__.py", "clip", 7)
    hook = ("zftune.agent.hooks", "/site/zftune/agent/hooks.py", "backward.<locals>.wrapper", 60)
    model = ("models.small", "/home/me/models/small.py", "Model.forward", 12)
    world.sample(linear, model, main(3), after_ms=10)
    world.sample(package, hook, model, main(3), after_ms=20)
    world.sample(("queue", "/lib/queue.py", "Queue.get", 1), after_ms=5)  # nobody's own
    first, second = world.lines()
    assert (first["file"], first["line"], first["function"]) == ("models/small.py", 12, "Model.forward")
    assert first["within"] == {"file": "torch/nn/utils/__init__.py", "line": 7, "function": "clip"}
    assert (second["file"], second["function"]) == ("queue.py", "Queue.get")


def test_a_hook_that_runs_for_backward_is_named_in_its_place() -> None:
    world = World()
    autograds, others = 2, threading.get_ident()  # this test's thread was begun by Python
    world.stacks[others] = frames_of(main(99, "load"))
    world.sample(ENGINE, main(3))
    world.stacks[autograds] = frames_of(("zenflow.streaming", "/site/zenflow/streaming.py", "hook", 50))
    world.sample(ENGINE, main(3))
    world.sample(main(4))
    assert {(line["file"], line["line"]) for line in world.lines()} == {
        ("train.py", 3),
        ("zenflow/streaming.py", 50),
        ("train.py", 4),
    }


@pytest.mark.parametrize(("module", "counts"), [("zenflow.windows", False), ("__main__", True)])
def test_waits_of_the_runtime_are_stall_and_hold_nothing(module: str, counts: bool) -> None:
    world = World()
    wait = ("threading", "/lib/threading.py", "Condition.wait", 327)
    world.sample(wait, (module, "/site/zenflow/windows.py", "Window.close", 9), main(3))
    assert len(world.lines()) == counts


def test_the_longest_lines_are_kept() -> None:
    world = World()
    for line in range(1, MAX_LINES + 10):
        world.sample(main(line), after_ms=line)
    assert [line["line"] for line in world.lines()] == list(range(MAX_LINES + 9, 9, -1))


def test_a_device_in_host_memory_idles_once_it_has_passed_what_it_was_given() -> None:
    class Late(CpuDevice):
        now, given = 3.0, 5.0

        def mark(self) -> float:
            return self.given

        def passed(self, mark: float) -> bool:
            return self.now >= mark

    device = Late()
    ask = idle_question(device)
    assert not ask()
    device.now = 5.0
    assert ask()
