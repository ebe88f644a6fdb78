"""Scripts that write to weights between steps: merges, soups, perturbations, projections, checkpoints."""

from __future__ import annotations

import copy
import io
import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from compatibility.idioms.script import Script, batch, batches, net


class LoraLinear(nn.Module):
    """A layer with a low-rank update, which can be merged into its weight."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        self.merged = False

    def merge(self) -> None:
        self.base.weight.data += self.lora_b @ self.lora_a
        self.merged = True

    def unmerge(self) -> None:
        self.base.weight.data -= self.lora_b @ self.lora_a
        self.merged = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        return y if self.merged else y + x @ self.lora_a.T @ self.lora_b.T


def lora_merge(script: Script) -> None:
    """LoRA on a frozen base: merged for an evaluation, and unmerged."""
    model = nn.Sequential(LoraLinear(net().first), nn.Tanh(), LoraLinear(net().last))
    for name, p in model.named_parameters():
        p.requires_grad_("lora" in name)
    engine = script.engine(model, [p for p in model.parameters() if p.requires_grad])
    layers = [layer for layer in model if isinstance(layer, LoraLinear)]
    for number, (x, y) in enumerate(batches()):
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()
        if number % 4 == 3:
            with torch.no_grad():
                for layer in layers:
                    layer.merge()
                script.read("loss, merged", [F.mse_loss(engine(x), y)])
                for layer in layers:
                    layer.unmerge()


def relora(script: Script) -> None:
    """ReLoRA: merged into a base that trains too, and begun anew."""
    torch.manual_seed(3)
    model = nn.Sequential(LoraLinear(net().first), nn.Tanh(), LoraLinear(net().last))
    engine = script.engine(model)
    for number, (x, y) in enumerate(batches()):
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()
        if number % 6 == 5:
            torch.manual_seed(number)
            with torch.no_grad():
                for layer in model:
                    if isinstance(layer, LoraLinear):
                        layer.base.weight.add_(layer.lora_b @ layer.lora_a)
                        nn.init.kaiming_uniform_(layer.lora_a, a=math.sqrt(5))
                        layer.lora_b.zero_()


def soup(script: Script) -> None:
    """The mean of three checkpoints of the run is loaded, and trained on."""
    model = net()
    engine = script.engine(model)
    kept = []
    for number, (x, y) in enumerate(batches()):
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()
        if number in (4, 8, 12):
            kept.append(copy.deepcopy(model.state_dict()))
        if number == 12:
            model.load_state_dict({name: torch.stack([k[name] for k in kept]).mean(0) for name in kept[0]})


def sam(script: Script) -> None:
    """Sharpness-aware minimisation: uphill along `.grad`, a second backward, back, and the step."""
    model = net()
    engine = script.engine(model)
    for x, y in batches():
        engine.backward(F.mse_loss(engine(x), y))
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
            old = {p: p.data.clone() for p in model.parameters()}
            for p in model.parameters():
                if p.grad is not None:
                    p.add_(p.grad * (0.05 / (norm + 1e-12)))
        engine.zero_grad()
        loss = F.mse_loss(engine(x), y)
        engine.backward(loss)
        for p in model.parameters():
            p.data = old[p]
        engine.step()
        script.read("loss uphill", [loss])


def sam_of_autograd(script: Script) -> None:
    """The same with `torch.autograd.grad` for the way uphill, so that only the second backward is the engine's."""
    model = net()
    engine = script.engine(model)
    parameters = list(model.parameters())
    for x, y in batches():
        uphill = torch.autograd.grad(F.mse_loss(model(x), y), parameters)
        scale = 0.05 / torch.stack([g.norm() for g in uphill]).norm()
        with torch.no_grad():
            for p, g in zip(parameters, uphill, strict=True):
                p.add_(scale * g)
        engine.backward(F.mse_loss(engine(x), y))
        with torch.no_grad():
            for p, g in zip(parameters, uphill, strict=True):
                p.sub_(scale * g)
        engine.step()


def lookahead(script: Script) -> None:
    """Slow weights, which every fifth step moves half-way and writes back."""
    model = net()
    engine = script.engine(model)
    slow = [p.data.clone() for p in model.parameters()]
    for number, (x, y) in enumerate(batches()):
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()
        if number % 5 == 4:
            for p, s in zip(model.parameters(), slow, strict=True):
                s.add_(p.data - s, alpha=0.5)
                p.data.copy_(s)
    script.read("slow weights", slow)


def reptile(script: Script) -> None:
    """A few steps on each task, and a `load_state_dict` of the way between."""
    model = net()
    engine = script.engine(model)
    for task in range(5):
        before = copy.deepcopy(model.state_dict())
        for number in range(4):
            x, y = batch(10 * task + number)
            engine.backward(F.mse_loss(engine(x), (1 + task) * y / 3))
            engine.step()
        after = model.state_dict()
        model.load_state_dict({name: before[name] + 0.4 * (after[name] - before[name]) for name in before})


def hypersphere(script: Script) -> None:
    """nGPT: each row of each matrix is normalised after each step."""
    model = net()
    engine = script.engine(model)
    for x, y in batches():
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()
        for layer in (model.first, model.last):
            layer.weight.data.copy_(F.normalize(layer.weight.data, p=2, dim=-1))


def max_norm(script: Script) -> None:
    """Rows are brought back to a greatest norm by `torch.renorm`, before each forward."""
    model = net()
    engine = script.engine(model)
    for x, y in batches():
        with torch.no_grad():
            for layer in (model.first, model.last):
                layer.weight.copy_(torch.renorm(layer.weight, p=2, dim=0, maxnorm=0.5))
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()


def noise_on_weights(script: Script) -> None:
    """Noise on the weights after each step (stochastic gradient Langevin dynamics), shrink and perturb at times."""
    model = net()
    engine = script.engine(model)
    generator = torch.Generator().manual_seed(5)
    for number, (x, y) in enumerate(batches()):
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape, generator=generator), alpha=1e-3)
                if number % 7 == 6:
                    p.mul_(0.8)


def new_head(script: Script) -> None:
    """The head is initialised anew in the midst of training."""
    model = net()
    engine = script.engine(model)
    for number, (x, y) in enumerate(batches()):
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()
        if number == 9:
            torch.manual_seed(11)
            model.last.reset_parameters()
            nn.init.ones_(model.norm.weight)


def checkpoint(script: Script) -> None:
    """A divergence: the model's file of some steps ago is loaded, and training goes on."""
    model = net()
    engine = script.engine(model)
    file = io.BytesIO()
    for number, (x, y) in enumerate(batches()):
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()
        if number == 5:
            torch.save(engine.module.state_dict(), file)
        if number == 12:
            file.seek(0)
            engine.module.load_state_dict(torch.load(file))


def vectors(script: Script) -> None:
    """All weights as one vector: kept near a ball around where they began."""
    model = net()
    engine = script.engine(model)
    start = parameters_to_vector(model.parameters()).detach().clone()
    for x, y in batches():
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()
        way = parameters_to_vector(model.parameters()).detach() - start
        script.read("distance", [way.norm()])
        if way.norm() > 0.5:
            vector_to_parameters(start + way * (0.5 / way.norm()), model.parameters())


def freeze_and_thaw(script: Script) -> None:
    """A layer is frozen for some steps."""
    model = net()
    engine = script.engine(model)
    for number, (x, y) in enumerate(batches()):
        model.first.requires_grad_(not 6 <= number < 13)
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()
        script.read("first layer", model.first.parameters())


def gradual_unfreezing(script: Script) -> None:
    """A layer is frozen from the beginning; once it is thawed, it joins the optimizer."""
    model = net()
    model.first.requires_grad_(False)
    engine = script.engine(model, [p for p in model.parameters() if p.requires_grad])
    for number, (x, y) in enumerate(batches()):
        if number == 6:
            model.first.requires_grad_(True)
            engine.optimizer.add_param_group({"params": list(model.first.parameters()), "lr": 2e-3})
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()
        script.read("first layer", model.first.parameters())
