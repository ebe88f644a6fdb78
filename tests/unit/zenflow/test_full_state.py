"""One parameter's master and moments, read and set while it trains; torch's optimizers, and a run nobody looks at."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.seeds import fresh_seeds
from tests.support.zenflow.rounding import ULP
from tests.support.zenflow.stream_cases import DEVICES, device_of
from tests.support.zenflow.torch_oracle import BookLion
from zenflow import ConfigError, ZenFlowConfig, full_state
from zenflow.family import ZenFlowAdagrad, ZenFlowAdam, ZenFlowAdamW, ZenFlowLion, ZenFlowSGD

SHAPES = [(13, 7), (5, 3, 4), (9,), (1, 1), ()]
WINDOWS = {"topk_ratio": 0.3, "offload_ratio": 0.8, "update_interval": 3, "select_interval": 2, "bucket_bytes": 64}
RULES: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "adamw": (ZenFlowAdamW, torch.optim.AdamW, {"weight_decay": 0.1}),
    # A gradient that its decay cancels to the last bit would be the size of rounding, and by eps decide about a step.
    "adam": (ZenFlowAdam, torch.optim.Adam, {"weight_decay": 0.1, "eps": 1e-4}),
    "adagrad": (ZenFlowAdagrad, torch.optim.Adagrad, {"initial_accumulator_value": 0.2}),
    "lion": (ZenFlowLion, BookLion, {"weight_decay": 0.1}),
    "sgd": (ZenFlowSGD, torch.optim.SGD, {"momentum": 0.9}),
}


class Run:
    """Parameters with gradients that do not depend on them, so that late updates come to the same."""

    def __init__(
        self, rule: str = "adamw", dtype: torch.dtype = torch.float32, *, seed: int, device: str = "cpu", **knobs: Any
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        begin = [torch.randn(shape, generator=self.generator) for shape in SHAPES]
        self.weights = [nn.Parameter(one.to(dtype)) for one in begin]
        self.unused = nn.Parameter(torch.randn(6, 2, generator=self.generator).to(dtype))
        made, twin, self.hyper = RULES[rule]
        self.hyper = {"lr": 1e-2, **self.hyper}
        self.device = device_of(device)
        config = ZenFlowConfig(**{**WINDOWS, **knobs}, host_threads=1)
        self.optimizer = made([*self.weights, self.unused], **self.hyper, config=config, device=self.device)
        self.masters = [nn.Parameter(one.detach().to(torch.float32, copy=True)) for one in self.weights]
        self.twin = twin(self.masters, **self.hyper)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for weight, master in zip(self.weights, self.masters, strict=True):
                gradient = torch.randn(weight.shape, generator=self.generator).to(weight.dtype)
                weight.grad, master.grad = gradient, gradient.float()
            self.optimizer.step()
            self.twin.step()

    def bits(self) -> list[Tensor]:
        """All there is, of now."""
        saved = self.optimizer.state_dict()["state"]
        tensors = [value for state in saved.values() for value in state.values() if isinstance(value, Tensor)]
        return [*tensors, *(weight.detach().clone() for weight in self.weights)]

    def close(self) -> None:
        self.optimizer.close()
        self.device.close()


@pytest.fixture
def runs() -> Iterator[Callable[..., Run]]:
    made: list[Run] = []
    (seed,) = fresh_seeds("full state", 1)

    def make(*args: Any, **kwargs: Any) -> Run:
        made.append(Run(*args, seed=seed, **kwargs))
        return made[-1]

    yield make
    for run in made:
        run.close()


def equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_after_a_flush_it_is_the_state_of_torchs_optimizer(
    runs: Callable[..., Run], rule: str, dtype: torch.dtype
) -> None:
    run = runs(rule, dtype)
    run.step(8)
    run.optimizer.flush()
    for weight, master in zip(run.weights, run.masters, strict=True):
        ours, theirs, view = run.optimizer.full_state(weight), run.twin.state[master], run.optimizer.state[weight]
        torch.testing.assert_close(ours["master"], master.detach(), rtol=64 * ULP, atol=64 * ULP)
        assert torch.equal(ours["master"].to(dtype), weight.detach())
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=64 * ULP, atol=64 * ULP)
            assert torch.equal(view[name], ours[name])
            assert view[name].dtype == torch.float32
        assert float(view["step"]) == 8
        assert set(view) == {"step", *theirs}


@pytest.mark.parametrize("device", DEVICES)
def test_reading_and_setting_what_was_read_changes_nothing(runs: Callable[..., Run], device: str) -> None:
    knobs = {"dtype": torch.bfloat16, "device": device, "apply_lag": 3}
    watched, alone = runs(**knobs), runs(**knobs)
    for step in range(11):
        watched.step()
        alone.step()
        for weight in (*watched.weights, watched.unused):
            state = watched.optimizer.full_state(weight)
            for name, value in state.items():
                if name != "step":
                    watched.optimizer.set_full_state(weight, name, value)
        if step % 4 == 3:
            equal(watched.bits(), alone.bits())
    equal(watched.bits(), alone.bits())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["master", "exp_avg", "exp_avg_sq"])
def test_training_goes_on_from_what_was_set(runs: Callable[..., Run], name: str, dtype: torch.dtype) -> None:
    run = runs(dtype=dtype, update_interval=1, overlap_step=False)
    run.step(3)
    for weight, master in zip(run.weights, run.masters, strict=True):
        value = torch.rand(weight.shape, generator=run.generator)
        with torch.no_grad():
            (master if name == "master" else run.twin.state[master][name]).copy_(value)
        run.optimizer.set_full_state(weight, name, value)
        assert torch.equal(run.optimizer.full_state(weight)[name], value)
        if name == "master":
            assert torch.equal(weight.detach(), value.to(dtype))
    run.step(3)
    run.optimizer.flush()
    for weight, master in zip(run.weights, run.masters, strict=True):
        ours = run.optimizer.full_state(weight)["master"]
        torch.testing.assert_close(ours, master.detach(), rtol=64 * ULP, atol=64 * ULP)


@pytest.mark.parametrize("device", DEVICES)
def test_a_new_master_takes_the_place_of_closed_windows_and_the_open_one_comes_on_top(
    runs: Callable[..., Run], device: str
) -> None:
    run = runs("sgd", torch.bfloat16, device=device, topk_ratio=0.0, offload_ratio=1.0, apply_lag=3)
    for group in run.optimizer.param_groups:
        group["momentum"] = 0.0
    run.step(3)  # closes the window, whose update is on its way
    weight, value = run.weights[0], torch.rand(SHAPES[0], generator=run.generator)
    run.step()
    pending = run.masters[0].grad
    assert pending is not None
    run.optimizer.set_full_state(weight, "master", value)
    assert torch.equal(weight.detach(), value.bfloat16())
    assert torch.equal(run.optimizer.full_state(weight)["master"], value)
    run.optimizer.flush()
    torch.testing.assert_close(
        run.optimizer.full_state(weight)["master"], value - run.hyper["lr"] * pending, rtol=8 * ULP, atol=8 * ULP
    )


@pytest.mark.parametrize("step", [0, 2])
def test_a_parameter_without_an_update_begins_with_what_is_set(runs: Callable[..., Run], step: int) -> None:
    run = runs("adagrad", torch.bfloat16)
    run.step(step)
    unused, optimizer = run.unused, run.optimizer
    state = optimizer.full_state(unused)
    assert torch.equal(state["master"], unused.detach().float())
    assert torch.equal(state["sum"], torch.full((6, 2), 0.2))
    assert float(state["step"]) == 0.0
    value = torch.rand(6, 2, generator=run.generator)
    optimizer.set_full_state(unused, "master", value)
    assert torch.equal(unused.detach(), value.bfloat16())
    assert torch.equal(optimizer.full_state(unused)["master"], value)
    optimizer.set_full_state(unused, "sum", state["sum"])
    with pytest.raises(ConfigError, match="set before its first update; it can be set afterwards"):
        optimizer.set_full_state(unused, "sum", value)
    unused.grad = torch.zeros_like(unused)
    run.step()
    optimizer.flush()
    assert torch.equal(optimizer.full_state(unused)["master"], value)


def test_what_is_not_allowed(runs: Callable[..., Run]) -> None:
    run = runs()
    weight = run.weights[0]
    with pytest.raises(ConfigError, match="name is 'sum'; it must be master, exp_avg, exp_avg_sq"):
        run.optimizer.set_full_state(weight, "sum", torch.zeros(13, 7))
    with pytest.raises(ConfigError, match="exp_avg has 90 elements; it must have 91"):
        run.optimizer.set_full_state(weight, "exp_avg", torch.zeros(90))
    with pytest.raises(ConfigError, match=r"of shape \(2, 2\) is not in the optimizer"):
        run.optimizer.full_state(nn.Parameter(torch.zeros(2, 2)))
    run.step()
    with run.optimizer.flushed_weights(), pytest.raises(ConfigError, match=r"was called within flushed_weights\(\)"):
        run.optimizer.set_full_state(weight, "exp_avg", torch.zeros(13, 7))


# --- optimizer.state ------------------------------------------------------------------------------------------------


def test_tools_that_move_the_state_and_clear_it_at_the_end_do_no_harm(runs: Callable[..., Run]) -> None:
    used, alone = runs(dtype=torch.bfloat16), runs(dtype=torch.bfloat16)
    for _ in range(6):
        for run in (used, alone):
            run.step()
        for value in used.optimizer.state.values():  # as Lightning does it
            for key, tensor in value.items():
                if key != "step":
                    value[key] = tensor.to("cpu", copy=True)
    used.optimizer.state.clear()  # as at a training's end; a next step would begin anew
    equal(used.bits(), alone.bits())


def test_the_state_keeps_no_optimizer_alive() -> None:
    weight = nn.Parameter(torch.zeros(3, 2))
    optimizer = ZenFlowAdamW([weight], config=ZenFlowConfig(host_threads=1))
    gone, view = weakref.ref(optimizer), optimizer.state[weight]
    optimizer.close()
    del optimizer
    gc.collect()
    assert gone() is None
    with pytest.raises(Exception, match="the state of an optimizer that is gone was requested"):
        view["exp_avg"]


def test_nothing_is_gathered_before_somebody_asks(runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    run = runs()
    run.step()
    state = run.optimizer.state

    def read(*_: object) -> None:
        raise AssertionError("gathered")

    monkeypatch.setattr(full_state, "read", read)
    assert len(state) == len(run.weights) + 1
    for view in state.values():
        assert view
        assert (len(view), list(view), list(view.keys())) == (3, ["step", "exp_avg", "exp_avg_sq"], list(view))
        assert "exp_avg" in view
        assert "max_exp_avg_sq" not in view
        assert view.get("max_exp_avg_sq") is None
        with pytest.raises(KeyError, match="max_exp_avg_sq"):
            view["max_exp_avg_sq"]
    run.optimizer.state_dict()
    run.step()


def test_copies_of_the_state_are_plain_dictionaries(runs: Callable[..., Run]) -> None:
    run = runs()
    run.step(2)
    view = run.optimizer.state[run.weights[0]]
    for made in (copy.deepcopy(view), copy.copy(view), pickle.loads(pickle.dumps(view)), dict(view), {**view}):
        assert type(made) is dict
        equal(list(made.values()), list(view.values()))
    copied = copy.deepcopy(run.optimizer.state)
    assert [type(one) for one in copied.values()] == [dict] * len(copied)
