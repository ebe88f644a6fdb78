"""What ranks tell each other in a step of sharded weights: an all-reduce of column energies, movement and failures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from zenflow.control import as_flag
from zenflow.device import Transfer
from zenflow.errors import RankError
from zenflow.gradients import Gradient
from zenflow.runtime import Runtime
from zenflow.sharded import Shards
from zenflow.stats import Moved, StepRecord
from zenflow.weight import WeightState


class _Told(NamedTuple):
    """The words of a step on their way to the host."""

    step: int
    words: torch.Tensor
    """[1 + weights + 2] fp32: ranks that failed, ranks with a gradient of each weight, how far a step moved theirs."""
    transfer: Transfer
    names: list[str]
    record: StepRecord | None  # of the step that moved them, the one before; None: there is none
    error: Exception | None  # what this rank has told the others


class RankSums:
    """Sums over the ranks what each knows of its rows alone; owns the flags by which a failure reaches all of them.

    Importance, norms, coverage and Zen-auto come from the energies of whole columns, so all ranks choose alike. What a
    rank could not do does not leave the others in a collective: it takes part in one more, by which the step is skipped
    on all ranks, on the device, and all raise at the beginning of the step after that.
    """

    def __init__(self, runtime: Runtime, shards: Shards) -> None:
        self._runtime = runtime
        self._shards = shards
        self._told: _Told | None = None
        self._before: tuple[StepRecord, Moved] | None = None  # of the last step, and how far it moved these rows
        self.error: Exception | None = None
        """Why this rank cannot go on, until all know."""

    @property
    def _size(self) -> int:
        return 1 if self._runtime.ranks is None else self._runtime.ranks.size

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep an error until all ranks know, instead of raising it here."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, it is raised once all know
            self.error = error

    def take(
        self, weights: Sequence[WeightState], live: Sequence[Gradient], step: int, found_inf: torch.Tensor | None
    ) -> torch.Tensor:
        """Give each gradient of the step (none where this rank has failed) the energies of its whole columns.

        `weights` are all, in plan order, which is the same on all ranks; `found_inf` is not 0 where this rank wants the
        step skipped (None: it does not). Returns 0-dim bool on the device: whether the step has to be skipped, on all
        ranks alike.
        """
        device = self._runtime.device
        gradients = {gradient.weight: gradient for gradient in live}
        record, moved = self._before or (None, Moved())
        having, norms = (weight in gradients for weight in weights), (moved.change_squares, moved.weight_squares)
        told = torch.tensor([float(self.error is not None), *having, *norms], device="cpu")
        words = device.send(told.float())
        skip = torch.zeros_like(words[:1]) if found_inf is None else as_flag(found_inf, words.device).float().reshape(1)
        trained = [weight for weight in weights if weight.parameter.requires_grad]
        parts = [_energies(weight, gradients.get(weight)) for weight in trained]
        flat = torch.cat([skip, words, *parts])
        if self._runtime.ranks is not None:
            self._runtime.ranks.add_up(flat, device)
        skip, words, energies = flat.split([1, len(words), len(flat) - len(words) - 1])
        if self._shards.replicas > 1:  # each has counted the same rows
            energies = energies / self._shards.replicas
        for weight, whole in zip(trained, energies.split([*map(len, parts)]), strict=True):
            if weight in gradients:
                gradients[weight].take_whole(whole)
        names, having_it = [one.name for one in weights], words[1:-2]
        self._told = _Told(step, *self._runtime.fetch(words.clone()), names, record, self.error)
        self._runtime.traffic.index_bytes += words.nbytes
        torn = (having_it > 0) & (having_it < self._size)  # a rank that failed has told of none
        skipped: torch.Tensor = torch.cat([skip > 0, torn]).any()
        return skipped

    def end_step(self, record: StepRecord) -> None:
        """Tell the others in the next step how far this one moved the rows here; all have the sum in the one after.

        `record` is of this step, and says nothing of movement until then.
        """
        self._before, record.moved = (record, record.moved or Moved()), None

    def require_well(self, *, alone: bool = False) -> None:
        """Refuse to go on after a step that a rank could not take; waits for what the ranks said.

        `alone`: the others are not waiting for this rank, which may raise what they do not know yet. Raises RankError
        if another rank failed, or has gradients of other parameters; its own error where this one failed.
        """
        if alone and self.error is not None:
            raise self.error
        if self._told is None:
            return
        step, words, transfer, names, record, error = self._told
        self._runtime.device.block_on(transfer)
        failed, *having, change_squares, weight_squares = words.tolist()
        if error is not None:
            raise error
        if failed:
            raise RankError(
                f"step {step} failed on {failed:.0f} of {self._size} ranks, see their own messages; it was skipped "
                "on all of them: go on with a new optimizer, from a checkpoint"
            )
        for name, count in zip(names, having, strict=True):
            if 0 < count < self._size:
                raise RankError(
                    f"parameter {name} had a gradient on {count:.0f} of {self._size} ranks at step {step}; it must "
                    "be on all of them or on none. The step was skipped on all ranks"
                )
        if record is not None and weight_squares:
            record.moved = Moved(*(squares / self._shards.replicas for squares in (change_squares, weight_squares)))
        self._told = None


def _energies(weight: WeightState, gradient: Gradient | None) -> torch.Tensor:
    """[columns] fp32 of this rank's rows; of a parameter without a column view, one number."""
    if gradient is None or not weight.parameter.numel():
        return torch.zeros(max(1, weight.plan.columns), dtype=torch.float32, device=weight.parameter.device)
    return gradient.energies() if weight.plan.columns else gradient.norm().square().reshape(1)
