"""torch.distributed: calls that wait for other ranks are waits of the cause `comm`; and which wrappers a module has."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from zftune.agent.session import Session


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


CALLS = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)


def hook(session: Session, module: Any) -> None:
    """Hook the functions, under both names that they have, and the wait for an asynchronous one.

    What C++ does on its own, as DistributedDataParallel's reducer inside backward, is not seen.
    """
    import torch

    from zftune.agent.hooks import waiting

    for name in CALLS:
        if session.patches.replace(module, name, functools.partial(waiting, session, "comm")):
            session.patches.replace(torch.distributed, name, functools.partial(_same, getattr(module, name)))
    session.patches.replace(module.Work, "wait", functools.partial(waiting, session, "comm"))


def _same(wrapper: Any, _original: Any) -> Any:
    return wrapper
