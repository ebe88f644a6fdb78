"""What is wrapped around a model, for many devices or for the compiler."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

_NAMES = {
    "DistributedDataParallel": "DistributedDataParallel",
    "DataParallel": "DataParallel",
    "FullyShardedDataParallel": "FSDP",
    "FSDPModule": "FSDP2",  # what fully_shard() makes of a module's class
    "OptimizedModule": "torch.compile",
    "PeftModel": "PEFT",
}


def describe(module: nn.Module | None) -> list[str]:
    """Their names, from the outside inwards."""
    found: list[str] = []
    while module is not None:
        names = {base.__name__ for base in type(module).__mro__}
        found += [text for name, text in _NAMES.items() if name in names]
        inner = vars(module).get("_modules", {})
        module = inner.get("module") or inner.get("_orig_mod")
    return found
