"""The Trainer with this package's optimizer: one line, and torch's own AdamW or the uninterrupted run beside it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="the huggingface extra is not installed")

from transformers import Trainer, TrainerCallback

from tests.support.tiers import fast
from tests.support.zftune.integrations.trainers import (
    EXACT,
    LATE,
    Maker,
    Masters,
    Tokens,
    arguments,
    furthest,
    same,
    tiny_model,
    trained,
    trainer,
    weights,
)
from zenflow import CheckpointError, ZenFlowAdamW, ZenFlowConfig
from zftune.errors import BadInputError
from zftune.integrations.huggingface import AccelerateAdamW, zenflow_optimizer

LR = 1e-2


def plain(config: ZenFlowConfig) -> Maker:
    """The one line without any helper."""
    return lambda model, args: ZenFlowAdamW(model.parameters(), lr=LR, weight_decay=0.1, config=config, module=model)


def by_torch(model: nn.Module, args: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)


def by_masters(model: nn.Module, args: Any) -> torch.optim.Optimizer:
    return Masters(model.parameters(), lr=LR, weight_decay=0.1)


def rates(of: Any) -> list[float]:
    return [entry["learning_rate"] for entry in of.state.log_history if "learning_rate" in entry]


def losses(of: Any) -> list[float]:
    return [entry["loss"] for entry in of.state.log_history if "loss" in entry]


@pytest.mark.parametrize("passes", fast([3], all_of=[1, 3]))
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16-autocast"])
def test_exact_is_torchs_adamw(tmp_path: Path, passes: int, autocast: bool) -> None:
    """Clipped, under the Trainer's own scheduler, accumulated or not; 64 sequences end in a step of fewer passes."""
    more = {"gradient_accumulation_steps": passes, "bf16": autocast, "max_steps": 12}
    ours = trained(tmp_path / "ours", plain(EXACT), **more)
    torchs = trained(tmp_path / "torchs", by_torch, **more)
    start = weights(tiny_model())
    assert furthest(weights(torchs.model), start) > 3 * LR
    assert furthest(weights(ours.model), weights(torchs.model)) < (5e-2 * LR if autocast else 1e-4 * LR)
    assert losses(ours) == pytest.approx(losses(torchs), rel=1e-4 if autocast else 1e-6)
    assert rates(ours) == rates(torchs)
    norms = [[entry["grad_norm"] for entry in of.state.log_history if "grad_norm" in entry] for of in (ours, torchs)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-2 if autocast else 1e-5)
    assert min(norms[0]) > 0.5  # every step was clipped


def test_a_model_in_bf16_has_fp32_masters(tmp_path: Path) -> None:
    more: dict[str, Any] = {
        "dtype": torch.bfloat16,
        "max_grad_norm": 0.0,
    }  # a clipped bf16 gradient is rounded again, ours is not
    ours = trained(tmp_path / "ours", plain(EXACT), **more)
    oracle = trained(tmp_path / "oracle", by_masters, **more)
    rounded = trained(tmp_path / "rounded", by_torch, **more)
    apart = furthest(weights(ours.model), weights(oracle.model))
    assert apart < 1e-3 * 2**-7 + 1e-2 * LR
    assert furthest(weights(rounded.model), weights(oracle.model)) > 4 * apart
    assert losses(ours) == pytest.approx(losses(oracle), rel=1e-4)


@pytest.mark.parametrize("helper", fast([True], all_of=[False, True]), ids="zenflow_optimizer={}".format)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, dtype: torch.dtype, helper: bool) -> None:
    """Saved in the middle of a window; bit for bit, optimizer and learning rates included."""
    told = dataclasses.replace(LATE, gradient_accumulation_steps=2)
    make = (lambda model, args: zenflow_optimizer(model, args, LATE)) if helper else plain(told)
    more: dict[str, Any] = {"dtype": dtype, "save_strategy": "steps", "save_steps": 6, "gradient_accumulation_steps": 2}
    whole = trained(tmp_path, make, **more)
    (tmp_path / "checkpoint-10").rename(tmp_path / "last")  # what is resumed is the newest
    resumed = trainer(tmp_path, make, **more)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 10
    assert same(weights(resumed.model), weights(whole.model))
    assert losses(resumed) == losses(whole)
    assert rates(resumed) == rates(whole)
    seen = weights(whole.model)
    for of in (resumed, whole):
        of.optimizer.optimizer.flush()
    assert same(weights(resumed.model), weights(whole.model))
    assert not same(weights(whole.model), seen)  # something was pending in both


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_run_of_the_trainers_own_optimizer_is_gone_on_with(
    tmp_path: Path, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    more: dict[str, Any] = {"dtype": dtype, "save_strategy": "steps", "save_steps": 6, "max_grad_norm": 0.0}
    whole = trained(tmp_path, None, **more)
    (tmp_path / "checkpoint-10").rename(tmp_path / "last")
    resumed = trainer(tmp_path, lambda model, args: zenflow_optimizer(model, args, EXACT), **more)
    with caplog.at_level("INFO", "zftune"):
        resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 10
    assert resumed.optimizer.optimizer.steps == 10
    assert rates(resumed) == rates(whole)
    assert losses(resumed) == pytest.approx(losses(whole), rel=1e-6 if dtype == torch.float32 else 1e-2)
    if dtype == torch.float32:  # torch's AdamW rounds bf16 weights at every step
        assert furthest(weights(resumed.model), weights(whole.model)) < 1e-4 * LR
    assert caplog.messages == ["The checkpoint is of torch's AdamW: its moments and its step count go on."]


def test_the_trainers_own_optimizer_goes_on_with_a_run_of_ours(tmp_path: Path) -> None:
    """As the page on Hugging Face has it."""
    whole = trained(tmp_path / "whole", None)
    half = trainer(tmp_path, lambda model, args: zenflow_optimizer(model, args, EXACT), save_strategy="steps")

    class Stops(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
        def on_step_end(self, args: Any, state: Any, control: Any, **of: Any) -> None:
            control.should_save = control.should_training_stop = state.global_step == 6

    half.add_callback(Stops())
    half.train()
    folder, optimizer = tmp_path / "checkpoint-6", half.optimizer.optimizer
    optimizer.flush()
    half.save_model(str(folder))
    with optimizer.torch_state():
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    resumed = trainer(tmp_path, None)
    resumed.train(resume_from_checkpoint=str(folder))
    assert resumed.state.global_step == 10
    assert losses(resumed) == pytest.approx(losses(whole), rel=1e-6)
    assert furthest(weights(resumed.model), weights(whole.model)) < 1e-4 * LR


def test_a_checkpoint_of_another_kind_is_refused(tmp_path: Path) -> None:
    model = tiny_model()
    optimizer = zenflow_optimizer(model, arguments(tmp_path), EXACT)
    with pytest.raises(CheckpointError, match="has groups of"):
        optimizer.load_state_dict(torch.optim.AdamW(model.parameters()).state_dict())
    with pytest.raises(CheckpointError, match='has no "state" and "param_groups"'):
        optimizer.load_state_dict({"param_groups": []})


def test_the_optimizer_is_made_as_the_trainer_makes_its_own(tmp_path: Path) -> None:
    args = arguments(tmp_path, adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-6, gradient_accumulation_steps=2)
    model = tiny_model()
    ours = zenflow_optimizer(model, args, EXACT)
    torchs = Trainer(model=model, args=args).create_optimizer()
    assert ours.config == dataclasses.replace(EXACT, gradient_accumulation_steps=2).resolved()
    assert ours.module is model
    assert len(ours.param_groups) == len(torchs.param_groups) == 2
    for own, other in zip(ours.param_groups, torchs.param_groups, strict=True):
        assert [id(parameter) for parameter in own["params"]] == [id(parameter) for parameter in other["params"]]
        for name in ("lr", "betas", "eps", "weight_decay"):
            assert own[name] == other[name], name
    assert {group["weight_decay"] for group in ours.param_groups} == {0.0, 0.1}


def test_it_trains_as_the_trainers_own(tmp_path: Path) -> None:
    ours = trained(tmp_path / "ours", lambda model, args: zenflow_optimizer(model, args, EXACT))
    torchs = trained(tmp_path / "torchs", None)
    assert type(torchs.optimizer.optimizer) is torch.optim.AdamW
    assert furthest(weights(ours.model), weights(torchs.model)) < 1e-4 * LR


def test_frozen_parameters_are_left_out(tmp_path: Path) -> None:
    model = tiny_model()
    model.get_input_embeddings().requires_grad_(False)  # type: ignore[operator]
    optimizer = zenflow_optimizer(model, arguments(tmp_path), EXACT)
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert known == {id(parameter) for parameter in model.parameters() if parameter.requires_grad}


def test_before_the_first_step_there_is_no_state_to_move(tmp_path: Path) -> None:
    """Accelerate moves it to the device, where what belongs to the host does not fit."""
    model = tiny_model()
    optimizer = zenflow_optimizer(model, arguments(tmp_path), LATE)
    saved = optimizer.state_dict()
    assert [list(state) for state in saved["state"].values()] == [["shape"]] * len(list(model.parameters()))
    optimizer.load_state_dict(saved)
    model(**{name: value[None] for name, value in Tokens()[0].items()}).loss.backward()
    optimizer.step()
    after = optimizer.state_dict()["state"]
    assert {"master", "exp_avg", "exp_avg_sq"} <= after[0].keys()
    other = zenflow_optimizer(tiny_model(), arguments(tmp_path), LATE)
    other.load_state_dict(optimizer.state_dict())
    assert other.steps == 1


def test_what_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    args = arguments(tmp_path, optim="adafactor")
    with pytest.raises(BadInputError, match="optim is 'adafactor'; it must be adamw_torch or adamw_torch_fused"):
        zenflow_optimizer(tiny_model(), args)
    args = arguments(tmp_path)
    with pytest.raises(BadInputError, match=r"config is a dict; it must be a zenflow\.ZenFlowConfig"):
        zenflow_optimizer(tiny_model(), args, {"topk_ratio": 0.1})  # type: ignore[arg-type]
    args._n_gpu = 2  # as TrainingArguments finds them
    with pytest.raises(BadInputError, match=r"args\.n_gpu is 2; it must be 1"):
        zenflow_optimizer(tiny_model(), args)
    assert isinstance(zenflow_optimizer(tiny_model(), arguments(tmp_path)), AccelerateAdamW)
