"""Callbacks and subclasses of Hugging Face's Trainer that read and write weights, and a loop of Accelerate's."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback

from compatibility.idioms.script import ROWS, STEPS, Net, Script, batch, batches, net


class Rows(Dataset[dict[str, Tensor]]):
    """The rows of all batches."""

    def __init__(self) -> None:
        self._x, self._y = (torch.cat(parts) for parts in zip(*batches(), strict=True))

    def __len__(self) -> int:
        return ROWS * STEPS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self._x[index], "labels": self._y[index]}


class Model(nn.Module):
    """Says its loss, as the Trainer wants it."""

    def __init__(self, inner: Net) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = self.inner(x)
        return {"loss": F.mse_loss(y, labels), "logits": y}


class Average(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
    """An average of the weights, taken in `on_step_end`."""

    def __init__(self, model: nn.Module) -> None:
        self.average = {name: p.detach().clone() for name, p in model.named_parameters()}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the Trainer."""
        with torch.no_grad():
            for name, p in kwargs["model"].named_parameters():
                self.average[name].lerp_(p, 0.1)


def averaging(script: Script) -> None:
    """A callback that averages in `on_step_end`."""
    model = Model(net())
    callback = Average(model)
    script.trainer(Trainer, model, train_dataset=Rows(), callbacks=[callback]).train()
    script.read("average", callback.average.values())


class Clipping(TrainerCallback):  # type: ignore[misc]
    """Clips weights, and sets a layer's bias anew at a step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the Trainer."""
        model = kwargs["model"]
        for p in model.parameters():
            if p.ndim == 2:
                p.data.clamp_(-0.2, 0.2)
        if state.global_step == 9:
            nn.init.zeros_(model.inner.last.bias)


def writing(script: Script) -> None:
    """A callback that writes in `on_step_end`."""
    script.trainer(Trainer, Model(net()), train_dataset=Rows(), callbacks=[Clipping()]).train()


class Evaluating(Trainer):  # type: ignore[misc]
    """Evaluates with the average, and puts the weights back."""

    average: Average
    losses: list[Tensor]

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """With the average's weights."""
        assert isinstance(self.model, nn.Module)
        stored = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.model.load_state_dict(self.average.average)
        found: dict[str, float] = super().evaluate(*args, **kwargs)
        self.model.load_state_dict(stored)
        self.losses.append(torch.tensor(found["eval_loss"]))
        return found


def evaluating(script: Script) -> None:
    """A subclass that swaps an average in for each evaluation, and back."""
    model = Model(net())
    average = Average(model)
    data = Rows()
    trainer = script.trainer(
        Evaluating,
        model,
        train_dataset=data,
        eval_dataset=data,
        callbacks=[average],
        more={"eval_strategy": "steps", "eval_steps": 4},
    )
    trainer.average, trainer.losses = average, []
    trainer.train()
    script.read("loss of the average", trainer.losses)


def accelerated(script: Script) -> None:
    """A loop of Accelerate's, with torch's `AveragedModel` and weights that are clipped."""
    model = net()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    accelerator, prepared, optimizer = script.accelerator(model)
    for number in range(STEPS):
        x, y = batch(number)
        accelerator.backward(F.mse_loss(prepared(x), y))
        optimizer.step()
        optimizer.zero_grad()
        for p in accelerator.unwrap_model(prepared).parameters():
            p.data.clamp_(-0.25, 0.25)
        average.update_parameters(accelerator.unwrap_model(prepared))
    script.read("average", average.parameters())
