"""Tensors of the simulated CUDA device, and what torch's operations on them launch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tests.support.zenflow.simulated_order import DEVICE, Block, Stream, running


class SimulatedTensor(torch.Tensor):
    """A tensor of the device; `held` is what it holds so far, on the CPU."""

    held: torch.Tensor
    block: Block

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> SimulatedTensor:
        made: SimulatedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=DEVICE,
        )
        made.held, made.block = inner, running().block_of(inner)
        return made

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"SimulatedTensor({tuple(self.shape)}, {self.dtype})"

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:  # saved as torch saves tensors of a backend
        return restored, (self.detach().cpu(), self.requires_grad)

    def __getitem__(self, key: Any) -> torch.Tensor:
        return super().__getitem__(_indices(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(_indices(key), value)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def const_data_ptr(self) -> int:
        return int(self.held.const_data_ptr())  # type: ignore[attr-defined]

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        self.block.recorded.add(stream.number)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return running().run(operation, args, kwargs or {})


def _indices(key: Any) -> Any:
    """Lists as tensors, which torch would make of them in a way that no Python backend can follow."""
    if isinstance(key, tuple):
        return tuple(_indices(one) for one in key)
    return torch.tensor(key, dtype=None if key else torch.int64) if isinstance(key, list) else key


def restored(values: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return values.to(DEVICE).requires_grad_(requires_grad)


def leaves(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from leaves(one)
    elif isinstance(value, dict):
        yield from leaves(list(value.values()))


def inner_of(value: Any) -> Any:
    """Arguments with what the tensors hold, and the CPU as the device."""
    if isinstance(value, SimulatedTensor):
        return value.held
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == DEVICE.type else value
    if isinstance(value, (list, tuple)):
        return type(value)(inner_of(one) for one in value)
    if isinstance(value, dict):
        return {key: inner_of(one) for key, one in value.items()}
    return value


WAIT = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "_unique2", "unique_dim", "masked_select"}
"""Operations whose result the host needs."""
_NO_KERNEL = {"_lazy_clone", "lift_fresh", "is_pinned", "set_", "_unsafe_view", "detach", "resize_"}
_TENSORS_A_LAUNCH = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
"""That torch's foreach kernels take at most, by the number of their lists."""


def outcome_of(operation: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operation gives, or writes, on the CPU."""
    if name == "sqrt" and args[0].dtype == torch.float32:  # CUDA's is the nearest number, MKL's need not be
        with np.errstate(invalid="ignore"):
            return torch.from_numpy(np.asarray(np.sqrt(args[0].numpy())))
    return operation(*args, **kwargs)


def launches_nothing(operation: Any, name: str) -> bool:
    """Whether it gives a view, or memory that nothing has written yet."""
    returns = operation._schema.returns
    views = bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write
    return views or name in _NO_KERNEL or name.startswith(("empty", "new_empty"))


def launches_of(name: str, args: Sequence[Any]) -> int:
    """Kernels of one operation: of a foreach one, as many as its lists need."""
    lists = [one for one in args if isinstance(one, (list, tuple)) and one and isinstance(one[0], torch.Tensor)]
    if not name.startswith(("_foreach", "_fused")) or not lists:
        return 1
    count = len(lists) + (not name.endswith("_"))
    return math.ceil(len(lists[0]) / _TENSORS_A_LAUNCH[min(count, max(_TENSORS_A_LAUNCH))])


def written_by(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[int]:
    """Of the blocks that an operation writes, their ids."""
    declared = operation._schema.arguments
    values = [args[at] if at < len(args) else kwargs.get(one.name) for at, one in enumerate(declared)]
    return {
        id(tensor.block)
        for one, value in zip(declared, values, strict=True)
        if one.alias_info is not None and one.alias_info.is_write
        for tensor in leaves(value)
        if isinstance(tensor, SimulatedTensor)
    }


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = (each.clone(memory_format=torch.contiguous_format).view(-1) for each in (one, other))
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))
