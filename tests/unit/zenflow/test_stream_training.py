"""Training with gradients that leave during backward: bit for bit training that keeps them until `step()`."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.oracle import ReferenceAdamW
from tests.support.tiers import combinations
from tests.support.zenflow.cases import same_bits
from tests.support.zenflow.small import Stack, assert_same_run, seeded, tokens_of, train
from tests.support.zenflow.stream_cases import DEVICES, MODELS, device_of
from zenflow import HostMemoryError, UnsupportedError, ZenFlowAdamW, ZenFlowConfig
from zenflow.runtime import Runtime
from zenflow.standin import GradientPlaceholder
from zftune.emulation import EmulatedAccelerator, Rig

KNOBS: list[dict[str, Any]] = [
    {"topk_ratio": 0.25, "update_interval": 3, "select_interval": 2},
    {"topk_ratio": 0.25, "update_interval": 2, "select_interval": 1, "offload_ratio": 0.8, "max_grad_norm": 0.5},
    {"topk_ratio": 0.0, "update_interval": 1, "overlap_step": False, "pipeline": "none"},
    {"topk_ratio": 0.3, "update_interval": 4, "select_interval": 3, "deferred_update": "mean", "bucket_bytes": 64},
    {"topk_ratio": 0.1, "update_interval": 1, "skip_nonfinite": True, "max_grad_norm": 0.1},
]
WINDOWS: dict[str, Any] = {"topk_ratio": 0.25, "update_interval": 3, "select_interval": 2}


@pytest.mark.parametrize(
    ("model", "knobs", "device"),
    combinations(model=["stack", "shared, reentrant"], knobs=KNOBS, device=DEVICES),
)
def test_streamed_is_not_streamed(model: str, knobs: dict[str, Any], device: str) -> None:
    build, options = MODELS[model]
    runs = []
    for stream in (True, False):
        accelerator = device_of(device)
        config = ZenFlowConfig(stream=stream, **knobs)
        runs.append(train(seeded(build, torch.bfloat16, **options), config, steps=12, device=accelerator))
        accelerator.close()
    assert_same_run(*runs)


class Run:
    """One training run, a step at a time."""

    def __init__(self, *, stream: bool = True, dtype: torch.dtype = torch.float32, **knobs: Any) -> None:
        self.model: Any = seeded(Stack, dtype)
        self.optimizer = self.made(stream=stream, **knobs)
        self.batch = 0

    def made(self, **knobs: Any) -> ZenFlowAdamW:
        config = ZenFlowConfig(**{**WINDOWS, **knobs})
        return ZenFlowAdamW(self.model.parameters(), lr=0.02, config=config, module=self.model)

    def backward(self) -> None:
        self.batch += 1
        self.model(tokens_of(self.batch)).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def gone(self) -> int:
        """Gradients that have left."""
        return sum(isinstance(parameter.grad, GradientPlaceholder) for parameter in self.model.parameters())

    def weights(self) -> list[Tensor]:
        self.optimizer.flush()
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def in_both_ways(do: Callable[[Run], None], **knobs: Any) -> None:
    """Runs what is done with and without streaming; the weights must be the same to a bit."""
    weights = []
    for stream in (True, False):
        run = Run(stream=stream, **knobs)
        do(run)
        weights.append(run.weights())
        run.optimizer.close()
    assert all(bool(same_bits(a, b).all()) for a, b in zip(*weights, strict=True))


def test_gradients_leave_from_the_first_step_on() -> None:
    run = Run()
    gone = []
    for _ in range(3):
        run.backward()
        gone.append(run.gone)
        run.step()
    assert gone == [6, 6, 6]
    run.optimizer.close()


def _write(run: Run) -> None:
    with torch.no_grad():
        run.model.head.weight.mul_(0.5)


def _load(run: Run) -> None:
    run.optimizer.load_state_dict(run.optimizer.state_dict())


def _add(run: Run) -> None:
    run.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(4, 8))]})


def _begin_again(run: Run) -> None:
    run.optimizer.zero_grad()
    run.backward()


BEFORE_THE_FIRST_STEP: dict[str, Callable[[Run], object]] = {
    "write": _write,
    "rebind": lambda run: setattr(run.model.head.weight, "data", run.model.head.weight.data * 0.5),
    "load": _load,
    "add a group": _add,
    "another split": lambda run: run.optimizer.set_knobs(topk_ratio=0.5, offload_ratio=0.5),
    "everything selected": lambda run: run.optimizer.set_knobs(topk_ratio=1.0),
    "flush": lambda run: run.optimizer.flush(),
    "begin again": _begin_again,
    "accumulate": Run.backward,
    "freeze": lambda run: run.model.head.weight.requires_grad_(False),
    "drop": lambda run: setattr(run.model.head.weight, "grad", None),
}


@pytest.mark.parametrize("what", BEFORE_THE_FIRST_STEP)
def test_what_comes_between_the_first_backward_and_the_first_step(what: str) -> None:
    def do(run: Run) -> None:
        run.backward()
        BEFORE_THE_FIRST_STEP[what](run)
        run.step()
        for _ in range(7):
            run.backward()
            run.step()

    in_both_ways(do)


def test_a_host_that_is_too_small_is_said_by_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise HostMemoryError("the host has no memory")

    run = Run()
    monkeypatch.setattr(Runtime, "fitting", refuse)
    run.backward()
    assert run.gone == 0
    with pytest.raises(HostMemoryError, match="the host has no memory"):
        run.step()
    monkeypatch.undo()
    run.step()  # nothing was lost
    run.backward()
    run.step()
    run.optimizer.close()


@pytest.mark.parametrize("resumed", [False, True])
def test_the_first_step_that_counts_selects(resumed: bool) -> None:
    """As under GradScaler, which mostly skips the first steps."""
    torch.manual_seed(4)
    config = ZenFlowConfig(topk_ratio=0.25, update_interval=4, select_interval=1000)
    weights = [torch.nn.Parameter(torch.randn(5, 12)), torch.nn.Parameter(torch.randn(12, 5))]
    ours = ZenFlowAdamW(weights, config=config)
    others = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
    oracle = ReferenceAdamW(others, config=config)
    skips = (True, True, False, False, True, False, False, False, False)
    for step, skipped in enumerate(skips):
        loud = torch.zeros(12)
        loud[step : step + 3] = 10.0
        for weight, other in zip(weights, others, strict=True):
            other.grad = torch.randn_like(weight) * (1 + loud[: weight.shape[1]])
            (weight * other.grad).sum().backward()  # so that the gradient leaves
        ours.found_inf = oracle.found_inf = torch.tensor(float(skipped))  # type: ignore[attr-defined]
        ours.step()
        oracle.step()
        ours.zero_grad()
        assert all(bool(same_bits(a.detach(), b.detach()).all()) for a, b in zip(weights, others, strict=True)), step
        if step == 1 and resumed:
            ours.load_state_dict(ours.state_dict())
    assert oracle.selected(others[0]) == [2, 3, 4]  # of step 3, at the close of step 4
    ours.close()


def test_knobs_that_move_columns_between_backward_and_step() -> None:
    def do(run: Run) -> None:
        for step in range(10):
            run.backward()
            if step == 3:
                run.optimizer.set_knobs(topk_ratio=0.5, update_interval=2)
            if step == 6:
                run.optimizer.set_knobs(offload_ratio=0.5)
            run.step()

    in_both_ways(do)


def test_accumulation_whether_announced_or_not() -> None:
    def do(run: Run) -> None:
        for passes in (2, 2, 3, 1, 2, 2):
            for _ in range(passes):
                run.backward()
            run.step()

    for announced in (1, 2):
        in_both_ways(do, gradient_accumulation_steps=announced)


def test_saving_and_going_on_in_the_middle_of_a_window() -> None:
    def clipped_step(run: Run, step: int) -> None:
        run.backward()
        assert run.gone == 6
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.05 * (1 + step))
        run.model.head.weight.grad.mul_(0.5)  # so that not all weights have the same factor
        run.step()

    straight = Run()
    for step in range(10):
        clipped_step(straight, step)
        if step == 4:
            file = io.BytesIO()
            torch.save((straight.model.state_dict(), straight.optimizer.state_dict()), file)
            file.seek(0)
    again = Run()
    model, optimizer = torch.load(file, weights_only=True)
    again.model.load_state_dict(model)
    again.optimizer.load_state_dict(optimizer)
    again.batch = 5
    for step in range(5, 10):
        clipped_step(again, step)
    assert all(torch.equal(a, b) for a, b in zip(straight.weights(), again.weights(), strict=True))
    straight.optimizer.close()
    again.optimizer.close()


def near(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("foreach", [None, True, False])
def test_clip_grad_norm_is_max_grad_norm(foreach: bool | None) -> None:
    runs = [Run(), Run(stream=False), Run(max_grad_norm=0.1)]
    for _ in range(9):
        for number, run in enumerate(runs):
            run.backward()
            if number < 2:
                torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.1, foreach=foreach)
            run.step()
    weights = [run.weights() for run in runs]
    near(weights[0], weights[1])
    near(weights[0], weights[2])
    for run in runs:
        run.optimizer.close()


def test_a_step_without_a_new_gradient_is_refused_and_changes_nothing() -> None:
    run = Run()
    for _ in range(2):
        run.backward()
        run.step()
    run.backward()
    run.optimizer.step()
    before = [parameter.detach().clone() for parameter in run.model.parameters()]
    with pytest.raises(UnsupportedError, match=r"call zero_grad\(\) between that step\(\) and the next backward"):
        run.optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))
    run.optimizer.zero_grad()
    run.backward()
    run.step()
    run.optimizer.close()


def test_a_step_that_is_refused_loses_no_gradient() -> None:
    def do(run: Run) -> None:
        for step in range(8):
            run.backward()
            if step == 5:
                last = run.model.head.bias  # behind those whose gradients have left
                kept, last.grad = last.grad, torch.zeros_like(last).to_sparse()
                with pytest.raises(UnsupportedError, match="sparse"):
                    run.optimizer.step()
                last.grad = kept
            run.step()

    in_both_ways(do)


def test_copies_run_beside_backward_and_into_the_next_forward() -> None:
    stalls = []
    for stream in (True, False):
        model = seeded(Stack)
        gradient_bytes = 4 * sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 2)
        # The copies take as long as backward, which is spread over the layers.
        rates = {"link_d2h_gbps": gradient_bytes / 40e-3 / 1e9, "link_h2d_gbps": 1e6, "host_gbps": 1e6}
        device = EmulatedAccelerator(
            Rig("stream", "", forward_ms=20.0, backward_ms=40.0, device_gbps=None, scale=1.0, **rates)
        )
        device.attach(model)
        config = ZenFlowConfig.zero_offload(stream=stream, bucket_bytes=300)
        optimizer = ZenFlowAdamW(model.parameters(), config=config, device=device)
        for step in range(5):
            model(tokens_of(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found = [dict(one.stall_ms or {}) for one in optimizer.history(wait=True)][1:]
        stalls.append(sum(one["d2h"] for one in found) / len(found))
        optimizer.abandon()
        device.close()
    # Of two layers the first one's copies are hidden, and those of the head before it.
    assert stalls[1] == pytest.approx(40.0, rel=0.05)
    assert 5.0 < stalls[0] < 25.0


@pytest.mark.parametrize("unscale", [False, True])
def test_an_auto_interval_sees_the_unscaled_gradient(unscale: bool) -> None:
    sums = []
    for stream in (True, False):
        run = Run(stream=stream, update_interval="auto", auto_ratio=1.0, topk_ratio=0.3)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for _ in range(2):
            run.batch += 1
            scaler.scale(run.model(tokens_of(run.batch))).backward()
            if unscale:
                scaler.unscale_(run.optimizer)
            scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()
        training = run.optimizer._training
        sums.append([training.auto.sums_of(weight) for weight in training.model.weights])
        run.optimizer.close()
    assert sums[0][0][0] == 2.0
    torch.testing.assert_close(torch.tensor(sums[0]), torch.tensor(sums[1]), rtol=1e-5, atol=0.0)


def test_gradients_in_place_and_left_out() -> None:
    def do(run: Run) -> None:
        for step in range(9):
            run.backward()
            if step == 4:
                run.model.layers[0].inner.weight.grad = None
            if step == 5:
                run.model.head.weight.grad.zero_()
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=step % 2 == 0)
            if step == 6:
                run.optimizer.step()  # with the zeros that are there, or nothing

    in_both_ways(do)


@pytest.mark.parametrize("knobs", KNOBS[:2], ids=str)
def test_the_ledger_balances(knobs: dict[str, Any]) -> None:
    run = Run(ledger=True, **knobs)
    for _ in range(7):
        run.backward()
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
        run.step()
        accounts = run.optimizer.ledger()
        assert all(account.balanced for account in accounts.values())
        assert any(account.produced for account in accounts.values())
    run.optimizer.close()
