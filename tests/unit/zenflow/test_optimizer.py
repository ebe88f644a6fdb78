"""`ZenFlowAdamW` as a `torch.optim.Optimizer`: what it refuses and in which words, and what it does as torch does."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.zenflow.cases import same_bits
from zenflow import ConfigError, UnsupportedError, ZenFlowAdamW, ZenFlowConfig, ZenFlowError

CONFIG = ZenFlowConfig(topk_ratio=0.25, update_interval=3, select_interval=2, bucket_bytes=40)


def weights_of(dtype: torch.dtype = torch.float32, count: int = 2) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(5, 8, generator=generator).to(dtype)) for _ in range(count)]


def set_grads(weights: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for weight in weights:
        grad = torch.randn(weight.shape, generator=generator) * torch.randn(weight.shape[-1], generator=generator).exp()
        weight.grad = grad.to(weight.dtype)


def assert_equal(ours: list[nn.Parameter], theirs: list[nn.Parameter]) -> None:
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert bool(same_bits(a.detach(), b.detach()).all()), index


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("zenflow")}


# Refusals.


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    before = threads()
    with pytest.raises(UnsupportedError, match=f"a parameter is {dtype}; it must be float32, bfloat16 and float16"):
        ZenFlowAdamW([nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2, 2, dtype=dtype))])
    assert threads() == before


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("lr", -1e-3, "lr is -0.001; it must be a number >= 0"),
        ("lr", float("nan"), "lr is nan; it must be a number >= 0"),
        ("betas", (1.0, 0.9), r"betas is \(1.0, 0.9\); it must be two numbers from 0 to below 1"),
        ("betas", (0.9, -0.1), r"betas is \(0.9, -0.1\); it must be two numbers from 0 to below 1"),
        ("betas", (0.9,), r"betas is \(0.9,\); it must be two numbers from 0 to below 1"),
        ("lr", "fast", r"lr is 'fast'; it must be a number >= 0"),
        ("eps", -1.0, "eps is -1.0; it must be a number >= 0"),
        ("weight_decay", -1.0, "weight_decay is -1.0; it must be a number >= 0"),
    ],
)
def test_hyperparameters_that_make_no_sense(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ZenFlowAdamW(weights_of(), **{name: value})
    with pytest.raises(ConfigError, match=message):
        ZenFlowAdamW([{"params": weights_of(), name: value}])


def test_one_rank_of_a_real_process_group_is_allowed() -> None:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        weights = weights_of()
        before = [weight.detach().clone() for weight in weights]
        optimizer = ZenFlowAdamW(weights)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        optimizer.close()
        assert all(bool((old != new).all()) for old, new in zip(before, weights, strict=True))
    finally:
        torch.distributed.destroy_process_group()


def test_a_device_without_an_implementation_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="parameters are on meta; they must be on"):
        ZenFlowAdamW([nn.Parameter(torch.zeros(2, 2, device="meta"))])


def test_a_sparse_gradient_is_refused_and_nothing_is_lost() -> None:
    results = []
    for sparse in (True, False):
        torch.manual_seed(1)
        embedding, other = nn.Embedding(7, 4, sparse=True), nn.Linear(4, 4)
        module = nn.Sequential(embedding, other)
        optimizer = ZenFlowAdamW(module.parameters(), config=CONFIG, module=module)
        for step in range(6):
            optimizer.zero_grad()
            if sparse and step in (0, 4):
                module(torch.tensor([1, 3])).sum().backward()
                with pytest.raises(UnsupportedError, match=r"parameter 0\.weight has a sparse gradient"):
                    optimizer.step()
                optimizer.zero_grad()
            set_grads(list(module.parameters()), step)
            optimizer.step()
        optimizer.close()
        results.append(list(module.parameters()))
    assert_equal(*results)


@pytest.mark.parametrize("bad", [{"lr": -1.0}, {"dtype": torch.float64}], ids=["lr", "dtype"])
def test_a_refused_group_is_not_added(bad: dict[str, Any]) -> None:
    optimizer = ZenFlowAdamW(weights_of(), config=CONFIG)
    group = {"params": weights_of(bad.pop("dtype", torch.float32)), **bad}
    with pytest.raises(ZenFlowError):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    optimizer.close()


# As torch does.


def test_a_closure_is_called_with_gradients_enabled() -> None:
    (weight,) = weights_of(count=1)
    optimizer = ZenFlowAdamW([weight], config=CONFIG)
    before = weight.detach().clone()

    def closure() -> float:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss.item()

    with torch.no_grad():
        assert optimizer.step(closure) == before.square().sum().item()
    optimizer.close()
    assert not torch.equal(weight.detach(), before)


# Statistics.


def test_stats_and_history() -> None:
    weights = weights_of()
    optimizer = ZenFlowAdamW(weights, config=CONFIG)
    assert optimizer.stats() is None
    assert optimizer.history(wait=True) == []
    for step in range(1, 8):
        set_grads(weights, step)
        optimizer.step()
    history = optimizer.history(wait=True)
    assert [s.step for s in history] == list(range(1, 8))
    assert [s.closed for s in history] == [step % 3 == 0 for step in range(1, 8)]
    assert optimizer.stats() == history[-1]
    assert history[0].step_ms is None
    assert all(s.step_ms is not None and s.step_ms > 0 for s in history[1:])
    coverage = [s.coverage or 0.0 for s in history]
    assert coverage[0] > 0.25  # the loudest quarter, just selected
    assert all(0 < share <= 1 for share in coverage)
    # Windows of three steps, visible one to three steps after their close.
    stale = [s for s in history if s.staleness_max_steps is not None]
    assert max(s.staleness_max_steps or 0 for s in stale) == 5
    assert sum(s.host_elements for s in history) > 0
    optimizer.close()


# The end.


@pytest.mark.parametrize("made", [torch.optim.AdamW, ZenFlowAdamW])
def test_hooks_of_saving_and_loading_run_as_torchs(made: Any) -> None:
    model = nn.Linear(3, 2)
    optimizer = made(model.parameters(), lr=0.1)
    called: list[Any] = []
    optimizer.register_state_dict_pre_hook(lambda owner: called.append((owner is optimizer, "saves")))
    optimizer.register_state_dict_post_hook(lambda _, state: called.append("saved"))
    optimizer.register_state_dict_post_hook(lambda _, state: {"mine": state})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: called.append(sorted(state)))
    optimizer.register_load_state_dict_pre_hook(lambda _, state: state.pop("note", None) and None)
    optimizer.register_load_state_dict_pre_hook(lambda _, state: state["mine"])
    optimizer.register_load_state_dict_post_hook(lambda owner: called.append(owner.param_groups[0]["lr"]))
    saved = optimizer.state_dict()
    assert sorted(saved) == ["mine"]
    optimizer.param_groups[0]["lr"] = 0.2
    saved["note"] = "of a hook"
    optimizer.load_state_dict(saved)
    assert sorted(saved) == ["mine", "note"]
    assert called == [(True, "saves"), "saved", ["mine", "note"], 0.1]


def test_dropping_the_optimizer_ends_its_thread() -> None:
    before = threads()
    module = nn.Sequential(nn.Linear(4, 4))
    optimizer = ZenFlowAdamW(module.parameters(), config=CONFIG, module=module)
    for step in range(5):
        set_grads(list(module.parameters()), step)
        optimizer.step()
    workers = threads() - before
    assert len(workers) == 2
    alive = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert alive() is None
    for worker in workers:
        worker.join(10)
        assert not worker.is_alive()
    module(torch.zeros(1, 4))  # hooks of the module that are left do nothing


def test_a_module_that_is_another_model_is_refused() -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    with pytest.raises(ConfigError, match=r"module \(Linear\) has none of the optimizer's parameters"):
        ZenFlowAdamW(model.parameters(), module=other)
    wrong: Any = model.parameters()
    with pytest.raises(ConfigError, match=r"module is <generator.*; it must be the torch\.nn\.Module"):
        ZenFlowAdamW(model.parameters(), module=wrong)
    within = nn.Sequential(model, other)
    ZenFlowAdamW([*model.parameters(), nn.Parameter(torch.ones(2))], module=within).close()


def test_parameters_on_two_devices_are_refused() -> None:
    weights = [*weights_of(), nn.Parameter(torch.zeros(2, 2, device="meta"))]
    with pytest.raises(UnsupportedError, match="parameters are on cpu and meta; at the beginning they were on cpu"):
        ZenFlowAdamW(weights).step()
