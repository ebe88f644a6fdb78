"""The optimizers: torch's own arguments, an update rule, and `zenflow`'s split of its state."""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

from torch import nn

from zenflow.config import ZenFlowConfig
from zenflow.device import Device
from zenflow.optimizer import ZenFlowOptimizer
from zenflow.partition import Partition
from zenflow.rules import RULES
from zenflow.rules.base import NOT_HERE, check_flag


class Options(TypedDict, total=False):
    """Keyword arguments of all optimizers besides their hyperparameters."""

    config: ZenFlowConfig | None
    module: nn.Module | None
    device: Device | None
    partition: Partition | None
    foreach: bool | None
    fused: bool | None
    capturable: bool
    maximize: bool
    differentiable: bool


def _own(options: Options) -> dict[str, Any]:
    """Those that are not torch's, of which some are refused."""
    for name, why in NOT_HERE.items():
        check_flag(options, name, allowed=False, why=why)
    theirs = {"foreach", "fused", "capturable", *NOT_HERE}
    return {name: value for name, value in options.items() if name not in theirs}


class ZenFlowAdamW(ZenFlowOptimizer):
    """AdamW (Loshchilov and Hutter 2019), as `torch.optim.AdamW`.

    Args:
        params: parameters or parameter groups, fp32, bf16 or fp16, all on one device.
        betas: decay rates of the two moments.
        eps: added to the denominator.
        weight_decay: decoupled weight decay.
        amsgrad: refused where true, as are `maximize` and `differentiable`.
        options: `config`, `module`, `device` and `partition` of `ZenFlowOptimizer`; torch's `foreach`, `fused` and
            `capturable` have no effect.

    Raises:
        ConfigError: a hyperparameter or knob is not allowed.
        UnsupportedError: a parameter's dtype or device.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **options: Unpack[Options],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        super().__init__(params, defaults, RULES["adamw"], **_own(options))


class ZenFlowAdam(ZenFlowOptimizer):
    """Adam (Kingma and Ba 2015) with weight decay in the gradient, as `torch.optim.Adam`.

    Args and errors as `ZenFlowAdamW`, with `weight_decay` an L2 penalty.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        **options: Unpack[Options],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        super().__init__(params, defaults, RULES["adam"], **_own(options))


class ZenFlowAdagrad(ZenFlowOptimizer):
    """Adagrad (Duchi et al. 2011), as `torch.optim.Adagrad`.

    Args and errors as `ZenFlowAdamW`, but for:

    Args:
        lr_decay: the learning rate is divided by 1 + (n - 1) * lr_decay at a column's n-th update.
        weight_decay: an L2 penalty.
        initial_accumulator_value: what the sum of squares starts with. A group may set its own (torch, which takes one
            too, uses the constructor's).
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        **options: Unpack[Options],
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
        }
        super().__init__(params, defaults, RULES["adagrad"], **_own(options))


class ZenFlowLion(ZenFlowOptimizer):
    """Lion (Chen et al. 2023, Algorithm 2).

    Args and errors as `ZenFlowAdamW`, but for:

    Args:
        betas: weight of the momentum in the update, and its decay rate.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, defaults, RULES["lion"], **_own(options))


class ZenFlowSGD(ZenFlowOptimizer):
    """SGD with momentum, as `torch.optim.SGD`.

    Args and errors as `ZenFlowAdamW`, but for:

    Args:
        momentum: decay rate of the momentum; at 0 none is kept.
        dampening: share of a gradient that the momentum leaves out.
        weight_decay: an L2 penalty.
        nesterov: Nesterov momentum.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **options: Unpack[Options],
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults, RULES["sgd"], **_own(options))
