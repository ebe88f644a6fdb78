"""What the agent knows of particular systems: DeepSpeed, torch.distributed, this package's runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from zftune.integrations import collectives, runtime, wrappers
from zftune.integrations.deepspeed import watching

if TYPE_CHECKING:
    from torch import nn

    from zftune.agent.session import Session

__all__ = ["deepspeed_settings", "install", "knobs", "module_of", "optimizer_name", "systems"]


def install(session: Session, when_imported: Callable[[str, Callable[[Any], None]], None]) -> None:
    """Hook what is there, and what will be once it is imported."""
    when_imported("torch.distributed.distributed_c10d", lambda module: collectives.hook(session, module))
    watching.watch(session, when_imported)


def module_of(of: Any) -> nn.Module | None:
    """The model, where whoever makes the steps knows it."""
    return watching.module_of(of)


def optimizer_name(of: Any) -> str:
    """The class of the optimizer that does the work."""
    return type(watching.optimizer_of(of)).__name__


def knobs(of: Any) -> dict[str, Any] | None:
    """The knobs of this package's runtime, as they are now; None for any other optimizer."""
    return runtime.knobs(of)


def deepspeed_settings(of: Any) -> dict[str, Any] | None:
    """What an engine of DeepSpeed runs with; None for anything else."""
    return watching.settings(of)


def systems(of: Any, module: nn.Module | None) -> list[str]:
    """The systems that take part, a sentence's worth each."""
    return [*watching.describe(of), *runtime.describe(of), *wrappers.describe(module)]
