"""What every idiom begins with: a model, batches, an engine, and a list of what the script reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

LR, DECAY = 5e-3, 0.1
INPUTS, HIDDEN, OUTPUTS, ROWS = 12, 20, 6, 4
STEPS = 20
"""Of an idiom, unless it says otherwise: several windows of four."""


Idiom = Callable[["Script"], None]


class Side(Protocol):
    """Trains a script's model, with DeepSpeed or without."""

    def engine(self, model: nn.Module, parameters: list[nn.Parameter]) -> Any:
        """What `deepspeed.initialize` gives."""

    def trainer(self, model: nn.Module) -> dict[str, Any]:
        """What tells a Trainer how to train: its optimizers, or a ds_config for its arguments."""

    def accelerator(self, model: nn.Module) -> tuple[Any, Any, Any]:
        """An accelerator, and the model and an optimizer that it prepared."""


class Script:
    """Handed to an idiom in place of the ds_config that it would have.

    Args:
        side: that it runs on.
    """

    def __init__(self, side: Side) -> None:
        self._side = side
        self._models: list[nn.Module] = []
        self.seen: list[tuple[str, Tensor]] = []

    def engine(self, model: nn.Module, parameters: list[nn.Parameter] | None = None) -> Any:
        """As `deepspeed.initialize(model=..., model_parameters=..., config=...)` gives it."""
        self._models.append(model)
        return self._side.engine(model, list(model.parameters()) if parameters is None else parameters)

    def trainer(self, kind: Any, model: nn.Module, *, more: Mapping[str, Any] | None = None, **given: Any) -> Any:
        """A Trainer.

        Args:
            kind: its class.
            model: to train.
            more: of its `TrainingArguments`.
            given: its other arguments.
        """
        from transformers import TrainingArguments

        self._models.append(model)
        told = self._side.trainer(model)
        arguments = TrainingArguments(
            output_dir="trainer",
            max_steps=STEPS,
            per_device_train_batch_size=ROWS,
            learning_rate=LR,
            weight_decay=DECAY,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            deepspeed=told.pop("deepspeed", None),
            **(more or {}),
        )
        return kind(model=model, args=arguments, **told, **given)

    def accelerator(self, model: nn.Module) -> tuple[Any, Any, Any]:
        """As `Accelerator()` and `prepare(model, optimizer)` give them."""
        self._models.append(model)
        return self._side.accelerator(model)

    def read(self, what: str, tensors: Iterable[Tensor]) -> None:
        """Remember what was read.

        Args:
            what: it is.
            tensors: as they are now.
        """
        self.seen += [(f"{what} {number}", tensor.detach().clone()) for number, tensor in enumerate(tensors)]

    def run(self, idiom: Idiom) -> list[tuple[str, Tensor]]:
        """What it read, and the weights that it ends with."""
        idiom(self)
        for model in self._models:
            self.read("weight", model.parameters())
        return self.seen


class Net(nn.Module):
    """Two layers and a norm."""

    def __init__(self, inputs: int = INPUTS, outputs: int = OUTPUTS) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.last = nn.Linear(HIDDEN, outputs)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.norm(torch.tanh(self.first(x))))
        return y


def seeded(seed: int) -> torch.Generator:
    """A generator of its own, so that no draw depends on what else draws."""
    return torch.Generator().manual_seed(seed)


def net(inputs: int = INPUTS, outputs: int = OUTPUTS, *, seed: int = 3) -> Net:
    """The same weights each time."""
    torch.manual_seed(seed)
    return Net(inputs, outputs)


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Inputs, and what a fixed function makes of them."""
    x = torch.randn(ROWS, INPUTS, generator=seeded(100 + number))
    return x, torch.sin(x[:, :OUTPUTS] + x[:, OUTPUTS:])


def batches(count: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    """The same ones each time."""
    return (batch(number) for number in range(count))


def noise(number: int, width: int) -> Tensor:
    """What a generator network begins with."""
    return torch.randn(ROWS, width, generator=seeded(500 + number))
