"""Weights that somebody else writes to: torch's copy-on-write notices it, and costs nothing until it happens."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import nn

from zenflow.kernels.base import address_of, addresses_of

# A tensor's own, and that of the Python object by which it is asked.
_OWN_HOLDERS = 2


def shares_memory(tensor: torch.Tensor) -> bool:
    """Whether another tensor uses its memory: a detached copy, a view, a NumPy array."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) > _OWN_HOLDERS


def has_other_holders(parameter: nn.Parameter) -> bool:
    """Whether somebody besides this tensor uses its memory: another tensor, or who holds its storage."""
    return shares_memory(parameter) or storage_is_held(parameter)


def storage_is_held(tensor: torch.Tensor) -> bool:
    """Whether somebody holds the Python object of a tensor's storage, which is one for all who ask."""
    return _references(tensor) > _references_of_new()


def _references(tensor: torch.Tensor) -> int:
    return sys.getrefcount(tensor.untyped_storage())


@functools.cache
def _references_of_new() -> int:
    """Those of a storage that nobody holds: torch's releases differ in whether it keeps its Python object itself."""
    return _references(torch.empty(1, dtype=torch.uint8, device="cpu"))


class WriteWatch:
    """Notices that a parameter's memory is written to or replaced, by whatever way.

    The memory is shared with a lazy clone. Whoever asks torch for memory to write to (an operation in place on the
    parameter, on `data`, on a view or a detached copy of it; a kernel of an extension; NumPy) makes it unshared first,
    and the clone keeps the old values. That somebody asked does not say that he wrote.

    Memory that torch cannot share lazily, and memory of the CPU that somebody may have had a pointer to before, is
    copied; on another device writes through such a pointer are not noticed.

    On a GPU, kernels that ask for a pointer to write to though they only read (as Triton's launchers do) would make a
    weight look written, so that it is copied where it is kept, and compared. The training of a plain decoder that was
    measured on an H200 has no such copy, and a lazy clone takes 1.3 us a weight. Some of torch's kernels in Python
    (`rms_norm`) leave lazy clones to its older ones.
    """

    __slots__ = ("_address", "_before", "_copy", "_kept", "_parameter", "_storage", "_version", "_way")

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        self._storage: int | None = None  # None: not watching
        self._address = 0
        self._way: Literal["shared", "copied", "counted"] = "counted"
        self._version = 0
        self._before: torch.Tensor | None = None
        self._copy: torch.Tensor | None = None  # memory for the next one: new pages cost more than the copy
        self._kept = False

    def begin(self, *, keep: bool) -> bool:
        """Notice writes from now on; `keep` what the parameter holds, which takes memory once somebody writes.

        Returns whether its memory was shared and still is, so that `Unwritten` can look at it.
        """
        parameter = self._parameter
        if self.is_shared and not self.written():  # we wrote by its address alone
            self._before = _lazy_clone(parameter.detach()) if keep else None
            self._kept = keep
            return True
        on_cpu = parameter.device.type == "cpu"
        pointed_at = on_cpu and has_other_holders(parameter)
        self._storage, self._version = parameter.untyped_storage()._cdata, parameter._version
        self._address = address_of(parameter)
        values = parameter.detach()
        self._before = None if pointed_at else _lazy_clone(values)
        self._way = "counted" if self._before is None else "shared"
        if self._before is None and on_cpu:
            self._before, self._way = self._copied(values), "copied"
        else:
            self._copy = None
            if keep and self._before is None:
                self._before = values.clone()
        self._kept = keep and self._before is not None
        if not keep and self._way == "shared":
            self._before = None  # the memory stays marked, and the first write costs nothing
        return False

    @property
    def is_shared(self) -> bool:
        """Whether it is noticed by shared memory, or was until somebody wrote."""
        return self._storage is not None and self._way == "shared"

    @property
    def is_kept(self) -> bool:
        """Whether what the parameter holds is kept in its own memory, where kernels that write by address change it."""
        return self._kept and self._before is not None and self._way == "shared"

    def pause(self) -> bool:
        """Keep nothing more if nobody has written, before we write ourselves; whether that is so.

        Memory that is shared stays so, and `begin` goes on with it if kernels have written by its address alone.
        """
        if not self.is_shared or self.written():
            return False
        self._before = None
        return True

    def written(self) -> bool:
        """Whether somebody may have written since `begin`."""
        parameter = self._parameter
        if self._storage is None:
            return False
        if self._way == "shared":
            return address_of(parameter) != self._address or not torch._C._is_cow_tensor(parameter)  # type: ignore[attr-defined]
        if parameter.untyped_storage()._cdata != self._storage:
            return True
        if self._way == "copied":
            assert self._before is not None
            return not _same(self._before, parameter.detach())
        return parameter._version != self._version

    def differs(self) -> bool | None:
        """Whether the parameter holds something else than at `begin`; None: nothing was kept. Waits for the device."""
        return None if self._before is None else not torch.equal(self._before, self._parameter.detach())

    def end(self) -> torch.Tensor | None:
        """Notice nothing more, before we write ourselves; what the parameter held at `begin`, if to be kept."""
        before = self._before if self._kept else None
        self._storage = self._before = None
        return before

    def _copied(self, values: torch.Tensor) -> torch.Tensor:
        last = self._copy
        if last is None or (last.shape, last.dtype, last.stride()) != (values.shape, values.dtype, values.stride()):
            self._copy = values.clone()
            return self._copy
        return last.copy_(values)


class Unwritten:
    """Watches of shared memory that are looked at together."""

    def __init__(self, watches: Sequence[WriteWatch]) -> None:
        self._watches = watches
        self._parameters = [watch._parameter for watch in watches]
        self._addresses = addresses_of(self._parameters)
        self._shapes = [parameter.shape for parameter in self._parameters]

    def holds(self) -> bool:
        """Whether all are watched, and nobody has written to any since, or given it other memory."""
        return (
            addresses_of(self._parameters) == self._addresses
            and all(map(torch._C._is_cow_tensor, self._parameters))  # type: ignore[attr-defined]
            and [parameter.shape for parameter in self._parameters] == self._shapes
            and None not in [watch._storage for watch in self._watches]
        )


def _same(before: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether two tensors of the same shape on the CPU are equal to the bit."""
    if not (before.is_contiguous() and values.is_contiguous()) or before.shape != values.shape or not values.dim():
        return torch.equal(before, values)
    words = torch.int64 if values.nbytes % 8 == 0 else torch.uint8
    # torch compares element by element, which takes ten times as long in bfloat16.
    one, other = (part.reshape(-1).view(words).numpy() for part in (before, values))
    return bool(np.array_equal(one, other))


def _lazy_clone(values: torch.Tensor) -> torch.Tensor | None:
    """A clone that is not made before somebody writes; None where this memory allows none."""
    try:
        return values._lazy_clone()
    except RuntimeError:  # mapped files, memory of other processes, of NumPy
        return None
