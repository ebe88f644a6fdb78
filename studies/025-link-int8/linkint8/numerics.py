"""What codes do to training: the runtime itself with another link, and AdamW's moments on the same gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from convergence.setting import Regime, Setting
from convergence.train import World, feed_of, start, train
from torch import Tensor

from linkint8.coding import Code
from zenflow.groups import SplitWeight
from zenflow.staging import Dispatcher, Staged


@dataclass(frozen=True, order=True, kw_only=True)
class Coded(Setting):
    """A run of study 003 whose deferred gradients are coded; "" is bf16."""

    code: str = ""

    @property
    def key(self) -> str:
        return f"{super().key} link={self.code or 'bf16'}"


def published(regime: Regime, lr: float, seed: int, code: Code | None) -> Coded:
    """k = 0.1, S = L = 4."""
    return Coded(
        regime=regime,
        method="replay",
        lr=lr,
        ratio=0.1,
        interval=4,
        lag=4,
        seed=seed,
        code="" if code is None else code.name,
    )


@dataclass
class Link:
    """Codes columns on their way to the host. A column that is selected loses what is left of it: once in 32 steps."""

    code: Code
    generator: torch.Generator
    left: dict[Any, Tensor] = field(default_factory=dict)
    """By weight: [columns, rows] fp32, what was not sent yet."""

    def send(self, key: Any, columns: Tensor, gradients: Tensor) -> Tensor:
        """What arrives.

        Args:
            key: of the weight.
            columns: [n] int64, those that are deferred.
            gradients: [all columns, rows].

        Returns:
            [n, rows] in the gradients' dtype.
        """
        wanted = gradients[columns].float()
        left = self.left.get(key)
        if left is not None:
            wanted += left[columns]
        arrived = self.code.coded(wanted, self.generator)[0].to(gradients.dtype)
        if self.code.feedback:
            self.left[key] = torch.zeros(gradients.shape).index_copy(0, columns, wanted - arrived.float())
        return arrived


@contextmanager
def coding(code: Code | None, seed: int) -> Iterator[None]:
    """While it lasts, deferred columns go through a code, then as the runtime sends them; None: as they are."""
    if code is None:
        yield
        return
    link = Link(code, torch.Generator().manual_seed(seed))

    dispatch = Dispatcher.__call__

    def coded(self: Dispatcher, gradients: Sequence[tuple[SplitWeight, Tensor]]) -> list[Staged]:
        changed = [(weight, gradient.clone()) for weight, gradient in gradients]
        for weight, gradient in changed:
            matrix = weight.plan.view(gradient)
            for part in () if weight.deferred is None else weight.deferred.parts:
                matrix[:, part.columns] = link.send(part, part.columns, matrix.t()).t()
        return dispatch(self, changed)

    with mock.patch.object(Dispatcher, "__call__", coded):
        yield


def run(world: World, setting: Coded, code: Code | None) -> dict[str, Any]:
    """A training's figures."""
    with coding(code, 3000 + setting.seed):
        return train(world, setting)


# --- AdamW's moments on the same gradients -------------------------------------------------------------------------


@dataclass
class Moments:
    """AdamW of one weight as a code has it: first and second moment, and the way that the weight goes for lr = 1."""

    link: Link | None
    first: Tensor
    second: Tensor
    way: Tensor
    silent: float = 0.0
    """Sum over steps of the share of the entries that are not 0 and arrive as 0."""

    @classmethod
    def of(cls, code: Code | None, like: Tensor) -> Moments:
        link = None if code is None else Link(code, torch.Generator().manual_seed(0))
        return cls(link, torch.zeros_like(like), torch.zeros_like(like), torch.zeros_like(like))

    def step(self, gradients: Tensor, number: int) -> None:
        """Take a step's gradient, [columns, rows] bf16; steps count from 1."""
        arrived = gradients
        if self.link is not None:
            arrived = self.link.send(0, torch.arange(len(gradients)), gradients)
            there = gradients != 0
            self.silent += float((there & (arrived == 0)).sum() / there.sum().clamp(min=1))
        arrived = arrived.float()
        self.first.lerp_(arrived, 1 - 0.9)
        self.second.lerp_(arrived.square(), 1 - 0.999)
        root = (self.second / (1 - 0.999**number)).sqrt_().add_(1e-8)
        self.way += self.first / (1 - 0.9**number) / root


def same_gradients(world: World, regime: Regime, lr: float, codes: Sequence[Code], steps: int) -> dict[str, Any]:
    """A training with torch's AdamW on fp32 weights, and every code's moments of its gradients beside.

    Returns:
        By code and by weight (layers together): what `compared` says.
    """
    setting = Setting(regime=regime, method="synchronous", lr=lr)
    model, feed = start(world, regime, 0), feed_of(world, setting)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    matrices = {name: weight for name, weight in model.named_parameters() if weight.dim() == 2}
    with torch.no_grad():
        plain = {name: Moments.of(None, weight.t()) for name, weight in matrices.items()}
        coded = {code.name: {name: Moments.of(code, w.t()) for name, w in matrices.items()} for code in codes}
    for number in range(1, steps + 1):
        model(next(feed)).backward()
        with torch.no_grad():
            for name, weight in matrices.items():
                assert weight.grad is not None
                gradients = weight.grad.to(torch.bfloat16).t()
                for moments in (plain, *coded.values()):
                    moments[name].step(gradients, number)
        optimizer.step()
        optimizer.zero_grad()
    kinds: dict[str, list[str]] = {}
    for name in matrices:
        kinds.setdefault(name.removesuffix(".weight").rpartition(".")[2], []).append(name)
    return {
        code: {
            kind: compared([plain[name] for name in names], [own[name] for name in names], steps)
            for kind, names in (*kinds.items(), ("all", list(matrices)))
        }
        for code, own in coded.items()
    }


def compared(plain: Sequence[Moments], coded: Sequence[Moments], steps: int) -> dict[str, float]:
    """How a code's moments and ways differ from those of bf16.

    Returns:
        silent_percent: entries that arrive as 0, mean over weights; second_moment_p5, _p50, _p95, _p99: quantiles of
        its ratio over the entries; way_error_percent: distance of the ways, of their length; small_way_percent: length
        of the coded way, of the true one, over the tenth of entries with the smallest second moment.
    """

    def joined(part: str, moments: Sequence[Moments]) -> Tensor:
        return torch.cat([getattr(one, part).flatten() for one in moments])

    second, way = joined("second", plain), joined("way", plain)
    other, gone = joined("second", coded), joined("way", coded)
    there = second > 0
    ratio = (other[there] / second[there]).sort().values
    small = there & (second <= second[there].kthvalue(max(1, int(there.sum()) // 10)).values)
    at = {f"second_moment_p{q}": float(ratio[int(q / 100 * (len(ratio) - 1))]) for q in (5, 50, 95, 99)}
    return {
        "silent_percent": 100 * math.fsum(one.silent for one in coded) / steps / len(coded),
        **at,
        "way_error_percent": 100 * float((gone - way).norm() / way.norm()),
        "small_way_percent": 100 * float(gone[small].norm() / way[small].norm()),
    }
