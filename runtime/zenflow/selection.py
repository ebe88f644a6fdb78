"""Which columns matter: the top columns, and what changes when the selection does."""

from __future__ import annotations

from dataclasses import dataclass

import torch


def ranked(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns by falling score; ties go to the lower index.

    Args:
        scores: [columns], fp32, all finite.

    Returns:
        Their scores, [columns] fp32, and their indices, [columns] int64, on the device of `scores`.
    """
    values, indices = torch.sort(scores, descending=True, stable=True)
    return values, indices


def top_columns(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` greatest scores, as `ranked` has them; non-finite scores count as 0.

    Args:
        scores: [columns], fp32.
        count: number of columns to take.

    Returns:
        [count], int64, in order of falling score, on the device of `scores`.
    """
    return ranked(torch.nan_to_num(scores, nan=0.0, posinf=0.0, neginf=0.0))[1][:count]


@dataclass(frozen=True, slots=True)
class SelectionChange:
    """A change of selection: pair i swaps the deferred column in `slots[i]` with the selected one in `places[i]`."""

    slots: torch.Tensor
    """[n] int64: host slots whose columns become selected."""
    places: torch.Tensor
    """[n] int64: positions of the selected state whose columns become deferred."""
    to_selected: torch.Tensor
    """[n] int64: the columns that become selected."""
    to_deferred: torch.Tensor
    """[n] int64: the columns that become deferred."""


def plan_move(selected: torch.Tensor, slot_columns: torch.Tensor, wanted: torch.Tensor) -> SelectionChange | None:
    """Pair the columns that change tier, each side in ascending order, so that every state has one free place to go.

    Args:
        selected: [n_sel] int64, the selected columns in state order.
        slot_columns: [n_def] int64, the deferred column in each host slot.
        wanted: [n_sel] int64, the new selection in any order.

    Returns:
        The move, or None where nothing changes. All tensors on the CPU.
    """
    if not len(selected):
        return None
    is_wanted = torch.zeros(int(torch.cat([selected, slot_columns]).max()) + 1, dtype=torch.bool, device="cpu")
    is_wanted[wanted] = True  # a table: `torch.isin` sorts
    places = (~is_wanted[selected]).nonzero().squeeze(1)
    if not len(places):
        return None
    slots = is_wanted[slot_columns].nonzero().squeeze(1)
    places = places[torch.argsort(selected[places])]
    slots = slots[torch.argsort(slot_columns[slots])]
    return SelectionChange(slots, places, slot_columns[slots], selected[places])
