"""Zen-auto: windows that close when the deferred gradients have become as important as the selected ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from zenflow.config import AUTO_UPDATE_INTERVAL, ZenFlowConfig
from zenflow.device import Transfer
from zenflow.layout import WeightPlan
from zenflow.runtime import Runtime
from zenflow.sharded import whole_shape
from zenflow.weight import WeightState


class AutoInterval:
    """Decides, from sums over the open window, whether the next step closes it (Zen-auto, arXiv 2505.12242).

    For each weight that selects, from importance, unscaled: n counts its steps, `selected` and `deferred` sum the RMS
    of the gradient in the selected and the deferred columns. A weight agrees when `deferred >= selected / n`: what has
    gathered in the deferred columns has reached what the selected ones get in one step. RMS is per element, so the
    comparison means the same at every `topk_ratio`.
    """

    def __init__(self, runtime: Runtime, weights: Sequence[WeightState]) -> None:
        self._runtime = runtime
        self._weights = weights
        self._sums: torch.Tensor | None = None
        """[weights, 3] fp32 on the device: n, selected, deferred."""
        self._votes: tuple[torch.Tensor, Transfer] | None = None
        """[2] fp32 on its way to the host: weights that count, and those of them that agree."""

    def begin_window(self) -> None:
        """Forget the sums."""
        self._sums = self._votes = None

    def add(
        self,
        energies: Mapping[WeightState, torch.Tensor],
        grad_scale: torch.Tensor | None,
        skip: torch.Tensor | None,
    ) -> None:
        """Take in a step.

        Args:
            energies: [2] fp32 of each weight: of the selected and of all offloaded columns.
            grad_scale: what the loss was multiplied with.
            skip: 0-dim bool; where true the step does not count.
        """
        if not energies:
            return
        device = self._runtime.device.torch_device
        places = {weight: place for place, weight in enumerate(self._weights)}
        index = self._runtime.send_index(torch.tensor([places[weight] for weight in energies], device="cpu"))
        elements = torch.tensor(
            [[rows * plan.selected, rows * plan.deferred] for rows, plan in map(_whole_rows_and_plan, energies)],
            dtype=torch.float32,
            device="cpu",
        )
        both = torch.stack(list(energies.values()))
        parts = torch.stack([both[:, 0], (both[:, 1] - both[:, 0]).clamp(min=0)], dim=1)
        rms = (parts / self._runtime.device.send(elements)).sqrt()
        if grad_scale is not None:
            rms = rms / torch.as_tensor(grad_scale, device=device).float()
        step = torch.cat([torch.ones(len(energies), 1, dtype=torch.float32, device=device), rms], dim=1)
        if skip is not None:
            step = torch.where(skip, torch.zeros_like(step), step)
        if self._sums is None:
            self._sums = torch.zeros(len(self._weights), 3, dtype=torch.float32, device=device)
        self._sums.index_add_(0, index, step)
        self._vote()

    def _vote(self) -> None:
        assert self._sums is not None
        steps, selected, deferred = self._sums.unbind(dim=1)
        counts = steps > 0
        agrees = counts & (deferred >= selected / steps.clamp(min=1))
        votes = torch.stack([counts.sum(), agrees.sum()]).float()
        self._votes = self._runtime.fetch(votes)
        self._runtime.traffic.index_bytes += votes.nbytes

    def closes(self, config: ZenFlowConfig, window_steps: int) -> bool:
        """Whether a step closes the window, judged by the steps before it.

        Args:
            config: the knobs in force.
            window_steps: steps in the window, this one included.
        """
        if config.update_interval != "auto":
            return False
        counted, agree = 0.0, 0.0
        if self._votes is not None:
            votes, transfer = self._votes
            self._runtime.device.block_on(transfer)
            counted, agree = votes.tolist()
        if not counted:
            return window_steps >= AUTO_UPDATE_INTERVAL
        return agree / counted >= config.auto_ratio

    def sums_of(self, weight: WeightState) -> list[float]:
        """A weight's sums, to be saved; empty where the window has none yet."""
        if self._sums is None:
            return []
        sums: list[float] = self._sums[self._weights.index(weight)].tolist()
        return sums

    def restore(self, sums: Mapping[WeightState, Sequence[float]]) -> None:
        """Go on from saved sums."""
        rows = [list(sums[weight]) or [0.0] * 3 for weight in self._weights]
        if any(sums.values()):
            self._sums = torch.tensor(rows, dtype=torch.float32, device=self._runtime.device.torch_device)
            self._vote()


def _whole_rows_and_plan(weight: WeightState) -> tuple[int, WeightPlan]:
    """Energies are those of whole columns, of which this rank may hold some rows."""
    return whole_shape(weight.parameter).numel() // weight.plan.columns, weight.plan
