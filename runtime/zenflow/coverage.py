"""Coverage for every `topk_ratio` at once: the share of gradient energy that the most important columns hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zenflow.layout import selected_columns


@dataclass(frozen=True, slots=True)
class CoverageCurve:
    """What an ideal selection of a step would have covered, for every `topk_ratio`."""

    cumulative: tuple[torch.Tensor, ...]
    """Of each weight, [offloaded columns] fp32: energy of its 1, 2, ... most important columns together."""

    @classmethod
    def of(cls, joined: torch.Tensor, columns: Sequence[int]) -> CoverageCurve:
        """From the weights' sums behind each other.

        Args:
            joined: [sum of columns] fp32 on the CPU.
            columns: how many of them each weight has.
        """
        return cls(joined.split(list(columns)))

    def at(self, topk_ratio: float) -> float | None:
        """Share of the energy that is in the top columns of each weight, 0 to 1; None where there is no energy.

        Args:
            topk_ratio: k, from 0 to 1.
        """
        total = sum(float(sums[-1]) for sums in self.cumulative)
        if not total > 0:
            return None
        counts = [selected_columns(len(sums), topk_ratio) for sums in self.cumulative]
        covered = sum(float(sums[count - 1]) for sums, count in zip(self.cumulative, counts, strict=True) if count)
        return covered / total
