"""What ranks tell each other in a step of sharded weights: one all-reduce of column energies and failures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from zenflow.device import Transfer
from zenflow.errors import RankError
from zenflow.gradients import Gradient
from zenflow.runtime import Runtime
from zenflow.sharded import Shards
from zenflow.weight import WeightState


class _Told(NamedTuple):
    """The words of a step on their way to the host."""

    step: int
    words: torch.Tensor
    """[1 + weights] fp32: ranks that failed, then ranks with a gradient of each weight."""
    transfer: Transfer
    names: list[str]


class RankSums:
    """Sums over the ranks what each knows of its rows alone; owns the flags by which a failure reaches all of them.

    Importance, norms, coverage and Zen-auto come from the energies of whole columns, so all ranks choose alike. What a
    rank could not do does not stop the others in a collective: the step is skipped on all ranks, on the device, and all
    raise at the beginning of the next one, or of whatever else asks for `require_well`.

    Args:
        runtime: shared by all weights.
        shards: the rows of this rank.
    """

    def __init__(self, runtime: Runtime, shards: Shards) -> None:
        self._runtime = runtime
        self._shards = shards
        self._told: _Told | None = None
        self._error: Exception | None = None

    @property
    def _size(self) -> int:
        return 1 if self._runtime.ranks is None else self._runtime.ranks.size

    def take(
        self, weights: Sequence[WeightState], live: Sequence[Gradient], step: int, error: Exception | None
    ) -> torch.Tensor:
        """Give each gradient the energies of its whole columns.

        Args:
            weights: all, in plan order, which is the same on all ranks.
            live: this rank's gradients of the step; none where it has failed.
            step: its number.
            error: why this rank cannot take the step; None: it can.

        Returns:
            0-dim bool on the device: whether the step has to be skipped, on all ranks alike.
        """
        device = self._runtime.device
        gradients = {gradient.weight: gradient for gradient in live}
        words = torch.tensor([error is not None, *(weight in gradients for weight in weights)], device="cpu").float()
        trained = [weight for weight in weights if weight.parameter.requires_grad]
        parts = [_energies(weight, gradients.get(weight)) for weight in trained]
        flat = torch.cat([device.send(words), *parts])
        if self._runtime.ranks is not None:
            self._runtime.ranks.add_up(flat, device)
        words, energies = flat.split([len(words), len(flat) - len(words)])
        if self._shards.replicas > 1:  # each has counted the same rows
            energies = energies / self._shards.replicas
        for weight, whole in zip(trained, energies.split([*map(len, parts)]), strict=True):
            if weight in gradients:
                gradients[weight].take_whole(whole)
        self._error = error
        self._told = _Told(step, *self._runtime.fetch(words.clone()), [weight.name for weight in weights])
        self._runtime.traffic.index_bytes += words.nbytes
        failed: torch.Tensor = (words[0] > 0) | ((words[1:] > 0) & (words[1:] < self._size)).any()
        return failed

    def require_well(self) -> None:
        """Refuse to go on after a step that a rank could not take; waits for what the ranks said.

        Raises:
            RankError: another rank failed, or has gradients of other parameters; where this one failed, its own error.
        """
        if self._told is None:
            return
        step, words, transfer, names = self._told
        self._runtime.device.block_on(transfer)
        failed, *having = words.tolist()
        if self._error is not None:
            raise self._error
        if failed:
            raise RankError(
                f"{failed:.0f} of {self._size} ranks failed at step {step}, and say why; it was skipped on all: go "
                "on with a new optimizer, from a checkpoint"
            )
        for name, count in zip(names, having, strict=True):
            if 0 < count < self._size:
                raise RankError(
                    f"parameter {name} had a gradient on {count:.0f} of {self._size} ranks at step {step}, allowed is "
                    "on all of them or on none; the step was skipped on all ranks"
                )
        self._told = None


def _energies(weight: WeightState, gradient: Gradient | None) -> torch.Tensor:
    """[columns] fp32 of this rank's rows; of a parameter without a column view, one number."""
    if gradient is None or not weight.parameter.numel():
        return torch.zeros(max(1, weight.plan.columns), dtype=torch.float32, device=weight.parameter.device)
    return gradient.energies() if weight.plan.columns else gradient.norm().square().reshape(1)
