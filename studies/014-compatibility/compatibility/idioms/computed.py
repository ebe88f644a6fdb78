"""Weights that a module computes from its parameters: norms, parametrizations, masks."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from compatibility.idioms.script import Net, Script, batches, net


def _trained(script: Script, model: Net) -> None:
    engine = script.engine(model)
    for x, y in batches():
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()
        script.read("weight", [model.last.weight])


def weight_norm_hook(script: Script) -> None:
    """`torch.nn.utils.weight_norm`, a hook before the forward."""
    model = net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(model.first)
        nn.utils.weight_norm(model.last)
    _trained(script, model)


def weight_norm(script: Script) -> None:
    """`torch.nn.utils.parametrizations.weight_norm`, and the weight it makes, read after each step."""
    model = net()
    parametrizations.weight_norm(model.first)
    parametrizations.weight_norm(model.last)
    _trained(script, model)


def spectral_norm_hook(script: Script) -> None:
    """`torch.nn.utils.spectral_norm`, whose power iteration reads the weight before each forward."""
    model = net()
    nn.utils.spectral_norm(model.first)
    nn.utils.spectral_norm(model.last)
    _trained(script, model)


def spectral_norm(script: Script) -> None:
    """`torch.nn.utils.parametrizations.spectral_norm`."""
    model = net()
    parametrizations.spectral_norm(model.first)
    parametrizations.spectral_norm(model.last)
    _trained(script, model)


class Symmetric(nn.Module):
    """Of a square matrix: its upper triangle, twice."""

    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


def parametrization(script: Script) -> None:
    """Registered before training, made final in the midst of it."""
    model = net()
    model.last = nn.Linear(20, 20)
    parametrize.register_parametrization(model.last, "weight", Symmetric())
    engine = script.engine(model)
    for number, (x, y) in enumerate(batches()):
        with parametrize.cached():
            engine.backward(F.mse_loss(engine(x)[:, : y.shape[1]], y))
        engine.step()
        script.read("weight", [model.last.weight])
        if number == 11:
            parametrize.remove_parametrizations(model.last, "weight", leave_parametrized=True)


def masks(script: Script) -> None:
    """A mask by magnitude, put on the weights again after each step."""
    model = net()
    engine = script.engine(model)
    mask: dict[str, Tensor] = {}
    for number, (x, y) in enumerate(batches()):
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()
        if number == 3:
            for name, p in model.named_parameters():
                if p.ndim == 2:
                    mask[name] = (p.abs() > p.abs().median()).float()
        for name, p in model.named_parameters():
            if name in mask:
                p.data.mul_(mask[name])
    script.read("share of zeros", [(model.first.weight == 0).float().mean(), (model.last.weight == 0).float().mean()])


def pruning(script: Script) -> None:
    """`prune.l1_unstructured` in the midst of training, trained with, and `prune.remove`."""
    model = net()
    engine = script.engine(model)
    for number, (x, y) in enumerate(batches()):
        if number == 6:
            prune.l1_unstructured(model.first, "weight", amount=0.5)
            prune.ln_structured(model.last, "weight", amount=0.5, n=2, dim=1)
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()
        if number == 14:
            prune.remove(model.first, "weight")
            prune.remove(model.last, "weight")
            script.read("pruned", [model.first.weight, model.last.weight])


def quantised(script: Script) -> None:
    """Weights that are rounded for the forward and put back before the step, as BinaryConnect does."""
    model = net()
    engine = script.engine(model)
    for x, y in batches():
        kept = [p.data.clone() for p in model.parameters()]
        for p in model.parameters():
            p.data.mul_(32).round_().div_(32)
        engine.backward(F.mse_loss(engine(x), y))
        for p, value in zip(model.parameters(), kept, strict=True):
            p.data.copy_(value)
        engine.step()


def from_a_generator(script: Script) -> None:
    """A hypernetwork: one layer's weight is another's output, set before each forward."""
    torch.manual_seed(3)
    model = nn.ModuleDict({"maker": nn.Linear(5, 72), "last": nn.Linear(6, 6)})
    engine = script.engine(model)
    code = torch.randn(5)
    for x, y in batches():
        weight = engine.module["maker"](code).view(6, 12)
        engine.backward(F.mse_loss(engine.module["last"](torch.tanh(x @ weight.T)), y))
        engine.step()
        script.read("maker", model["maker"].parameters())
