"""Ctrl-C at any line of a step: what is saved afterwards goes on bit for bit, and closing works."""

from __future__ import annotations

import copy
import random
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.tiers import fast
from tests.support.zenflow.lines import Lines, raising
from tests.support.zenflow.script_cases import SETTINGS, TRIED, Setting, ours
from tests.support.zenflow.small import Stack, seeded, tokens_of
from zenflow import ZenFlowAdamW
from zenflow.signals import HeldSignals

STEPS, FROM = 12, 5


__all__ = ["raising"]
pytestmark = pytest.mark.usefixtures("raising")


def train(model: nn.Module, optimizer: ZenFlowAdamW, last: int) -> None:
    for step in range(optimizer.steps, last):
        model(tokens_of(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def begun(setting: Setting, *, last: int) -> tuple[nn.Module, ZenFlowAdamW]:
    model = seeded(Stack, depth=1)
    optimizer = ours(setting, with_module=True)(model)
    train(model, optimizer, last)
    return model, optimizer


def weights_after(model: nn.Module, optimizer: ZenFlowAdamW) -> list[Tensor]:
    train(model, optimizer, STEPS)
    optimizer.close()
    return [weight.detach().clone() for weight in model.parameters()]


@pytest.mark.parametrize("setting", TRIED, ids=str)
def test_after_an_interrupt_at_any_line_all_can_be_saved_and_goes_on(setting: Setting) -> None:
    tries = fast(2, all_of=12)
    model, optimizer = begun(setting, last=FROM)
    with Lines() as lines:
        train(model, optimizer, STEPS - 2)
    expected, came = weights_after(model, optimizer), 0
    for _ in range(tries):
        at = random.randint(1, lines.count)
        model, optimizer = begun(setting, last=FROM)
        try:
            with Lines(at):
                train(model, optimizer, STEPS - 2)
        except KeyboardInterrupt:  # what waits for threads runs more lines at one time than at another
            came += 1
        saved, weights = optimizer.state_dict(), copy.deepcopy(model.state_dict())
        optimizer.close()
        model = seeded(Stack, depth=1)
        model.load_state_dict(weights)
        optimizer = ours(setting, with_module=True)(model)
        optimizer.load_state_dict(saved)
        found = weights_after(model, optimizer)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), f"line {at} of {lines.count}"
    assert came >= tries // 2


# --- HeldSignals -----------------------------------------------------------------------------------------------------


def test_a_signal_comes_when_the_context_ends() -> None:
    seen = []

    def nested() -> None:
        with HeldSignals():
            with HeldSignals():
                signal.raise_signal(signal.SIGINT)
                seen.append("inner")
            seen.append("outer")
        seen.append("after")

    with pytest.raises(KeyboardInterrupt):
        nested()
    assert seen == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_whoever_insists_is_heard() -> None:
    seen = []

    def twice() -> None:
        with HeldSignals():
            signal.raise_signal(signal.SIGINT)
            seen.append("first")
            signal.raise_signal(signal.SIGINT)
            seen.append("second")

    with pytest.raises(KeyboardInterrupt):
        twice()
    assert seen == ["first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_handlers_of_python_are_held_and_called_once() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
    try:
        with HeldSignals():
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR1)
            assert came == []
        assert came == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_python_does_not_handle_is_left_alone(handler: Any) -> None:
    before = signal.signal(signal.SIGHUP, handler)
    try:
        with HeldSignals():
            assert signal.getsignal(signal.SIGHUP) is handler
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_exception_within_passes() -> None:
    def fail() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"), HeldSignals():
        fail()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


_Use = Callable[[ZenFlowAdamW], Any]


@pytest.mark.parametrize(
    "use",
    [
        lambda optimizer: optimizer.state_dict(),
        lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()),
        lambda optimizer: optimizer.flush(),
        lambda optimizer: optimizer.set_knobs(topk_ratio=0.5),
        lambda optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 4))]}),
        lambda optimizer: optimizer.close(),
    ],
    ids=["state_dict", "load_state_dict", "flush", "set_knobs", "add_param_group", "close"],
)
def test_an_interrupt_leaves_no_call_half_done(use: _Use) -> None:
    setting = next(one for one in SETTINGS if one.name == "windows")
    model, optimizer = begun(setting, last=FROM)
    with Lines() as lines:
        use(optimizer)
    optimizer.close()
    for at in random.sample(range(2, max(9, lines.count // 2)), fast(2, all_of=6)):
        model, optimizer = begun(setting, last=FROM)
        with pytest.raises(KeyboardInterrupt), Lines(at):
            use(optimizer)
        optimizer.state_dict()
        if optimizer._training.open:
            train(model, optimizer, FROM + 3)
        optimizer.close()
