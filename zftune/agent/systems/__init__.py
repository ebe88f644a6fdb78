"""What the agent knows of particular systems: DeepSpeed, torch.distributed, the Trainer, this package's runtime."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from zftune.agent.systems import collectives, deepspeed, runtime

if TYPE_CHECKING:
    from torch import nn

    from zftune.agent.session import Session

__all__ = ["deepspeed_settings", "install", "knobs", "module_of", "optimizer_name", "systems"]


def install(session: Session, when_imported: Callable[[str, Callable[[Any], None]], None]) -> None:
    """Hook what is there, and what will be once it is imported."""
    when_imported("torch.distributed.distributed_c10d", lambda module: collectives.hook(session, module))
    when_imported("transformers.trainer", lambda module: _hook_trainer(session, module))
    deepspeed.watch(session, when_imported)


def _hook_trainer(session: Session, module: Any) -> None:
    """Notice the Trainer, which divides each pass's loss by what all passes of a step have: passes or tokens."""

    def hooked(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            session.sums_losses = True
            return original(*args, **kwargs)

        return training_step

    session.patches.replace(module.Trainer, "training_step", hooked)


def module_of(of: Any) -> nn.Module | None:
    """The model, where whoever makes the steps knows it."""
    return deepspeed.module_of(of)


def optimizer_name(of: Any) -> str:
    """The class of the optimizer that does the work."""
    return type(deepspeed.optimizer_of(of)).__name__


def knobs(of: Any) -> dict[str, Any] | None:
    """The knobs of this package's runtime, as they are now; None for any other optimizer."""
    return runtime.knobs(of)


def deepspeed_settings(of: Any) -> dict[str, Any] | None:
    """What an engine of DeepSpeed runs with; None for anything else."""
    return deepspeed.settings(of)


def systems(of: Any, module: nn.Module | None) -> list[str]:
    """The systems that take part, a sentence's worth each."""
    return [*deepspeed.describe(of), *runtime.describe(of), *collectives.describe(module)]
