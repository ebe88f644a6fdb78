"""The gradient ledger: that no gradient is lost, shown by exact sums (invariant I4).

The mass of a gradient is the sum of its elements' bit patterns as integers, modulo 2^64. It does not depend on order or
rounding, so what was produced equals what was applied plus what is pending to the last bit, or something was lost.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from zenflow.host.tasks import Update

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_MODULUS = 1 << 64


@dataclass(frozen=True, slots=True)
class Balance:
    """One parameter's account: masses of its gradients, from 0 to 2^64 - 1."""

    produced: int
    """Of every step that was not skipped."""
    applied: int
    """Those that have reached the masters."""
    pending: int
    """Those that are logged."""

    @property
    def balanced(self) -> bool:
        """Whether nothing was lost and nothing was applied twice."""
        return (self.produced - self.applied - self.pending) % _MODULUS == 0


def mass(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's mass, 0-dim int64 on its device."""
    return tensor.contiguous().view(_WORDS[tensor.element_size()]).sum(dtype=torch.int64)


class Ledger:
    """Counts masses by weight. The host's part is counted by the engine's thread, the rest by the training thread."""

    def __init__(self) -> None:
        self._produced: dict[str, torch.Tensor] = {}
        self._applied: dict[str, torch.Tensor] = {}
        self._on_host: Counter[str] = Counter()
        self._lock = threading.Lock()

    def produce(self, name: str, found: torch.Tensor, skip: torch.Tensor | None) -> None:
        """Count a parameter's gradient by its mass."""
        _add(self._produced, name, found, skip)

    def apply(self, name: str, gradient: torch.Tensor, skip: torch.Tensor | None) -> None:
        """Count the gradient of columns that were updated on the device."""
        _add(self._applied, name, mass(gradient), skip)

    def apply_on_host(self, name: str, task: Update) -> None:
        """Count the gradients that a task of the host has applied; called when it is done."""
        rows = task.columns.state.master.shape[1]
        found = 0
        for part in task.parts:
            for entry, index in part.entries:
                if entry.live()[1]:
                    matrix = torch.cat(entry.gradient.pieces()).view(-1, rows)
                    found += int(mass(matrix[: len(part.slots)] if index is None else matrix[index]))
        with self._lock:
            self._on_host[name] += found

    def balance(self, name: str, pending: int) -> Balance:
        """A parameter's account, where `pending` is the mass of its logged gradients; waits for the device."""
        produced, applied = self.totals(name)
        return Balance(produced, applied, pending % _MODULUS)

    def totals(self, name: str) -> tuple[int, int]:
        """Produced and applied so far."""
        zero = torch.zeros((), dtype=torch.int64, device="cpu")
        with self._lock:
            on_host = self._on_host[name]
        produced, applied = (int(sums.get(name, zero)) for sums in (self._produced, self._applied))
        return produced % _MODULUS, (applied + on_host) % _MODULUS

    def restore(self, totals: Mapping[str, tuple[int, int]], device: torch.device) -> None:
        """Go on from saved totals."""
        for name, (produced, applied) in totals.items():
            self._produced[name] = torch.tensor(_signed(produced), device=device)
            self._applied[name] = torch.tensor(_signed(applied), device=device)


def _add(sums: dict[str, torch.Tensor], name: str, found: torch.Tensor, skip: torch.Tensor | None) -> None:
    if skip is not None:
        found = torch.where(skip, torch.zeros_like(found), found)
    sums[name] = found if name not in sums else sums[name] + found


def _signed(value: int) -> int:
    return value - _MODULUS if value >= _MODULUS // 2 else value
