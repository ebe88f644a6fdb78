"""What `optimizer.state[parameter]` holds: moments under torch's names, gathered when they are asked for."""

from __future__ import annotations

import weakref
from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zenflow.errors import ZenFlowError
from zenflow.full_state import MASTER, STEP

if TYPE_CHECKING:
    from zenflow.optimizer import ZenFlowOptimizer


class StateView:
    """A mapping of "step" and the rule's moments to copies on the parameter's device; it holds nothing itself.

    Copies and pickles of it are plain dictionaries. It is no `Mapping` by type: Lightning and Accelerate rebuild what
    is one, tensor by tensor, and would keep all of the state on the device.

    Args:
        optimizer: whose state it is.
        parameter: one of the optimizer's.
        moment_names: the rule's.
    """

    __slots__ = ("_names", "_optimizer", "_parameter")

    def __init__(self, optimizer: ZenFlowOptimizer, parameter: nn.Parameter, moment_names: tuple[str, ...]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._parameter = parameter
        self._names = (STEP, *moment_names)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._gathered()[name]

    def __setitem__(self, name: str, value: torch.Tensor) -> None:
        """Set a moment, as `ZenFlowOptimizer.set_full_state`."""
        self._owner().set_full_state(self._parameter, name, value)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __repr__(self) -> str:
        return f"StateView({', '.join(self._names)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self._gathered(),)

    def get(self, name: str, default: Any = None) -> Any:
        """The tensor, or `default` where the rule has none of that name."""
        return self[name] if name in self._names else default

    def keys(self) -> KeysView[str]:
        """The names; gathers nothing."""
        return dict.fromkeys(self._names).keys()

    def values(self) -> ValuesView[torch.Tensor]:
        """The tensors."""
        return self._gathered().values()

    def items(self) -> ItemsView[str, torch.Tensor]:
        """Names and tensors."""
        return self._gathered().items()

    def _gathered(self) -> dict[str, torch.Tensor]:
        found = self._owner().full_state(self._parameter)
        del found[MASTER]
        return {
            name: found[name] if name == STEP else found[name].to(self._parameter.device)  # as torch has them
            for name in self._names
        }

    def _owner(self) -> ZenFlowOptimizer:
        optimizer = self._optimizer()
        if optimizer is None:
            raise ZenFlowError("the state of an optimizer that is gone was requested")
        return optimizer
