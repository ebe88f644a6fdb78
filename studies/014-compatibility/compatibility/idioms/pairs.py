"""Two networks that train against each other, each with an engine, or one of them with an optimizer of torch's."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from compatibility.idioms.script import INPUTS, Script, batches, net, noise

LATENT = 4


def _networks() -> tuple[nn.Module, nn.Module]:
    return net(LATENT, INPUTS, seed=3), net(INPUTS, 1, seed=4)


def _is_real(logits: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.ones_like(logits))


def _is_fake(logits: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.zeros_like(logits))


def _trainable(parameters: Iterable[nn.Parameter], flag: bool) -> None:
    for p in parameters:
        p.requires_grad = flag


def two_engines(script: Script) -> None:
    """The generator's backward goes through the discriminator's engine, after its step."""
    generator, discriminator = _networks()
    g_engine, d_engine = script.engine(generator), script.engine(discriminator)
    for number, (real, _) in enumerate(batches()):
        z = noise(number, LATENT)
        d_engine.zero_grad()
        d_engine.backward(_is_real(d_engine(real)) + _is_fake(d_engine(g_engine(z).detach())))
        d_engine.step()
        g_engine.zero_grad()
        g_loss = _is_real(d_engine(g_engine(z)))
        g_engine.backward(g_loss)
        g_engine.step()
        script.read("loss", [g_loss])
    script.read("discriminator", discriminator.parameters())


def two_engines_frozen(script: Script) -> None:
    """As two engines, but the discriminator is frozen while the generator learns: `set_requires_grad(D, False)`."""
    generator, discriminator = _networks()
    g_engine, d_engine = script.engine(generator), script.engine(discriminator)
    for number, (real, _) in enumerate(batches()):
        fake = g_engine(noise(number, LATENT))
        _trainable(discriminator.parameters(), False)
        g_engine.backward(_is_real(discriminator(fake)))
        g_engine.step()
        _trainable(discriminator.parameters(), True)
        d_engine.backward(0.5 * (_is_real(d_engine(real)) + _is_fake(d_engine(fake.detach()))))
        d_engine.step()
    script.read("discriminator", discriminator.parameters())


def engine_and_torch(script: Script) -> None:
    """An engine for the generator, torch's Adam for the discriminator."""
    generator, discriminator = _networks()
    engine = script.engine(generator)
    optimizer = torch.optim.Adam(discriminator.parameters(), lr=5e-3)
    for number, (real, _) in enumerate(batches()):
        z = noise(number, LATENT)
        optimizer.zero_grad()
        d_loss = _is_real(discriminator(real)) + _is_fake(discriminator(engine.module(z).detach()))
        d_loss.backward()
        optimizer.step()
        g_loss = _is_real(discriminator(engine(z)))
        engine.backward(g_loss)
        engine.step()
        script.read("loss", [d_loss, g_loss])
    script.read("discriminator", discriminator.parameters())


def clipped_critic(script: Script) -> None:
    """WGAN: the critic's weights are clipped after each of its steps, several for one of the generator."""
    generator, critic = _networks()
    g_engine, c_engine = script.engine(generator), script.engine(critic)
    for number, (real, _) in enumerate(batches()):
        c_engine.backward(c_engine(g_engine.module(noise(number, LATENT)).detach()).mean() - c_engine(real).mean())
        c_engine.step()
        for p in critic.parameters():
            p.data.clamp_(-0.05, 0.05)
        if number % 2 == 1:
            g_engine.backward(-critic(g_engine(noise(1000 + number, LATENT))).mean())
            g_engine.step()
            c_engine.zero_grad()
    script.read("critic", critic.parameters())


def penalised_critic(script: Script) -> None:
    """WGAN-GP: the norm of the gradient at points between, with `create_graph`."""
    generator, critic = _networks()
    g_engine, c_engine = script.engine(generator), script.engine(critic)
    for number, (real, _) in enumerate(batches()):
        fake = g_engine.module(noise(number, LATENT)).detach()
        share = torch.linspace(0, 1, len(real))[:, None]
        between = (share * real + (1 - share) * fake).requires_grad_(True)
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = ((slope.norm(2, dim=1) - 1) ** 2).mean()
        c_loss = c_engine(fake).mean() - c_engine(real).mean() + 10 * penalty
        c_engine.backward(c_loss)
        c_engine.step()
        script.read("loss", [c_loss])
        if number % 5 == 4:
            g_engine.backward(-critic(g_engine(noise(1000 + number, LATENT))).mean())
            g_engine.step()
            c_engine.zero_grad()
    script.read("critic", critic.parameters())
