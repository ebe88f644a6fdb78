"""The update rules by themselves: what they take and refuse, and their arithmetic bit for bit."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tests.support.zenflow.cases import same_bits
from tests.support.zenflow.rule_cases import NAMES, TORCH, random_group, ulps
from zenflow.errors import ConfigError, UnsupportedError
from zenflow.rules import RULES, LionHyper
from zenflow.rules.base import per_count, rooted
from zenflow.state import ColumnState

ADAM = {"lr": 0.1, "betas": (0.2, 0.3), "eps": 0.4, "weight_decay": 0.5}
GROUPS: dict[str, dict[str, Any]] = {
    "adamw": ADAM,
    "adam": ADAM,
    "adagrad": {"lr": 0.1, "lr_decay": 0.2, "eps": 0.3, "weight_decay": 0.4, "initial_accumulator_value": 0.5},
    "lion": {"lr": 0.1, "betas": (0.2, 0.3), "weight_decay": 0.4},
    "sgd": {"lr": 0.1, "momentum": 0.2, "dampening": 0.3, "weight_decay": 0.4, "nesterov": False},
}

# What a rule takes.


@pytest.mark.parametrize("kind", [lambda x: torch.tensor(x, dtype=torch.float64), np.float64, Fraction])
@pytest.mark.parametrize("name", NAMES)
def test_every_hyperparameter_may_be_another_kind_of_number(name: str, kind: Any) -> None:
    other = {
        key: tuple(kind(beta) for beta in value) if key == "betas" else value if key == "nesterov" else kind(value)
        for key, value in GROUPS[name].items()
    }
    rule = RULES[name]
    rule.check(other)
    assert rule.hyper(other) == rule.hyper(GROUPS[name])
    assert rule.initial(other) == rule.initial(GROUPS[name])
    assert all(type(value) is float for value in (*rule.hyper(other).numbers, *rule.initial(other)))


@pytest.mark.parametrize("name", TORCH)
def test_torchs_own_groups_pass_whatever_their_speed_flags(name: str) -> None:
    group = TORCH[name]([nn.Parameter(torch.zeros(1))]).param_groups[0]
    RULES[name].check(group)
    RULES[name].check({**group, "capturable": True, "foreach": True, "fused": True})


# What a rule refuses.

AT_LEAST_0 = [
    *((name, key) for name in NAMES for key in ("lr", "weight_decay")),
    *((name, "eps") for name in ("adamw", "adam", "adagrad")),
    ("adagrad", "lr_decay"),
    ("adagrad", "initial_accumulator_value"),
    ("sgd", "momentum"),
]


def refused(name: str, change: dict[str, Any], sentence: str) -> None:
    RULES[name].check(GROUPS[name])
    with pytest.raises(ConfigError, match=f"^{re.escape(sentence)}$"):
        RULES[name].check({**GROUPS[name], **change})


@pytest.mark.parametrize("value", [-0.1, math.nan, "fast", None, True, 1j, torch.zeros(2), torch.tensor(True)])
@pytest.mark.parametrize(("name", "key"), AT_LEAST_0)
def test_refuses_what_is_no_number_or_negative(name: str, key: str, value: Any) -> None:
    refused(name, {key: value}, f"{key} is {value!r}; it must be a number >= 0")


@pytest.mark.parametrize("value", [(1.0, 0.9), (0.9, -0.1), (0.9,), 0.9, (0.9, math.nan), ("a", 0.9), (0.9, 0.9, 0.9)])
@pytest.mark.parametrize("name", ["adamw", "adam", "lion"])
def test_refuses_betas_outside_their_range(name: str, value: Any) -> None:
    refused(name, {"betas": value}, f"betas is {value!r}; it must be two numbers from 0 to below 1")


@pytest.mark.parametrize("name", NAMES)
def test_refuses_what_torch_has_and_we_do_not(name: str) -> None:
    refused(name, {"maximize": True}, "maximize is True; it must be False: negate the loss instead")
    why = "autograd cannot follow updates that are made on the host"
    refused(name, {"differentiable": True}, f"differentiable is True; it must be False: {why}")


@pytest.mark.parametrize("name", ["adamw", "adam"])
def test_refuses_amsgrad_and_the_other_decay(name: str) -> None:
    why = "its maximum would be a third moment to store and to move; use torch's optimizer for these parameters"
    refused(name, {"amsgrad": True}, f"amsgrad is True; it must be False: {why}")
    decoupled = name == "adamw"
    other = "adam" if decoupled else "adamw"
    wrong = f"decoupled_weight_decay is {not decoupled}; it must be {decoupled}: use the rule {other} instead"
    refused(name, {"decoupled_weight_decay": not decoupled}, wrong)


def test_refuses_sgds_combinations_that_torch_refuses() -> None:
    refused("sgd", {"dampening": math.inf}, "dampening is inf; it must be a finite number")
    refused("sgd", {"nesterov": "no"}, "nesterov is 'no'; it must be True or False")
    wanted = "it needs momentum alone"
    told = "nesterov is True; it must be False with momentum"
    refused("sgd", {"nesterov": True}, f"{told} 0.2 and dampening 0.3: {wanted}")
    change = {"nesterov": True, "momentum": 0, "dampening": 0}
    refused("sgd", change, f"{told} 0 and dampening 0: {wanted}")
    RULES["sgd"].check({**GROUPS["sgd"], "nesterov": True, "dampening": 0})


@pytest.mark.parametrize(("name", "key"), [(name, key) for name in NAMES for key in GROUPS[name] if key != "nesterov"])
def test_refuses_tensors_on_a_device(name: str, key: str) -> None:
    far = torch.zeros((), device="meta")
    group = {**GROUPS[name], key: (0.5, far) if key == "betas" else far}
    read = RULES[name].initial if key == "initial_accumulator_value" else RULES[name].hyper
    for take in (RULES[name].check, read):
        with pytest.raises(UnsupportedError, match=f"^{key} is a tensor on meta; use a float or a CPU tensor$"):
            take(group)


# Arithmetic: every operation in single precision, one after the other, against numpy's.

F = np.float32
Vector = NDArray[np.float32]


def f32(value: float) -> Vector:
    with np.errstate(over="ignore"):
        return np.asarray(value, dtype=F)


def by_hand(name: str, w: Vector, moments: list[Vector], c: int, g: Vector, n: tuple[float, ...], decay: float) -> None:
    """One update of one column in place. c: the count with this update, n: the rule's numbers."""
    lr = n[0]
    if name in ("adamw", "adam"):
        m, v = moments
        w[:] = w * f32(decay) if name == "adamw" else w
        g = g + w * f32(n[4]) if name == "adam" and n[4] != 0 else g
        m[:] = m + (g - m) * f32(1 - n[1])
        v[:] = v * f32(n[2]) + (g * f32(1 - n[2])) * g
        step_size, inverse_root = f32(lr / (1 - n[1] ** c)), f32(1 / math.sqrt(1 - n[2] ** c))
        w[:] = w - (m * step_size) / (np.sqrt(v) * inverse_root + f32(n[3]))
    elif name == "adagrad":
        (s,) = moments
        g = g + w * f32(n[3]) if n[3] != 0 else g
        s[:] = s + g * g
        w[:] = w - (g * f32(lr / (1 + (c - 1) * n[1]))) / (np.sqrt(s) + f32(n[2]))
    elif name == "lion":
        (m,) = moments
        u = m + (g - m) * f32(1 - n[1])
        sign = np.where(u > 0, F(1), np.where(u < 0, F(-1), np.where(np.isnan(u), u, F(0))))
        w[:] = w * f32(decay) - sign * f32(lr)
        m[:] = m + (g - m) * f32(1 - n[2])
    else:
        (b,) = moments
        g = g + w * f32(n[3]) if n[3] != 0 else g
        if n[1] == 0:
            w[:] = w - g * f32(lr)
        else:
            b[:] = g if c == 1 else b * f32(n[1]) + g * f32(1 - n[2])
            w[:] = w - (g + b * f32(n[1]) if n[4] else b) * f32(lr)


def random_state(name: str, shape: tuple[int, int], generator: torch.Generator, *, odd: bool = True) -> ColumnState:
    """Every column with its own number of updates; with odd numbers now and then."""
    rule = RULES[name]
    state = ColumnState(randoms(shape, generator, odd=odd), rule.moments)
    for moment in state.moments:
        moment.copy_(randoms(shape, generator, odd=odd))
    if name not in ("lion", "sgd"):
        state.moments[-1].abs_()
    state.count.copy_(torch.randint(0, 6, shape[:1], generator=generator))
    return state


def randoms(shape: tuple[int, int], generator: torch.Generator, *, odd: bool = True) -> Tensor:
    values = torch.randn(shape, generator=generator) * torch.randn((), generator=generator).mul(3).exp()
    place = torch.randint(0, 30 if odd else 1, shape, generator=generator)
    for number, value in enumerate((0.0, -0.0, math.inf, -math.inf, math.nan, 3e38, 1e-44, 1e-20), start=1):
        values[place == number] = value
    return values


def assert_same_state(a: ColumnState, b: ColumnState) -> None:
    for stream, (x, y) in enumerate(zip((a.master, *a.moments), (b.master, *b.moments), strict=True)):
        same = same_bits(x, y)
        assert bool(same.all()), f"stream {stream}: {x[~same][:5].tolist()} against {y[~same][:5].tolist()}"
    assert torch.equal(a.count, b.count)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", NAMES)
def test_every_update_is_the_formula_by_hand(name: str, seed: int) -> None:
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    shape = rng.choice([1, 2, 5, 300]), rng.choice([1, 7, 16, 131])
    rule, state = RULES[name], random_state(name, shape, generator)
    for _ in range(4):
        hyper = rule.hyper(random_group(name, rng))
        gradient = randoms(shape, generator)
        decay = rng.choice([hyper.decay, 0.7])
        wanted, kept = state.slice(0, shape[0]).select(torch.arange(shape[0])), gradient.clone()
        wanted.count.add_(int(rule.counts(hyper)))
        for column in range(shape[0]):
            row = [stream[column].numpy() for stream in (wanted.master, *wanted.moments)]
            with np.errstate(all="ignore"):
                count = int(wanted.count[column])
                by_hand(name, row[0], row[1:], count, gradient[column].numpy(), hyper.numbers, decay)
        state.update(rule, gradient, hyper, decay=decay)
        assert_same_state(state, wanted)
        assert bool(same_bits(gradient, kept).all())


@pytest.mark.parametrize("seed", range(30))
def test_lion_is_the_papers(seed: int) -> None:
    """Against fp64; where the two moments all but cancel, rounding decides the sign."""
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    shape = rng.choice([1, 4, 9]), rng.choice([7, 33, 130])
    state = ColumnState(torch.randn(shape, generator=generator), 1)
    for _ in range(6):
        hyper = LionHyper(10 ** rng.uniform(-4, -0.5), rng.choice([0.9, 0.95, 0.0]), rng.choice([0.99, 0.98, 0.5]), 0.1)
        gradient = torch.randn(shape, generator=generator)
        w, m, g = (tensor.double() for tensor in (state.master, state.moments[0], gradient))
        towards = hyper.beta1 * m + (1 - hyper.beta1) * g
        theirs = w - hyper.lr * (towards.sign() + hyper.weight_decay * w)
        moment = hyper.beta2 * m + (1 - hyper.beta2) * g
        state.update(RULES["lion"], gradient, hyper)
        clear = towards.abs() > 4 * 2.0**-23 * (m.abs() + g.abs())
        assert float(clear.double().mean()) > 0.99
        assert float(ulps(state.master, theirs, torch.maximum(w.abs(), theirs.abs()))[clear].max()) <= 4
        assert float(ulps(state.moments[0], moment, m.abs() + g.abs()).max()) <= 4


# Scalars by count, and roots.


def test_roots_are_the_nearest_numbers() -> None:
    """A fifth of all significands in both parities of the exponent, and odd numbers."""
    significands = torch.arange(0x3F800000, 0x40800000, 5, dtype=torch.int32).view(torch.float32)
    odd = torch.tensor([0.0, -0.0, 1e-45, 3e-39, math.inf, math.nan, -1.0])
    for values in (significands, odd, odd.expand(2, 7).t()):
        wanted = values.double().sqrt().float()
        assert bool(same_bits(rooted(values), wanted).all())


@pytest.mark.parametrize("counts", [[], [3], [7, 7, 7], [2, 1, 2, 2**31 - 1, 40], list(range(1, 300))])
def test_scalars_by_count_are_pythons_rounded_once(counts: list[int]) -> None:
    of: list[Callable[[float], float]] = [lambda c: 0.1 / (1 - 0.9**c), lambda c: 1 / (1 - 0.999**c)]
    with torch.device("meta"):  # a default device must not draw them away
        found = per_count(torch.tensor(counts, dtype=torch.int32, device="cpu"), *of)
    for scalar, column in zip(of, found, strict=True):
        assert column.shape == (len(counts), 1)
        assert column.numpy().tobytes() == np.array([scalar(float(c)) for c in counts], dtype=F).tobytes()


# On a device.


@pytest.mark.parametrize("name", NAMES)
def test_nothing_waits_for_a_device(name: str) -> None:
    """A meta tensor has no values, so whatever reads one fails."""
    rng = random.Random(1)
    state = ColumnState(torch.zeros(4, 5, device="meta"), RULES[name].moments, RULES[name].initial(GROUPS[name]))
    skip = torch.zeros((), dtype=torch.bool, device="meta")
    for _ in range(8):
        hyper = RULES[name].hyper(random_group(name, rng))
        state.update(RULES[name], torch.zeros(4, 5, device="meta"), hyper, skip=skip)
    assert state.master.device.type == "meta"


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_does_the_same_and_is_not_waited_for(name: str) -> None:
    generator, rng = torch.Generator().manual_seed(1), random.Random(1)
    host = random_state(name, (33, 65), generator)
    far = ColumnState(host.master.cuda(), len(host.moments))
    for mine, other in zip((*far.moments, far.count), (*host.moments, host.count), strict=True):
        mine.copy_(other)
    for _ in range(8):
        gradient, hyper = randoms((33, 65), generator), RULES[name].hyper(random_group(name, rng))
        on_device = gradient.cuda()
        torch.cuda.set_sync_debug_mode("error")
        try:
            far.update(RULES[name], on_device, hyper)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        host.update(RULES[name], gradient, hyper)
    assert torch.equal(host.count, far.count.cpu())
    for a, b in zip((host.master, *host.moments), (far.master, *far.moments), strict=True):
        # Its fp64 powers need not be libm's, so a scalar may round to the neighbour.
        torch.testing.assert_close(b.cpu(), a, rtol=1e-6, atol=1e-30, equal_nan=True)
