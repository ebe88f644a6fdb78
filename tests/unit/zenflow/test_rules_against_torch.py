"""Every rule that torch has, against torch: one step from equal state, many steps, infinities and NaN."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.tiers import repeated
from tests.support.zenflow.rule_cases import MOMENTS, TORCH, largest, random_group, ulps
from zenflow.rules import RULES
from zenflow.state import ColumnState

ODD = (math.inf, -math.inf, math.nan, 3e38, -3e38, 1e20, -1e20, 1.0, -1.0, 1e-25, 1e-45, -1e-45, 0.0, -0.0)


class Columns:
    """Columns as one torch parameter each, so that each has its own number of updates."""

    def __init__(self, name: str, weights: Tensor, group: dict[str, Any]) -> None:
        self.name = name
        self.rule = RULES[name]
        self.params = [nn.Parameter(row.clone()) for row in weights]
        start = {key: value for key, value in group.items() if key != "nesterov"}  # torch wants momentum with it
        self.inner = TORCH[name](self.params, foreach=False, **start)
        self.group = self.inner.param_groups[0]
        self.counts = torch.zeros(len(weights), dtype=torch.int32)

    def state(self) -> ColumnState:
        """A copy of torch's state; a moment that torch does not have yet is NaN, as nobody may read it."""
        state = ColumnState(torch.stack([param.detach() for param in self.params]), self.rule.moments)
        state.count.copy_(self.counts)
        for moment, key in zip(state.moments, MOMENTS[self.name], strict=True):
            for column, param in enumerate(self.params):
                value = self.inner.state[param].get(key)
                unread = math.nan if self.name == "sgd" else 0.0
                moment[column] = unread if value is None else value
        return state

    def step(self, live: Tensor, gradient: Tensor) -> None:
        for param in self.params:
            param.grad = None
        for column, row in zip(live.tolist(), gradient, strict=True):
            self.params[column].grad = row.clone()
        self.inner.step()
        self.counts[live] += int(self.rule.counts(self.rule.hyper(self.group)))


def drawn(name: str, seed: int) -> tuple[random.Random, torch.Generator, Columns]:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    shape = rng.choice([1, 2, 9]), rng.choice([1, 3, 7, 33, 130])
    return rng, generator, Columns(name, torch.randn(shape, generator=generator), random_group(name, rng))


def draw_live(rng: random.Random, columns: Columns) -> Tensor:
    """Some columns, at least one."""
    every = range(len(columns.params))
    return torch.tensor([column for column in every if rng.random() < 0.7] or [rng.choice(every)])


@pytest.mark.parametrize("seed", range(repeated(40)))
@pytest.mark.parametrize("name", TORCH)
def test_one_step_from_equal_state_is_torch_within_4_ulp(name: str, seed: int) -> None:
    rng, generator, columns = drawn(name, seed)
    rule = columns.rule
    for step in range(8):
        columns.group.update(random_group(name, rng))
        hyper, live = rule.hyper(columns.group), draw_live(rng, columns)
        ours = columns.state().select(live)
        before = columns.state().select(live)
        before.count.add_(int(rule.counts(hyper)))
        gradient = torch.randn(ours.master.shape, generator=generator) * torch.randn((), generator=generator).exp()
        ours.update(rule, gradient, hyper)
        columns.step(live, gradient)
        theirs = columns.state().select(live)
        assert torch.equal(ours.count, theirs.count)
        scales = largest(name, before, gradient, columns.group)
        streams = zip((ours.master, *ours.moments), (theirs.master, *theirs.moments), scales, strict=True)
        for stream, (a, b, scale) in enumerate(streams):
            distance = float(ulps(a, b, scale).max())
            assert distance <= 4, f"step {step}, stream {stream}, {columns.group}: {distance} ulp"


@pytest.mark.parametrize("count", [0, 1, 9])
@pytest.mark.parametrize("name", TORCH)
def test_infinities_and_nan_go_through_as_in_torch(name: str, count: int) -> None:
    """Every combination of odd weights, gradients and moments."""
    rule, rng = RULES[name], random.Random(count)
    mixed = torch.tensor(list(itertools.product(ODD, repeat=2 + rule.moments))).t().contiguous()
    weight, gradient, *moments = (row.unsqueeze(0) for row in mixed)
    if name != "sgd":
        moments[-1].abs_()  # of squares
    for _ in range(12):
        group = random_group(name, rng)
        if "betas" in group and group["betas"][0] <= 0.5:  # torch's lerp is another formula there
            group["betas"] = (0.9, 0.999)
        ours = ColumnState(weight.clone(), rule.moments)
        ours.count.fill_(count)
        param = nn.Parameter(weight.clone())
        theirs = TORCH[name]([param], foreach=False)
        theirs.param_groups[0].update(group)
        theirs.state[param]["step"] = torch.tensor(float(count))
        for mine, key, moment in zip(ours.moments, MOMENTS[name], moments, strict=True):
            mine.copy_(moment)
            theirs.state[param][key] = None if name == "sgd" and count == 0 else moment.clone()
        ours.update(rule, gradient, rule.hyper(group))
        param.grad = gradient.clone()
        theirs.step()
        after = [param.detach(), *(theirs.state[param][key] for key in MOMENTS[name])]
        for stream, (a, b) in enumerate(zip((ours.master, *ours.moments), after, strict=True)):
            if b is not None:  # torch has made no buffer, and we have not touched ours
                same = (a.isnan() == b.isnan()) & ((a == b) | ~(a.isinf() | b.isinf()))
                where = (~same)[0].nonzero()[:3, 0]
                assert not len(where), f"{group}, stream {stream}: of {mixed[:, where]} {a[0, where]}, {b[0, where]}"
