"""A rule's hyperparameters as the Triton kernels take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zenflow.rules import Hyper, SGDHyper
from zenflow.rules.adaptive import AdagradHyper, AdamHyper, AdamWHyper
from zenflow.rules.base import root
from zenflow.rules.momentum import LionHyper


@dataclass(frozen=True, slots=True)
class RuleNumbers:
    """One update's scalars as `update_columns` takes them; see there."""

    kind: str
    scalars: tuple[float, ...]
    """lr, decay, weight_decay, eps, mix1, mix2, keep."""
    l2: bool = False
    nesterov: bool = False
    per_column: tuple[Any, ...] = ()
    """What depends on a column's update count, for `per_count`."""


def rule_numbers(hyper: Hyper) -> RuleNumbers | None:
    """What the kernel takes for a rule's hyperparameters; None for a rule that it does not know."""
    lr = hyper.lr
    if isinstance(hyper, (AdamWHyper, AdamHyper)):
        beta1, beta2 = hyper.beta1, hyper.beta2
        return RuleNumbers(
            "adam",
            (0.0, hyper.decay, hyper.weight_decay, hyper.eps, 1 - beta1, 1 - beta2, beta2),
            l2=isinstance(hyper, AdamHyper) and hyper.weight_decay != 0,
            per_column=(lambda c: lr / (1 - beta1**c), lambda c: 1 / root(1 - beta2**c)),
        )
    if isinstance(hyper, AdagradHyper):
        lr_decay = hyper.lr_decay
        return RuleNumbers(
            "adagrad",
            (0.0, 1.0, hyper.weight_decay, hyper.eps, 0.0, 0.0, 0.0),
            l2=hyper.weight_decay != 0,
            per_column=(lambda c: lr / (1 + (c - 1) * lr_decay),),
        )
    if isinstance(hyper, LionHyper):
        return RuleNumbers("lion", (lr, hyper.decay, 0.0, 0.0, 1 - hyper.beta1, 1 - hyper.beta2, 0.0))
    if isinstance(hyper, SGDHyper):
        return RuleNumbers(
            "sgd",
            (lr, 1.0, hyper.weight_decay, 0.0, 1 - hyper.dampening, 0.0, hyper.momentum),
            l2=hyper.weight_decay != 0,
            nesterov=hyper.nesterov,
        )
    return None
