"""Gradients that leave during backward: bit for bit those of the same model without hooks, however often they fire."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.tiers import combinations, fast, repeated
from tests.support.zenflow.small import Stack, seeded, tokens_of
from tests.support.zenflow.stream_cases import DEVICES, MODELS, Pair, Shared, Streams
from zenflow import UnsupportedError
from zenflow.standin import GradientPlaceholder


@pytest.mark.parametrize(
    ("model", "device", "dtype"), combinations(model=MODELS, device=DEVICES, dtype=[torch.float32, torch.bfloat16])
)
def test_gradients_are_those_of_the_model_without_hooks(
    pair: Callable[..., Pair], model: str, device: str, dtype: torch.dtype
) -> None:
    both = pair(model, dtype, device=device)
    for step in range(4):
        both.backward(step)
        both.step()
    staged, restored = both.streams.counts
    assert staged >= 3 * both.streams.deferring
    assert restored == 0 or model == "shared, reentrant"


def test_a_gradient_leaves_while_backward_goes_on(pair: Callable[..., Pair]) -> None:
    both = pair()
    seen: list[list[type]] = []
    first = both.ours.embedding.weight
    layers = [parameter for parameter in both.ours.layers.parameters() if parameter.dim() == 2]
    first.register_hook(lambda _: seen.append([type(parameter.grad) for parameter in layers]))
    both.backward(1)
    assert seen == [[GradientPlaceholder] * len(layers)]
    both.step()


def clip_some(model: nn.Module) -> None:
    # A power of two is exact, so that the factor and the rounded product agree bit for bit.
    for number, parameter in enumerate(model.parameters()):
        if parameter.grad is not None and number % 3 == 0:
            parameter.grad.mul_(0.5)


def replace_some(model: nn.Module) -> None:
    for number, parameter in enumerate(model.parameters()):
        if number % 4 == 0:
            parameter.grad = torch.full_like(parameter, 0.25)


def drop_some(model: nn.Module) -> None:
    for number, parameter in enumerate(model.parameters()):
        if number % 4 == 1:
            parameter.grad = None


def backward_of_a_part(model: nn.Module) -> None:
    assert isinstance(model, (Stack, Shared))
    model.embedding(tokens_of(3)).square().sum().backward()


def anything(rng: random.Random) -> Callable[[nn.Module], object]:
    batch = rng.randrange(5)
    return rng.choice(
        [
            lambda model: model(tokens_of(batch)).backward(),
            lambda model: model(tokens_of(batch)).backward(),
            lambda model: model(tokens_of(batch)).backward(),
            backward_of_a_part,
            lambda model: model.zero_grad(),
            lambda model: model.zero_grad(set_to_none=False),
            clip_some,
            replace_some,
            drop_some,
        ]
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(repeated(24)))
def test_whatever_is_done_between_two_steps(pair: Callable[..., Pair], seed: int, device: str) -> None:
    rng = random.Random(seed)
    both = pair(rng.choice(list(MODELS)), device=device, seed=seed, least=rng.choice([1, 1, 2]))
    for _ in range(6):
        for _ in range(rng.randint(1, 5)):
            both.each(anything(rng))
            if rng.random() < 0.1:
                both.streams.streamer.restore()
        both.step()


USES: dict[str, Callable[[Tensor], Any]] = {
    "abs": lambda g: g.abs(),
    "add_": lambda g: g.add_(torch.ones_like(g)),
    "clone": lambda g: g.detach().clone(),
    "copy_ from": lambda g: torch.empty(g.shape).copy_(g),
    "copy_ into": lambda g: g.copy_(torch.full(g.shape, 0.3)),
    "data": lambda g: g.data.sub_(1.0),
    "deepcopy": copy.deepcopy,
    "float": lambda g: g.float().mean(),
    "greatest norm": lambda g: torch.nn.utils.get_total_norm([g], norm_type=float("inf")),
    "lerp_": lambda g: torch.zeros_like(g).lerp_(g, 0.3),
    "mul_ by a tensor": lambda g: g.mul_(torch.linspace(0, 1, g.numel()).view(g.shape)),
    "numpy": lambda g: torch.from_numpy(g.numpy().copy()),
    "out": lambda g: torch.add(torch.ones(g.shape), 1.0, out=g),
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "select": lambda g: g[0],
    "stack": lambda g: torch.stack([torch.ones_like(g), g]),
    "tolist": lambda g: torch.tensor(g.tolist()),
    "view": lambda g: g.view(-1).neg_(),
}


@pytest.mark.parametrize(
    ("use", "device"),
    fast(
        [(use, DEVICES[number % len(DEVICES)]) for number, use in enumerate(USES)],
        all_of=combinations(use=USES, device=DEVICES),
    ),
)
def test_a_use_that_needs_the_elements_brings_the_gradient_back(
    pair: Callable[..., Pair], use: str, device: str
) -> None:
    both = pair(device=device)
    for step in range(2):
        both.backward(step)
        clip_some(both.ours)
        clip_some(both.plain)
        used = 0
        for ours, plain in zip(both.ours.parameters(), both.plain.parameters(), strict=True):
            held = ours.grad
            if isinstance(held, GradientPlaceholder):
                assert torch.equal(USES[use](held), USES[use](plain.grad))
                assert type(ours.grad) is Tensor
                assert torch.equal(held * 1.0, plain.grad)  # what stood in for it has become it
                held.mul_(0.5)
                plain.grad.mul_(0.5)
                used += 1
        assert used >= 3
        assert both.streams.log_bytes() == 0
        both.step()


def test_a_gradient_that_a_step_took_does_not_come_back(pair: Callable[..., Pair]) -> None:
    both = pair()
    both.backward(1)
    held = [parameter.grad for parameter in both.ours.parameters() if isinstance(parameter.grad, GradientPlaceholder)]
    both.streams.take_step()
    for gradient in held:
        with pytest.raises(UnsupportedError, match="was taken by an earlier step and is needed again"):
            gradient.clone()


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_that_no_step_took_give_their_room_back(pair: Callable[..., Pair], device: str) -> None:
    both = pair(device=device, window=1)  # room for little more than one step
    for batch in range(10):
        both.backward(batch)
        both.each(lambda model: model.zero_grad())
    both.backward(11)
    both.step()


def test_the_room_bounds_what_waits_for_the_link(pair: Callable[..., Pair]) -> None:
    limit = 200
    both = pair(device="emulated", gbps=1e-6, room_bytes=limit)
    both.backward(1)
    assert 0 < both.streams.room.peak_bytes <= limit
    waits = both.streams.history.open.waits
    assert waits
    assert {wait.cause for wait in waits} == {"d2h"}
    both.step()


def test_an_interrupted_staging_leaves_the_gradient_and_the_log(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = pair()
    sends, real = iter([False, True]), both.streams.device.d2h

    def d2h(source: Tensor, target: Tensor) -> Any:
        if next(sends, False):
            raise KeyboardInterrupt
        return real(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(both.streams.device, "in_host_memory", False)
        patched.setattr(both.streams.device, "d2h", d2h)
        with pytest.raises(KeyboardInterrupt):
            both.ours(tokens_of(1)).backward()
    assert both.streams.log_bytes() == 0
    both.ours.zero_grad()
    both.backward(2)
    both.step()


def test_hooks_keep_nothing_alive_and_are_not_copied() -> None:
    model = seeded(Stack)
    streams = Streams(model)
    streamer = weakref.ref(streams.streamer)
    model(tokens_of(1)).backward()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin.zero_grad()
        twin(tokens_of(1)).backward()
        assert not any(isinstance(parameter.grad, GradientPlaceholder) for parameter in twin.parameters())
    streams.runtime.engine.close()
    del streams
    gc.collect()
    assert streamer() is None
    model.zero_grad()
    model(tokens_of(1)).backward()
    assert not any(isinstance(parameter.grad, GradientPlaceholder) for parameter in model.parameters())


def test_weights_that_are_frozen_for_a_while(pair: Callable[..., Pair]) -> None:
    both = pair()
    for frozen in (False, True, False):
        for model in (both.ours, both.plain):
            model.layers[0].requires_grad_(not frozen)
        both.backward(1)
        assert (both.ours.layers[0].inner.weight.grad is None) == frozen
        both.step()
    staged, restored = both.streams.counts
    assert (staged, restored) == (3 * both.streams.deferring - 2, 0)


def test_a_gradient_is_taken_once(pair: Callable[..., Pair]) -> None:
    both = pair()
    both.backward(1)
    streams = both.streams
    streams.take_step()
    sentence = r"taken by an earlier step .* call zero_grad\(\) between that step\(\) and the next backward\(\)"
    with pytest.raises(UnsupportedError, match=sentence):
        streams.streamer.staged()
    both.ours(tokens_of(1)).backward()
    with pytest.raises(UnsupportedError, match=sentence):
        streams.streamer.staged()
    both.each(lambda model: model.zero_grad())
    both.backward(2)
    both.step()
