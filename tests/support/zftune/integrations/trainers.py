"""A model, data and a Trainer that are small enough for many runs in a second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from zenflow import ZenFlowConfig

VOCABULARY, LENGTH = 64, 16
EXACT = ZenFlowConfig(update_interval=1, overlap_step=False, topk_ratio=0.25, host_threads=1)
"""AdamW's own weights."""
LATE = ZenFlowConfig(update_interval=4, topk_ratio=0.25, select_interval=4, host_threads=1)
"""Something is pending at nearly every step."""

Maker = Callable[[nn.Module, Any], torch.optim.Optimizer]


class Tokens(Dataset[dict[str, Tensor]]):
    def __init__(self, number: int = 64) -> None:
        self.ids = torch.randint(VOCABULARY, (number, LENGTH), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def tiny_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """A Llama of 14 thousand parameters, always the same."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
    )
    return LlamaForCausalLM(config).to(dtype)  # type: ignore[no-any-return]


def arguments(folder: Path, **more: Any) -> Any:
    """TrainingArguments: 10 steps with warm-up, decay and clipping, a log entry each."""
    return TrainingArguments(
        **{
            "output_dir": str(folder),
            "max_steps": 10,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-2,
            "weight_decay": 0.1,
            "warmup_steps": 2,
            "max_grad_norm": 0.5,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            **more,
        }
    )


def trainer(
    folder: Path,
    make: Maker | None,
    *,
    dtype: torch.dtype = torch.float32,
    callbacks: Sequence[Any] = (),
    pretrained: Path | None = None,
    **more: Any,
) -> Any:
    """A Trainer; with no `make` it makes its own AdamW. A folder holds a model that is loaded as scripts do."""
    args = arguments(folder, **more)  # first: with DeepSpeed they say how a model is loaded
    model = tiny_model(dtype) if pretrained is None else LlamaForCausalLM.from_pretrained(pretrained)
    return Trainer(
        model=model,
        args=args,
        train_dataset=Tokens(),
        eval_dataset=Tokens(8),
        optimizers=(None if make is None else make(model, args), None),
        callbacks=list(callbacks),
    )


def trained(folder: Path, make: Maker | None, **more: Any) -> Any:
    made = trainer(folder, make, **more)
    made.train()
    return made


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def furthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one)


class Masters(torch.optim.AdamW):
    """torch's AdamW on fp32 masters of weights in half precision."""

    def __init__(self, params: Any, **hyper: Any) -> None:
        self.of: dict[nn.Parameter, nn.Parameter] = {}
        super().__init__(params, **hyper)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.of[parameter] = nn.Parameter(parameter.detach().float().clone())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        groups = [list(group["params"]) for group in self.param_groups]
        for group, parameters in zip(self.param_groups, groups, strict=True):
            for parameter in parameters:
                self.of[parameter].grad = None if parameter.grad is None else parameter.grad.float()
            group["params"] = [self.of[parameter] for parameter in parameters]
        super().step()
        for group, parameters in zip(self.param_groups, groups, strict=True):
            group["params"] = parameters
            for parameter in parameters:
                parameter.copy_(self.of[parameter])
