"""One cell in this process: a real DeepSpeed engine beside torch's AdamW on the same model and data."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from compatibility.cells import DECAY, LR, Cell

WIDTH, ROWS = 24, 4
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Weights = dict[str, Tensor]


class Net(nn.Module):
    """A small network; its kind says what is unusual about it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        if kind == "unused":
            self.unused = nn.Linear(5, 3)
        self.first = nn.Linear(WIDTH, 40)
        self.norm = nn.LayerNorm(40)
        self.last = nn.Linear(40, WIDTH)
        if kind == "tied":
            self.again = nn.Linear(WIDTH, 40, bias=False)
            self.again.weight = self.first.weight
        if kind == "frozen":
            self.norm.weight.requires_grad_(False)
            self.first.bias.requires_grad_(False)
        if kind == "convolution":
            self.convolution = nn.Conv2d(1, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if hasattr(self, "again"):
            hidden = hidden + self.again(x.flip(1))
        y = self.last(self.norm(torch.tanh(hidden)))
        if hasattr(self, "convolution"):
            y = y + self.convolution(x.view(-1, 1, 4, 6)).mean(1).flatten(1)
        return y  # type: ignore[no-any-return]


def make_model(kind: str) -> Net:
    """With weights that bf16 can hold, so that every side begins with the same masters."""
    torch.manual_seed(3)
    model = Net(kind)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


def make_model_under_init(cell: Cell, rank: int) -> Net:
    """The same, each rank with its part, filled by the first one.

    Args:
        cell: whose model it is.
        rank: of this process.
    """
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path=cell.config):
        model = Net(cell.model)
    whole = make_model(cell.model).state_dict()
    for name, parameter in model.named_parameters():  # one by one: of several, DeepSpeed waits for the last alone
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if rank == 0:
                parameter.data.copy_(whole[name])
    return model


def loss_of(model: Any, number: int, part: slice, dtype: torch.dtype) -> Tensor:
    """Of the batch with this number, or a part of it."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 + number))[part]
    loss: Tensor = (model(x.to(dtype)).float() - x).square().mean()
    return loss


def spike(cell: Cell, step: int) -> float:
    """What a step's loss is multiplied by: clipped or not shows only where gradients differ in size."""
    return 30.0 if cell.spikes and step % 4 == 2 else 1.0


def decay(step: int) -> float:
    """The learning rate's factor, where the script schedules it."""
    return 1.0 / (1.0 + 0.3 * step)


def groups_of(cell: Cell, model: nn.Module) -> list[dict[str, Any]]:
    """As the script passes them: one, or two that differ in weight decay and learning rate."""
    if not cell.groups:
        return [{"params": list(model.parameters())}]
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    return [
        {"params": matrices, "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0, "lr": LR / 2},
    ]


def arguments(cell: Cell, model: nn.Module) -> dict[str, Any]:
    """Of `deepspeed.initialize`, but for the ds_config."""
    groups = groups_of(cell, model)
    given: dict[str, Any] = {"model_parameters": groups if cell.groups else groups[0]["params"]}
    if cell.optimizer == "instance":
        given = {"optimizer": torch.optim.AdamW(groups, lr=LR, weight_decay=DECAY)}
    elif cell.optimizer == "callable":
        given["optimizer"] = lambda parameters: torch.optim.AdamW(parameters, lr=LR, weight_decay=DECAY)
    if cell.scheduler == "callable":
        given["lr_scheduler"] = lambda optimizer: LambdaLR(optimizer, decay)
    elif cell.scheduler == "instance":
        given["lr_scheduler"] = LambdaLR(given["optimizer"], decay)
    return given


def weights_of(model: nn.Module) -> Weights:
    """What a script would save, in fp32, also where ZeRO-3 keeps them elsewhere."""
    parameters = list(model.parameters())
    if any(hasattr(parameter, "ds_id") for parameter in parameters):
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters(parameters):
            return _copies(model)
    return _copies(model)


def held(model: nn.Module) -> float:
    """Which share of its elements this rank has between steps, where ZeRO-3 or FSDP2 has cut them up too."""
    own = total = 0
    for parameter in model.parameters():
        if hasattr(parameter, "to_local"):
            here = parameter.to_local().numel()
        else:  # of ZeRO's, either the whole or its part is there
            here = parameter.numel() or parameter.ds_tensor.numel()
        own, total = own + here, total + int(getattr(parameter, "ds_numel", parameter.numel()))
    return own / total


def _copies(model: nn.Module) -> Weights:
    return {name: value.detach().float().clone() for name, value in model.state_dict().items()}


class Run:
    """A training by DeepSpeed's engine, as a script writes it.

    Args:
        cell: what to train.
        rank: of this process.
    """

    def __init__(self, cell: Cell, rank: int) -> None:
        import deepspeed

        self._cell = cell
        rows = ROWS // cell.ranks
        self._part = slice(rank * rows, (rank + 1) * rows)
        self.model = make_model_under_init(cell, rank) if cell.under_init else make_model(cell.model)
        self.engine, *_ = deepspeed.initialize(model=self.model, config=cell.config, **arguments(cell, self.model))

    def steps(self, first: int, last: int) -> list[float]:
        """The loss of each of these steps."""
        cell, losses = self._cell, []
        dtype = TORCH_DTYPES[cell.dtype]
        for step in range(first, last):
            total = 0.0
            for number in range(cell.passes):
                loss = loss_of(self.engine, cell.passes * step + number, self._part, dtype)
                self.engine.backward(loss * spike(cell, step))
                if cell.weights == "accessors":
                    set_gradients(self.model)
                self.engine.step()
                if cell.weights == "accessors":
                    set_state(self.model)
                total += loss.item() / cell.passes
            losses.append(total)
        return losses

    def weights(self, folder: Path) -> Weights:
        """As the script takes them, in fp32.

        Args:
            folder: for a checkpoint.
        """
        if self._cell.weights == "accessors":
            from deepspeed.utils import safe_get_full_fp32_param

            return {name: safe_get_full_fp32_param(one).clone() for name, one in self.model.named_parameters()}
        if self._cell.weights == "zero_to_fp32":
            from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

            self.engine.save_checkpoint(str(folder))
            with contextlib.redirect_stdout(sys.stderr):
                return {
                    name: one.float() for name, one in get_fp32_state_dict_from_zero_checkpoint(str(folder)).items()
                }
        return weights_of(self.model)


def set_gradients(model: nn.Module) -> None:
    """Every gradient to what it is."""
    from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

    for parameter in model.parameters():
        safe_set_full_grad(parameter, safe_get_full_grad(parameter).clone())


def set_state(model: nn.Module) -> None:
    """Every master and moment to what it is."""
    from deepspeed import utils

    for parameter in model.parameters():
        utils.safe_set_full_fp32_param(parameter, utils.safe_get_full_fp32_param(parameter))
        for key in ("exp_avg", "exp_avg_sq"):
            value = utils.safe_get_full_optimizer_state(parameter, key)
            utils.safe_set_full_optimizer_state(parameter, value, key)


def trained(cell: Cell, rank: int, folder: Path) -> dict[str, Any]:
    """Train a cell; its losses, its weights, and whether a resumed run went on as the first had.

    Args:
        cell: what to train.
        rank: of this process.
        folder: for checkpoints.
    """
    run = Run(cell, rank)
    half = cell.steps // 2
    losses = run.steps(0, half)
    if cell.resume:
        run.engine.save_checkpoint(str(folder), tag="half")
    after = run.steps(half, cell.steps)
    seen: dict[str, Any] = {"bitwise": None}
    if cell.resume:
        first, run = run, Run(cell, rank)
        run.engine.load_checkpoint(str(folder), tag="half")
        again = run.steps(half, cell.steps)
        before, now = weights_of(first.model), weights_of(run.model)
        seen["bitwise"] = again == after and all(torch.equal(before[name], now[name]) for name in now)
        after = again
    seen |= {
        "losses": losses + after,
        "held": held(run.model),
        "weights": run.weights(folder),
        "skipped": int(run.engine.skipped_steps),
    }
    return seen
