"""Losses that are made of the weights themselves, or of other weights than the model's."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from compatibility.idioms.script import Script, batch, batches, net


def l2_sp(script: Script) -> None:
    """A pull towards the pretrained weights, computed before the forward."""
    model = net()
    pretrained = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = script.engine(model)
    for x, y in batches():
        penalty = sum(((p - pretrained[name]) ** 2).sum() for name, p in model.named_parameters())
        loss = F.mse_loss(engine(x), y) + 0.05 * penalty
        engine.backward(loss)
        engine.step()
        script.read("loss", [loss])


def ewc(script: Script) -> None:
    """Elastic weight consolidation: a second task, with the first one's Fisher information."""
    model = net()
    engine = script.engine(model)
    for x, y in batches(10):
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()
    parameters = dict(model.named_parameters())
    fisher = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for number in range(4):
        x, y = batch(1000 + number)
        gradients = torch.autograd.grad(F.mse_loss(model(x), y), list(parameters.values()))
        for name, gradient in zip(parameters, gradients, strict=True):
            fisher[name] += gradient.square() / 4
    anchor = {name: p.data.clone() for name, p in parameters.items()}
    script.read("anchor", anchor.values())
    for x, y in batches(10):
        penalty = torch.zeros(())
        for name, p in model.named_parameters():
            penalty = penalty + (fisher[name] * (p - anchor[name]) ** 2).sum()
        engine.backward(100 * penalty + F.mse_loss(engine(x), -y))
        engine.step()


def maml(script: Script) -> None:
    """An inner step with `torch.func.functional_call`, differentiated through."""
    model = net()
    engine = script.engine(model)
    for number in range(16):
        weights = dict(engine.module.named_parameters())
        x, y = batch(2 * number)
        inner = F.mse_loss(torch.func.functional_call(engine.module, weights, (x,)), y)
        gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(weights.items(), gradients, strict=True)}
        x, y = batch(2 * number + 1)
        outer = F.mse_loss(torch.func.functional_call(engine.module, fast, (x,)), y)
        engine.backward(outer)
        engine.step()
        script.read("loss", [outer])


def double_backward(script: Script) -> None:
    """A penalty on the gradient with respect to the inputs, with `create_graph`, through the engine's forward."""
    model = net()
    engine = script.engine(model)
    for x, y in batches():
        x.requires_grad_(True)
        loss = F.mse_loss(model(x), y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        engine.backward(loss + 5 * slope.square().sum())
        engine.step()
        script.read("slope", [slope])


def orthogonal(script: Script) -> None:
    """A penalty on how far the layers are from orthogonal, taken over `modules()` after the forward."""
    model = net()
    engine = script.engine(model)
    for x, y in batches():
        loss: Tensor = F.mse_loss(engine(x), y)
        for layer in (model.first, model.last):
            gram = layer.weight @ layer.weight.T
            loss = loss + 0.01 * (gram - torch.eye(len(gram))).square().sum()
        engine.backward(loss)
        engine.step()
