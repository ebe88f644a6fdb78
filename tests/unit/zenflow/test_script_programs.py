"""Random scripts: passes, steps, reads, writes, copies, loads, knobs and flushes in any order, beside an oracle."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, example, given, note, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.oracle import ReferenceAdamW
from tests.support.zenflow.cases import examples
from tests.support.zenflow.script_cases import SETTINGS, Run, Setting, assert_same_reads, oracle, ours
from tests.support.zenflow.small import Stack, seeded
from zenflow import ZenFlowAdamW

Operation = tuple[Any, ...]

LOOKS: dict[str, Callable[[Run], list[torch.Tensor]]] = {
    "data": lambda run: [weight.data.clone() for weight in run.weights],
    "norms": lambda run: list(torch._foreach_norm([weight.detach() for weight in run.weights])),
    "copy": lambda run: list(copy.deepcopy(run.model).parameters()),
    "state_dict": lambda run: list(run.model.state_dict().values()),
    "one element": lambda run: [run.weights[0][1, 2]],
    "loss": lambda run: [run.loss()],
}


def _in_place(weight: nn.Parameter, factor: float) -> None:
    with torch.no_grad():
        weight.mul_(factor)


def _through_data(weight: nn.Parameter, factor: float) -> None:
    weight.data.mul_(factor)


def _rebound(weight: nn.Parameter, factor: float) -> None:
    weight.data = weight.data * factor


def _one_row(weight: nn.Parameter, factor: float) -> None:
    weight.data[0] = factor


WRITES = {"in place": _in_place, "data": _through_data, "rebind": _rebound, "row": _one_row}
KNOBS = [
    {"topk_ratio": 0.5},
    {"offload_ratio": 0.5},
    {"offload_ratio": 1.0},
    {"select_interval": 2},
    {"topk_ratio": 0.0},
]
LATE_KNOBS = [
    *KNOBS,
    {"update_interval": 2},
    {"update_interval": 3, "apply_lag": 1},
    {"overlap_step": False},
    {"look_ahead": "coast"},
    {"look_ahead": "guess"},
    {"look_ahead": "none"},
    {"window_phase": "staggered"},
    {"window_phase": "together"},
]


def operations(setting: Setting) -> st.SearchStrategy[Operation]:
    weights = st.integers(0, 6)
    return st.one_of(
        st.just(("train",)),
        st.just(("train",)),
        st.sampled_from([("pass",), ("step",), ("zero_grad",), ("flush",), ("remember",), ("load",), ("resume",)]),
        st.tuples(st.just("look"), st.sampled_from(sorted(LOOKS))),
        st.tuples(st.just("write"), st.sampled_from(sorted(WRITES)), weights, st.sampled_from([0.5, 0.9, 1.0, -1.0])),
        st.tuples(st.just("knobs"), st.sampled_from(LATE_KNOBS if setting.late else KNOBS)),
    )


programs = st.sampled_from(SETTINGS).flatmap(
    lambda setting: st.tuples(st.just(setting), st.booleans(), st.lists(operations(setting), min_size=4, max_size=24))
)


class Interpreter:
    """Runs a program with one optimizer."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.saved = copy.deepcopy(run.model.state_dict())

    def do(self, operation: Operation) -> None:
        kind, *arguments = operation
        getattr(self, f"_{kind}")(*arguments)

    def _train(self) -> None:
        self.run.step()

    def _pass(self) -> None:
        self.run.loss().backward()

    def _step(self) -> None:
        self.run.take()
        self.run.optimizer.zero_grad()

    def _zero_grad(self) -> None:
        self.run.optimizer.zero_grad()

    def _flush(self) -> None:
        if isinstance(self.run.optimizer, (ZenFlowAdamW, ReferenceAdamW)):
            self.run.optimizer.flush()

    def _remember(self) -> None:
        self.saved = copy.deepcopy(self.run.model.state_dict())

    def _load(self) -> None:
        self.run.model.load_state_dict(self.saved)

    def _resume(self) -> None:
        """Nothing that anybody could see."""
        if isinstance(self.run.optimizer, ZenFlowAdamW):
            self.run.optimizer.zero_grad()
            self.run.optimizer.load_state_dict(self.run.optimizer.state_dict())
        else:
            self.run.optimizer.zero_grad()

    def _look(self, how: str) -> None:
        self.run.note(LOOKS[how](self.run))

    def _write(self, how: str, place: int, factor: float) -> None:
        WRITES[how](self.run.weights[place], factor)

    def _knobs(self, knobs: dict[str, Any]) -> None:
        if isinstance(self.run.optimizer, (ZenFlowAdamW, ReferenceAdamW)):
            self.run.optimizer.set_knobs(**knobs)


MADE_RESIDENT = [("train",), ("knobs", {"offload_ratio": 0.5}), ("train",), ("write", "rebind", 0, 0.5), ("train",)]


@example((SETTINGS[0], False, MADE_RESIDENT))
@settings(max_examples=examples(34), deadline=None, suppress_health_check=list(HealthCheck))
@given(programs)
def test_a_random_script_reads_what_its_oracle_reads(program: tuple[Setting, bool, list[Operation]]) -> None:
    setting, with_module, steps = program
    note(f"{setting}, {'module' if with_module else 'bare'}: {steps}")
    runs = []
    for make in (ours, oracle):
        run = Run(seeded(Stack, depth=1), make(setting, with_module=with_module))
        interpreter = Interpreter(run)
        for operation in steps:
            interpreter.do(operation)
        run.note(run.weights)
        interpreter.do(("flush",))
        run.note(run.weights)
        if isinstance(run.optimizer, ZenFlowAdamW):
            run.optimizer.close()
        runs.append(run)
    assert_same_reads(*runs)
