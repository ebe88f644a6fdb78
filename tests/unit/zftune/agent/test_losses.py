"""The loss of a step, from what backward begins from or from what the script logs: never a wrong one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zftune
from tests.unit.zftune.agent.test_session import lines_of, session_in
from zftune.agent.hooks import backward, hook_torch
from zftune.agent.session import Session

STEPS = 6


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    made = session_in(tmp_path, steps=STEPS)
    hook_torch(made)
    yield made
    made.release()


def losses(session: Session, folder: Path, passes: Callable[[int], None]) -> list[Any]:
    """Of the measured steps; `passes` makes the backward passes of a step, which is given."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for step in range(STEPS + 1):
        passes(step)
        optimizer.step()
        optimizer.zero_grad()
    session.close()
    return [line["loss"] for line in lines_of(folder) if line["kind"] == "step"]


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, requires_grad=True) * 1.0


def test_what_backward_begins_from(session: Session, tmp_path: Path) -> None:
    assert losses(session, tmp_path, lambda step: scalar(10.0 - step).backward()) == [9.0, 8.0, 7.0, 6.0, 5.0, 4.0]


def test_the_mean_over_a_steps_passes(session: Session, tmp_path: Path) -> None:
    def passes(step: int) -> None:
        for part in (1.0, 2.0, 6.0):
            scalar(part + step).backward()

    assert losses(session, tmp_path, passes) == [4.0, 5.0, 6.0, 7.0, 8.0, 9.0]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    "divided", [lambda loss: loss / 3, lambda loss: loss * (1 / 3), lambda loss: loss / torch.tensor(3.0)]
)
def test_a_loss_that_was_divided_for_accumulation_is_shown_whole(
    session: Session, tmp_path: Path, divided: Callable[[torch.Tensor], torch.Tensor], scaled: bool
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def passes(step: int) -> None:
        for part in (1.0, 2.0, 6.0):
            loss = divided(scalar(part + step))
            (scaler.scale(loss) if scaled else loss).backward()

    assert losses(session, tmp_path, passes) == pytest.approx([4.0, 5.0, 6.0, 7.0, 8.0, 9.0])


def test_a_loss_that_was_divided_otherwise_is_as_it_is(session: Session, tmp_path: Path) -> None:
    assert losses(session, tmp_path, lambda step: (scalar(10.0 - step) / 2).backward())[:2] == [4.5, 4.0]


def test_a_scaled_loss_is_none_but_what_was_scaled_is(session: Session, tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    assert losses(session, tmp_path, lambda step: scaler.scale(scalar(10.0 - step)).backward())[:2] == [9.0, 8.0]


def test_what_the_script_logs_has_the_last_word(session: Session, tmp_path: Path) -> None:
    def passes(step: int) -> None:
        (scalar(10.0 - step) * 0.125).backward()
        zftune.log_loss(torch.tensor(10.0 - step))

    assert losses(session, tmp_path, passes)[:2] == [9.0, 8.0]
    assert {line["loss_source"] for line in lines_of(tmp_path) if line["kind"] == "step"} == {"log_loss"}


def test_an_engine_is_given_the_loss_and_begins_from_another_tensor(session: Session, tmp_path: Path) -> None:
    def engines_backward(_engine: object, loss: torch.Tensor) -> None:
        (loss * 4096).backward()

    hooked = backward(session, engines_backward, of_engine=True)
    assert losses(session, tmp_path, lambda step: hooked(object(), scalar(10.0 - step)))[:2] == [9.0, 8.0]


def test_what_is_no_single_number_is_left_out(session: Session, tmp_path: Path) -> None:
    def passes(_: int) -> None:
        weights = torch.ones(3, requires_grad=True)
        (weights * 2).backward(torch.ones(3))

    assert losses(session, tmp_path, passes) == [None] * STEPS


def test_a_loss_that_is_not_a_number_is_told_as_such(session: Session, tmp_path: Path) -> None:
    found = losses(session, tmp_path, lambda step: scalar(math.inf if step == 3 else 1.0).backward())
    assert found[:2] == [1.0, 1.0]
    assert math.isnan(found[2])


def test_a_session_that_is_over_hears_no_more_losses(session: Session) -> None:
    from zftune import losses as agent_losses

    assert session.log_loss in agent_losses.listeners
    session.release()
    assert session.log_loss not in agent_losses.listeners
