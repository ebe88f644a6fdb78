"""What public training scripts do around the optimizer, in small: they end as with torch's AdamW."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from zenflow import ZenFlowAdamW, ZenFlowConfig

SETTINGS: dict[str, dict[str, Any]] = {
    "synchronous": {"topk_ratio": 0.2, "update_interval": 1, "overlap_step": False},
    "all deferred": {"topk_ratio": 0.0, "update_interval": 1, "overlap_step": False, "pipeline": "bucket"},
    "on the device": {"offload_ratio": 0.0},
}
WINDOWS: dict[str, Any] = {"topk_ratio": 0.2, "update_interval": 3}
TOKENS, WIDTH, LENGTH = 17, 16, 8
Make = Callable[..., torch.optim.Optimizer]
"""Parameters or groups, keyword arguments of AdamW, and `module`."""


class Language(nn.Module):
    """A transformer or an LSTM over tokens, its decoder tied to its embedding."""

    def __init__(self, *, lstm: bool = False) -> None:
        super().__init__()
        self.encoder = nn.Embedding(TOKENS, WIDTH)
        self.body: nn.Module = (  # a bias of keys would have a gradient of rounding errors alone
            nn.LSTM(WIDTH, WIDTH, 2)
            if lstm
            else nn.TransformerEncoderLayer(WIDTH, 2, 24, dropout=0.0, batch_first=True, bias=False)
        )
        self.decoder = nn.Linear(WIDTH, TOKENS)
        self.decoder.weight = self.encoder.weight
        self.apply(self._begin)

    def _begin(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.1)

    def forward(self, tokens: Tensor, hidden: Any = None) -> Any:
        if isinstance(self.body, nn.LSTM):
            out, hidden = self.body(self.encoder(tokens), hidden)
            return self.decoder(out), hidden
        return self.decoder(self.body(self.encoder(tokens)))


def batch(number: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(TOKENS, (3, LENGTH + 1), generator=torch.Generator().manual_seed(number))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.reshape(-1, TOKENS), targets.reshape(-1))


def nanogpt(make: Make) -> Iterable[Tensor]:
    """Groups by dimension, `fused`, micro steps, a scaler that is off, a rate that is set each step, resumed once."""

    def configured(model: nn.Module) -> torch.optim.Optimizer:
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        groups = [
            {"params": [p for p in named.values() if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        return make(groups, module=model, lr=1e-2, betas=(0.9, 0.95), fused=True)

    model = Language()
    optimizer = configured(model)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for step in range(8):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, (step + 1) / 3) * (1 + math.cos(step / 8))
        if step == 4:
            model.eval()
            with torch.no_grad():
                torch.stack([loss_of(model(x), y) for x, y in map(batch, range(2))]).mean().item()
            model.train()
            file = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": step}, file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
            if isinstance(optimizer, ZenFlowAdamW):
                optimizer.close()
            model = Language()
            model.load_state_dict(saved["model"])
            optimizer = configured(model)
            optimizer.load_state_dict(saved["optimizer"])
        for micro in range(2):
            x, y = batch(2 * step + micro)
            scaler.scale(loss_of(model(x), y) / 2).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    return model.parameters()


def makemore(make: Make) -> Iterable[Tensor]:
    """`model.zero_grad`, evaluation and samples between steps, the best weights kept."""
    model, best = Language(), None
    optimizer = make(model.parameters(), module=model, lr=5e-3, weight_decay=0.01, betas=(0.9, 0.99), eps=1e-8)
    for step in range(6):
        x, y = batch(step)
        loss = loss_of(model(x), y)
        model.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 2:
            with torch.inference_mode():
                x = model(x).softmax(-1).argmax(-1)
            best = copy.deepcopy(model.state_dict()) if best is None or loss < 3 else best
    return model.parameters()


def mingpt(make: Make) -> Iterable[Tensor]:
    """Names in sets of what decays, callbacks at each batch, weights looked at and one of them frozen on the way."""
    model = Language()
    decay = {f"{name}.{leaf}" for name, m in model.named_modules() for leaf, _ in m.named_parameters(recurse=False)}
    named = {name: p for name, p in model.named_parameters() if name in decay}
    bias = {name for name in named if name.endswith("bias")}
    groups = [
        {"params": [named[name] for name in sorted(named.keys() - bias)], "weight_decay": 0.1},
        {"params": [named[name] for name in sorted(bias)], "weight_decay": 0.0},
    ]
    optimizer = make(groups, module=model, lr=3e-3, betas=(0.9, 0.95))
    for step in range(7):
        x, y = batch(step)
        loss = loss_of(model(x), y)
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        sum(float(p.detach().norm()) for p in model.parameters())
        if step == 3:
            model.decoder.bias.requires_grad_(False)
    return model.parameters()


def word_language_model(make: Make, *, lstm: bool) -> Iterable[Tensor]:
    """The whole module is pickled, loaded, and trained on; a rate that is divided; an LSTM's state carried over."""
    model: nn.Module = Language(lstm=lstm)
    optimizer = make(model.parameters(), module=model, lr=1e-2)
    hidden: Any = None
    for step in range(8):
        x, y = batch(step)
        model.zero_grad()
        if lstm:
            hidden = None if hidden is None else tuple(part.detach() for part in hidden)
            logits, hidden = model(x, hidden)
        else:
            logits = model(x)
        loss_of(logits, y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        if step == 4:
            optimizer.param_groups[0]["lr"] /= 4.0
        if step == 5:
            file = io.BytesIO()
            torch.save(model, file)
            assert b"zenflow.late" not in file.getvalue()
            file.seek(0)
            if isinstance(optimizer, ZenFlowAdamW):
                optimizer.close()
            model = torch.load(file, weights_only=False)
            model.apply(lambda part: part.flatten_parameters() if isinstance(part, nn.LSTM) else None)
            optimizer = make(model.parameters(), module=model, lr=1e-3)
    return model.parameters()


SCRIPTS: dict[str, Callable[[Make], Iterable[Tensor]]] = {
    "nanoGPT": nanogpt,
    "makemore": makemore,
    "minGPT": mingpt,
    "word_language_model, LSTM": lambda make: word_language_model(make, lstm=True),
    "word_language_model, transformer": lambda make: word_language_model(make, lstm=False),
}


def run_of(script: str, make: Make) -> list[Tensor]:
    torch.manual_seed(3)
    made: list[Any] = []

    def kept(*args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        optimizer = make(*args, **kwargs)
        made.append(optimizer)
        return optimizer

    weights = list(SCRIPTS[script](kept))
    if isinstance(made[-1], ZenFlowAdamW):
        made[-1].close()
    return [weight.detach().clone() for weight in weights]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_it_ends_as_with_torch(setting: str, script: str) -> None:
    ours = run_of(script, lambda *a, **k: ZenFlowAdamW(*a, **k, config=ZenFlowConfig(**SETTINGS[setting])))
    theirs = run_of(script, lambda groups, module, **k: torch.optim.AdamW(groups, **k))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=3e-6, rtol=0.0)


@pytest.mark.parametrize("script", SCRIPTS)
def test_late_updates_train_it_too(script: str) -> None:
    ours = run_of(script, lambda *a, **k: ZenFlowAdamW(*a, **k, config=ZenFlowConfig(**WINDOWS)))
    theirs = run_of(script, lambda groups, module, **k: torch.optim.AdamW(groups, **k))
    moved = [float((one - other).abs().max()) for one, other in zip(ours, theirs, strict=True)]
    assert 0.0 < max(moved) < 0.1
