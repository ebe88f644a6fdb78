"""The line that `zftune run` names makes the script's own optimizer, by zenflow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import zenflow
from zftune.agent.bootstrap.sitecustomize import ARGUMENTS, one_line

MAKE: dict[str, Callable[[torch.nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(0.25), eps=1e-6),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr_decay=0.5, initial_accumulator_value=1.0),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("name", MAKE)
def test_it_makes_one_of_the_same_class_and_arguments(name: str) -> None:
    model = torch.nn.Linear(2, 2)
    theirs = MAKE[name](model)
    torch.optim.lr_scheduler.StepLR(theirs, 1, gamma=0.5)  # the rate is the one that was asked for, not today's
    scope: dict[str, Any] = {"zenflow": zenflow, "model": model}
    exec(one_line(theirs), scope)
    ours = scope["optimizer"]
    assert type(ours).__name__ == f"ZenFlow{name}"
    shared = theirs.defaults.keys() & ours.defaults.keys() & {*ARGUMENTS}
    assert {"lr", "weight_decay"} <= shared
    assert {one: float(ours.defaults[one]) if one == "lr" else ours.defaults[one] for one in shared} == {
        one: theirs.defaults[one] for one in shared
    }
    ours.close()


def test_groups_are_the_scripts_own_and_a_subclass_is_of_its_class() -> None:
    class Mine(torch.optim.AdamW):
        pass

    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in (0.1, 0.2)]
    assert one_line(Mine(groups, lr=0.5)).startswith("optimizer = zenflow.ZenFlowAdamW([...], lr=0.5, betas=(0.9, ")


def test_of_another_kind_what_there_is() -> None:
    of_none = one_line(torch.optim.RMSprop([torch.zeros(1, requires_grad=True)]))
    expected = "ZenFlowAdamW, ZenFlowAdam, ZenFlowAdagrad, ZenFlowLion, ZenFlowSGD, since it has no RMSprop"
    assert of_none == f"one of zenflow.{expected}"
