"""The stand-in for a gradient that has left: torch's own functions, on it and on the gradient itself."""

from __future__ import annotations

import copy
import math
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.tiers import repeated
from zenflow import UnsupportedError
from zenflow.kernels.base import EagerKernels
from zenflow.standin import GradientPlaceholder, GradientRecord

SHAPES = [(3, 4), (1, 1), (17, 2), (2, 3, 5), (1, 9)]
FOREACH = [None, True, False]
FP32_ROUNDING = 1e-5


def stand_in(parameter: Tensor, gradient: Tensor, name: str = "w") -> GradientPlaceholder:
    return GradientPlaceholder(
        parameter, GradientRecord(name, EagerKernels().energies(gradient.reshape(-1, gradient.shape[-1])))
    )


def effective(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """What `.grad` stands for, where `gradient` is what backward produced."""
    current = parameter.grad
    assert current is not None
    if not isinstance(current, GradientPlaceholder):
        return current
    if current.record.zeroed:
        return torch.zeros_like(gradient)
    return gradient if current.record.factor is None else gradient * current.record.factor


class Twins:
    """The same parameters twice: with their gradients, and with stand-ins for most of them."""

    def __init__(
        self,
        seed: int,
        *,
        dtypes: tuple[torch.dtype, ...] = (torch.float32,),
        scale: float = 1.0,
        plain_share: float = 0.3,
    ) -> None:
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        shapes = [rng.choice(SHAPES) for _ in range(rng.randint(1, 6))]
        self.raw = [
            (torch.randn(shape, generator=generator) * scale * 10 ** rng.uniform(-3, 3)).to(rng.choice(dtypes))
            for shape in shapes
        ]
        self.plain = [nn.Parameter(torch.zeros_like(gradient)) for gradient in self.raw]
        self.ours = [nn.Parameter(torch.zeros_like(gradient)) for gradient in self.raw]
        for number, gradient in enumerate(self.raw):
            self.plain[number].grad = gradient.clone()
            stays = rng.random() < plain_share
            self.ours[number].grad = gradient.clone() if stays else stand_in(self.ours[number], gradient)

    def assert_same(self) -> None:
        for plain, ours, raw in zip(self.plain, self.ours, self.raw, strict=True):
            assert plain.grad is not None
            tolerance = FP32_ROUNDING if raw.dtype == torch.float32 else 2.0**-6
            torch.testing.assert_close(
                effective(ours, raw).float(), plain.grad.float(), rtol=tolerance, atol=0.0, equal_nan=True
            )


@pytest.mark.parametrize("foreach", FOREACH)
@pytest.mark.parametrize("seed", range(repeated(20)))
def test_clip_grad_norm(seed: int, foreach: bool | None) -> None:
    twins = Twins(seed)
    max_norm = 10 ** random.Random(seed).uniform(-2, 3)
    norms = [
        torch.nn.utils.clip_grad_norm_(weights, max_norm, foreach=foreach) for weights in (twins.plain, twins.ours)
    ]
    torch.testing.assert_close(norms[1], norms[0], rtol=FP32_ROUNDING, atol=0.0)
    twins.assert_same()


def test_get_total_norm_and_clip_grads_with_norm() -> None:
    twins = Twins(3)
    for weights in (twins.plain, twins.ours):
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        total = torch.nn.utils.get_total_norm(gradients)
        torch.nn.utils.clip_grads_with_norm_(weights, 0.3, total)
    twins.assert_same()


def test_a_norm_that_is_not_finite_can_be_asked_about() -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    weight.grad = stand_in(weight, torch.tensor([[1.0, float("inf")], [0.0, 0.0]]))
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)


def scaled_in_some_way(rng: random.Random, weights: list[nn.Parameter]) -> None:
    """One of the things that scale gradients in place; the same for the same state of `rng`."""
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    chosen, factor = rng.choice(gradients), rng.uniform(-2, 2)
    others = [rng.uniform(0.1, 2) for _ in gradients]
    ways: list[Callable[[], Any]] = [
        lambda: chosen.mul_(factor),
        lambda: chosen.div_(factor),
        lambda: chosen.mul_(torch.tensor(factor)),
        lambda: chosen.mul_(torch.tensor([factor], dtype=torch.float64)),
        lambda: chosen.data.mul_(factor),
        lambda: chosen.__imul__(factor),
        lambda: chosen.__itruediv__(factor),
        lambda: chosen.zero_() if rng.random() < 0.2 else None,
        lambda: torch._foreach_mul_(gradients, factor),
        lambda: torch._foreach_mul_(gradients, torch.tensor(factor)),
        lambda: torch._foreach_mul_(gradients, others),
        lambda: torch._foreach_mul_(gradients, [torch.tensor(other) for other in others]),
        lambda: torch._foreach_div_(gradients, factor),
        lambda: torch._foreach_div_(gradients, others),
        lambda: torch.nn.utils.clip_grad_norm_(weights, abs(factor), foreach=rng.choice(FOREACH)),
        lambda: torch.nn.utils.clip_grad_norm_(weights[:1], abs(factor)),
    ]
    rng.choice(ways)()


@pytest.mark.parametrize("seed", range(repeated(60)))
def test_any_sequence_of_scalings_multiplies_up(seed: int) -> None:
    twins = Twins(seed)
    for step in range(6):
        for weights in (twins.plain, twins.ours):
            scaled_in_some_way(random.Random(f"{seed} {step}"), weights)
        twins.assert_same()


def test_a_multiplier_that_changes_later_does_not_change_the_factor() -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    for use in (lambda g, x: g.mul_(x), lambda g, x: torch._foreach_mul_([g], x)):
        weight.grad, by = stand_in(weight, torch.ones(2, 2)), torch.tensor(0.5)
        use(weight.grad, by)
        by.fill_(7.0)
        assert float(effective(weight, torch.ones(2, 2)).sum()) == 2.0


class Scaled:
    """One training step under a real GradScaler, which sees `weights` through an optimizer that records what it got."""

    class Recorder(torch.optim.Optimizer):
        _step_supports_amp_scaling = True

        def __init__(self, weights: list[nn.Parameter]) -> None:
            super().__init__(weights, {})
            self.seen: tuple[float | None, float] = (None, 0.0)

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            scale = getattr(self, "grad_scale", None)
            self.seen = (None if scale is None else float(scale), float(self.found_inf))  # type: ignore[attr-defined]

    def __init__(self, weights: list[nn.Parameter], *, unscale: bool, clip: bool) -> None:
        optimizer = self.Recorder(weights)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(torch.ones(()))  # makes its tensors
        if unscale:
            scaler.unscale_(optimizer)
        self.norm = torch.nn.utils.clip_grad_norm_(weights, 0.1) if clip else None
        scaler.step(optimizer)
        self.seen = optimizer.seen
        scaler.update()
        self.scale = scaler.get_scale()


@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
@pytest.mark.parametrize(("unscale", "clip"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("seed", range(repeated(4)))
def test_grad_scaler(seed: int, unscale: bool, clip: bool, bad: float | None) -> None:
    twins = Twins(seed, dtypes=(torch.float32, torch.bfloat16), scale=1024.0)
    if bad is not None:
        for number, raw in enumerate(twins.raw):
            raw.view(-1)[-1] = bad
            twins.plain[number].grad = raw.clone()
            twins.ours[number].grad = stand_in(twins.ours[number], raw)
    plain, ours = (Scaled(weights, unscale=unscale, clip=clip) for weights in (twins.plain, twins.ours))
    assert ours.seen == plain.seen
    assert ours.seen[1] == (0.0 if bad is None else 1.0)
    assert ours.scale == plain.scale == (1024.0 if bad is None else 512.0)
    if clip and bad is None:
        assert plain.norm is not None
        torch.testing.assert_close(ours.norm, plain.norm.float(), rtol=1e-2, atol=0.0)
    if bad is None:
        twins.assert_same()


def test_what_grad_scaler_did_is_known_apart_from_clipping() -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    weight.grad = stand_in(weight, torch.full((2, 2), 64.0))
    Scaled([weight], unscale=True, clip=True)
    record = weight.grad.record
    assert record.unscale is not None
    assert record.factor is not None
    assert float(record.unscale) == 1 / 1024
    assert float(record.factor) == pytest.approx(0.1 / 128, rel=1e-4)


@pytest.mark.parametrize("foreach", [False, True])
def test_zero_grad_in_place(foreach: bool) -> None:
    twins = Twins(1)
    for weights in (twins.plain, twins.ours):
        torch.optim.SGD(weights, lr=0.1, foreach=foreach).zero_grad(set_to_none=False)
    twins.assert_same()
    assert float(torch.nn.utils.get_total_norm([w.grad for w in twins.ours if w.grad is not None])) == 0.0


def test_it_looks_like_the_gradient() -> None:
    weight = nn.Parameter(torch.randn(4, 6, dtype=torch.bfloat16).t())
    gradient = stand_in(weight, torch.randn(6, 4), "layers.0.weight")
    weight.grad = gradient
    assert weight.grad is gradient
    assert (gradient.shape, gradient.stride()) == (weight.shape, weight.stride())
    assert (gradient.dtype, gradient.device, gradient.layout) == (weight.dtype, weight.device, torch.strided)
    assert not gradient.requires_grad
    assert gradient.is_leaf
    assert gradient.grad_fn is None
    assert not gradient.is_sparse
    assert not gradient.is_pinned()
    assert (gradient.numel(), gradient.nbytes, gradient.dim(), len(gradient)) == (24, 48, 2, 6)
    assert repr(gradient) == "StandIn(gradient of layers.0.weight, shape=(6, 4), torch.bfloat16, cpu)"
    alias = gradient.detach()
    assert isinstance(alias, GradientPlaceholder)
    assert alias.record is gradient.record


def test_what_is_done_to_the_module_around_it_still_works() -> None:
    module = nn.Linear(3, 2)
    module.weight.grad = stand_in(module.weight, torch.ones(2, 3))
    module.to("cpu").float().train().requires_grad_(True)
    assert isinstance(module.weight.grad, GradientPlaceholder)
    assert copy.deepcopy(module).weight.grad is None
    assert "weight" in module.state_dict()
    pickle.loads(pickle.dumps(module))


USES: dict[str, Callable[[Tensor], object]] = {
    "abs": lambda g: g.abs(),
    "add": lambda g: torch.ones(2, 2) + g,
    "add_": lambda g: g.add_(torch.ones(2, 2)),
    "clamp_": lambda g: torch.nn.utils.clip_grad_value_([_holder(g)], 1.0, foreach=False),
    "_foreach_clamp_min_": lambda g: torch.nn.utils.clip_grad_value_([_holder(g)], 1.0, foreach=True),
    "clone": lambda g: g.clone(),
    "copy_": lambda g: torch.ones(2, 2).copy_(g),
    "what it was converted to": lambda g: g.to(torch.float64).sum(),
    "select": lambda g: g[0],
    "isnan": lambda g: torch.isnan(g).any(),
    "eq": lambda g: g == 1,
    "mul_": lambda g: g.mul_(torch.ones(2, 2)),
    "linalg_vector_norm": lambda g: torch.nn.utils.clip_grad_norm_([_holder(g)], 1.0, norm_type=1, foreach=False),
    "_foreach_norm": lambda g: torch.nn.utils.clip_grad_norm_([_holder(g)], 1.0, norm_type=math.inf, foreach=True),
    "mul": lambda g: g * 2,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "numpy": lambda g: g.numpy(),
    "tolist": lambda g: g.tolist(),
    "data_ptr": lambda g: g.data_ptr(),
    "what is shared": lambda g: g.share_memory_().sum(),
    "apply_": lambda g: g.apply_(lambda x: x),
    "__dlpack__": lambda g: g.__dlpack__(),
}


def _holder(gradient: Tensor) -> nn.Parameter:
    weight = nn.Parameter(torch.zeros(2, 2))
    weight.grad = gradient
    return weight


@pytest.mark.parametrize("use", USES)
def test_any_other_use_is_refused_with_a_way_out_where_the_gradient_cannot_come_back(use: str) -> None:
    gradient = stand_in(nn.Parameter(torch.zeros(2, 2)), torch.ones(2, 2), "layers.0.weight")
    with pytest.raises(UnsupportedError) as caught:
        USES[use](gradient)
    assert str(caught.value) == (
        "the gradient of layers.0.weight was taken by an earlier step and is needed again: read it before step(), call "
        "zero_grad() between that step() and the next backward(), or keep gradients whole with "
        "ZenFlowConfig(stream=False)"
    )


@pytest.mark.parametrize("norm", [torch.norm, torch.linalg.norm, torch.linalg.matrix_norm, Tensor.norm])
def test_other_ways_to_ask_for_the_norm(norm: Callable[[Tensor], Tensor]) -> None:
    raw = torch.randn(5, 3)
    gradient = stand_in(nn.Parameter(torch.zeros(5, 3)), raw)
    torch.testing.assert_close(norm(gradient), norm(raw))
    torch.testing.assert_close(norm(gradient.float().data), norm(raw))


def test_one_that_was_taken_can_be_converted() -> None:
    raw = torch.randn(5, 3).t()
    gradient = stand_in(nn.Parameter(torch.zeros(3, 5)), raw)
    converted = gradient.double()
    assert (converted.dtype, converted.shape, converted.stride()) == (torch.float64, raw.shape, gradient.stride())
    torch.testing.assert_close(converted.norm(), raw.norm())


def test_one_that_was_replaced_is_refused() -> None:
    gradient = stand_in(nn.Parameter(torch.zeros(2, 2)), torch.ones(2, 2))
    gradient.record.give_up()
    for use in (lambda: gradient.mul_(2), lambda: gradient.norm(), lambda: gradient.zero_()):
        with pytest.raises(UnsupportedError, match=r"read parameter\.grad again"):
            use()
