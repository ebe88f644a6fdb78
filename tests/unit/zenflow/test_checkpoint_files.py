"""Checkpoints of a real model in the formats that people use, and state_dicts that must be refused."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from tests.support.tiers import fast
from tests.support.zenflow.cases import same_bits
from tests.support.zenflow.family_cases import OTHERS, OURS
from tests.support.zenflow.small import Stack, assert_same_run, seeded, tokens_of
from zenflow import CheckpointError, ZenFlowAdamW, ZenFlowConfig

KNOBS: dict[str, Any] = {"topk_ratio": 0.3, "update_interval": 4, "select_interval": 3, "bucket_bytes": 40}
Through = Callable[[nn.Module, Any, Path], tuple[nn.Module, Any]]  # (model, optimizer, folder) -> others in their place


def new_optimizer(model: nn.Module) -> ZenFlowAdamW:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return ZenFlowAdamW(groups, lr=0.02, config=ZenFlowConfig(**KNOBS, offload_ratio=0.9), module=model)


def train(stop: int | None, through: Through, folder: Path) -> list[Tensor]:
    """Losses and weights of a real model that goes through a checkpoint after that step, with a scheduler."""
    model, seen = seeded(Stack, dtype=torch.bfloat16), []
    optimizer = new_optimizer(model)
    for step in range(1, 13):
        loss = model(tokens_of(step))
        seen.append(loss.detach().clone())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] = 0.02 / (1 + step)
        if step == stop:
            model, optimizer = through(model, optimizer, folder)
    optimizer.flush()
    optimizer.close()
    return [*seen, *(parameter.detach().clone() for parameter in model.parameters())]


def by_safetensors(model: nn.Module, optimizer: Any, folder: Path) -> tuple[nn.Module, Any]:
    from safetensors.torch import load_file, save_file

    save_file(model.state_dict(), folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    optimizer.close()
    fresh = Stack().to(torch.bfloat16)
    fresh.load_state_dict(load_file(folder / "model.safetensors"))
    renewed = new_optimizer(fresh)
    renewed.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
    return fresh, renewed


def by_names(model: nn.Module, optimizer: Any, folder: Path) -> tuple[nn.Module, Any]:
    """torch's own functions for distributed checkpoints: state by the parameters' names."""
    saved = get_optimizer_state_dict(model, optimizer)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer.close()
    fresh = Stack().to(torch.bfloat16)
    renewed = new_optimizer(fresh)
    set_optimizer_state_dict(fresh, renewed, saved)
    fresh.load_state_dict(weights)
    return fresh, renewed


@pytest.mark.parametrize("through", [by_safetensors, by_names])
@pytest.mark.parametrize("stop", fast([1, 6], all_of=[1, 4, 6, 8, 11]))
def test_i3_of_a_real_model(stop: int, through: Through, tmp_path: Path) -> None:
    assert_same_run(train(stop, through, tmp_path), train(None, through, tmp_path))


def test_going_back_to_an_earlier_state() -> None:
    """The same optimizer loads what it saved: a run that went wrong is rolled back."""

    def run(goes_wrong: bool) -> list[Tensor]:
        model = seeded(Stack)
        optimizer = new_optimizer(model)
        for step in range(1, 13):
            model(tokens_of(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 6 and goes_wrong:
                state, weights = optimizer.state_dict(), copy.deepcopy(model.state_dict())
                for wrong in range(100, 105):
                    (1e3 * model(tokens_of(wrong))).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                optimizer.load_state_dict(state)
                model.load_state_dict(weights)
        optimizer.flush()
        optimizer.close()
        return [parameter.detach().clone() for parameter in model.parameters()]

    assert_same_run(run(goes_wrong=True), run(goes_wrong=False))


def test_a_file_of_a_few_bytes_less_is_no_checkpoint(tmp_path: Path) -> None:
    optimizer = new_optimizer(seeded(Stack))
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    (tmp_path / "short.pt").write_bytes(buffer.getvalue()[:-200])
    with pytest.raises((RuntimeError, OSError)):
        torch.load(tmp_path / "short.pt", weights_only=True)
    optimizer.close()


# What must be refused. Every run below is in the middle of a window, with gradients logged, one window in flight and a
# selection pending.

Shapes = tuple[tuple[int, ...], ...]
SHAPES: Shapes = ((4, 10), (7,), (3, 12))


def weights_of(shapes: Shapes = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def make(rule: str = "adamw", shapes: Shapes = SHAPES, split: int = 2) -> tuple[list[nn.Parameter], Any]:
    """Weights and their optimizer. split: how many weights are in the first of two groups."""
    weights = weights_of(shapes)
    groups = [{"params": weights[:split]}, {"params": weights[split:]}] if split < len(weights) else weights
    return weights, OURS[rule](groups, lr=0.1, config=ZenFlowConfig(**KNOBS))


def step(weights: list[nn.Parameter], optimizer: Any, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        generator = torch.Generator().manual_seed(number)
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()


def saved(rule: str = "adamw", **of: Any) -> dict[str, Any]:
    weights, optimizer = make(rule, **of)
    step(weights, optimizer, 6)
    state: dict[str, Any] = optimizer.state_dict()
    optimizer.close()
    return state


def torchs(steps: int) -> dict[str, Any]:
    weights = weights_of()
    optimizer = torch.optim.AdamW([{"params": weights[:2]}, {"params": weights[2:]}], lr=0.1)
    step(weights, optimizer, steps)
    return optimizer.state_dict()


def without(state: dict[str, Any], *path: Any) -> dict[str, Any]:
    """A copy without one key."""
    state = copy.deepcopy(state)
    inner: Any = state
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return state


def with_json(state: dict[str, Any], text: str) -> dict[str, Any]:
    state = copy.deepcopy(state)
    state["param_groups"][0]["zenflow"] = text
    return state


def damaged() -> dict[str, Any]:
    """What is wrong -> such a state_dict."""
    good = saved()
    text: str = good["param_groups"][0]["zenflow"]
    found: dict[str, Any] = {
        "none": None,
        "a number": 3,
        "a list": [good],
        "a word": "state",
        "empty": {},
        "torch's AdamW": torchs(3),
        "torch's AdamW before its first step": torchs(0),
        "other shapes": saved(shapes=((4, 9), (7,), (3, 12))),
        "other shapes of the same size": saved(shapes=((10, 4), (7,), (3, 12))),
        "a parameter more": saved(shapes=(*SHAPES, (5, 6))),
        "a parameter less": saved(shapes=SHAPES[:2], split=1),
        "one group": saved(split=3),
        "other groups": saved(split=1),
        "no groups": without(good, "param_groups"),
        "no state": without(good, "state"),
        "a group less": without(good, "param_groups", 1),
        "a parameter's state less": without(good, "state", 2),
        "nothing of ours": without(good, "param_groups", 0, "zenflow"),
        "half of the text": with_json(good, text[: len(text) // 2]),
        "no text": with_json(good, ""),
        "a list as text": with_json(good, "[]"),
        "text that is none": with_json(good, 3),  # type: ignore[arg-type]
    }
    found |= {f"of {rule}": saved(rule) for rule in OTHERS}
    found |= {f"no {key}": without(good, "state", 0, key) for key in good["state"][0]}
    document = json.loads(text)
    needed = document.keys() - {"kept"}  # which states of releases before have not
    found |= {f"text without {key}": with_json(good, json.dumps(without(document, key))) for key in sorted(needed)}
    for key, value in document.items():
        if isinstance(value, str | int) and ("schema" in key or "version" in key or "format" in key):
            other = value + 1 if isinstance(value, int) else value[:-1] + "99"
            found[f"another {key}"] = with_json(good, json.dumps({**document, key: other}))
    for key, value in good["state"][0].items():
        if isinstance(value, Tensor) and value.dim() > 0:
            odd = copy.deepcopy(good)
            odd["state"][0][key] = value[..., :-1]
            found[f"a shorter {key}"] = odd
            odd = copy.deepcopy(good)
            odd["state"][0][key] = None
            found[f"no tensor as {key}"] = odd
    short = copy.deepcopy(good)
    short["state"][0]["log"] = short["state"][0]["log"][:-1]
    found["a shorter log"] = short
    return found


def test_what_is_refused_leaves_the_optimizer_as_it_was() -> None:
    results = []
    states = damaged()
    assert sum("another" in name for name in states) >= 1, "the text names no schema"
    for refuses in (False, True):
        weights, optimizer = make()
        step(weights, optimizer, 6)
        accepted = []
        for name, state in states.items() if refuses else ():
            before = [dict(group) for group in optimizer.param_groups]
            try:
                optimizer.load_state_dict(state)
            except CheckpointError:
                pass
            else:
                accepted.append(name)
            assert [dict(group) for group in optimizer.param_groups] == before, name
        assert accepted == []
        step(weights, optimizer, 7, first=6)
        optimizer.flush()
        optimizer.close()
        results.append(weights)
    for ours, theirs in zip(*results, strict=True):
        assert bool(same_bits(ours.detach(), theirs.detach()).all())


def test_a_refusal_says_what_is_wrong_in_one_sentence() -> None:
    weights, optimizer = make()
    for state, match in ((torchs(3), "ZenFlow|zenflow"), (saved("sgd"), "(?i)sgd"), (None, "None|dict")):
        with pytest.raises(CheckpointError, match=match) as caught:
            optimizer.load_state_dict(state)
        assert "\n" not in str(caught.value)
    step(weights, optimizer, 1)
    optimizer.close()
