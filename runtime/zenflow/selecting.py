"""What a step learns from its gradients' columns: their importance, the next selections, and what is covered."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zenflow.config import Auto
from zenflow.gradients import Gradient
from zenflow.history import History
from zenflow.kernels.base import finite_or_zero, sums
from zenflow.runtime import Runtime
from zenflow.schedule import selects
from zenflow.selection import ranked
from zenflow.weight import WeightState


@dataclass(frozen=True, slots=True)
class Selecting:
    """What `select` found."""

    energies: dict[WeightState, torch.Tensor]
    """[2] fp32 of each weight that selects: energy of the selected and of all offloaded columns."""
    started: list[WeightState]
    """Those whose first gradient this was."""


def select(
    runtime: Runtime,
    history: History,
    live: Sequence[Gradient],
    step: int,
    interval: int | Auto,
    skip: torch.Tensor | None,
    *,
    splits: bool,
) -> Selecting:
    """Measure importance, propose selections where one is due, and start parameters at their first gradient.

    Args:
        runtime: shared by all weights.
        history: receives the waits and the energies.
        live: the step's gradients.
        step: its number.
        interval: `select_interval`.
        skip: 0-dim bool; where true the step does not count.
        splits: whether all columns will be split anew after this step.
    """
    measured = [one for one in live if one.weight.selects or (splits and one.weight.plan.columns)]
    scores = _Scores(measured, skip) if measured else None
    due = [one for one in measured if one.weight.selects and (not one.weight.started or selects(step, interval))]
    if scores is not None and due:
        _propose(runtime, history, due, scores, skip)
    starting = [gradient.weight for gradient in live if not gradient.weight.started]
    if starting:
        with history.open.timed(runtime.device, "select"):
            for weight in starting:
                weight.start()
    selecting = [one for one in measured if one.weight.selects]
    if scores is None or not selecting:
        return Selecting({}, starting)
    energies = _energies(selecting, scores)
    history.open.energy = runtime.fetch(energies.sum(dim=0))
    runtime.traffic.index_bytes += history.open.energy[0].nbytes
    return Selecting(dict(zip((one.weight for one in selecting), energies.unbind(), strict=True)), starting)


class _Scores:
    """Importance of the columns of many gradients, in one tensor: what is done to all of them is one launch."""

    def __init__(self, gradients: Sequence[Gradient], skip: torch.Tensor | None) -> None:
        """Measure it, and let each weight remember its own.

        Args:
            gradients: at least one.
            skip: 0-dim bool; where true the step does not count.
        """
        energies = [gradient.energies() for gradient in gradients]
        sizes = [len(of_one) for of_one in energies]
        self.all = finite_or_zero(torch.cat(energies))
        """[columns of all gradients] fp32."""
        starts = itertools.accumulate(sizes[:-1], initial=0)
        self.starts = dict(zip(gradients, starts, strict=True))
        """Where each gradient's columns begin in it."""
        self.of = dict(zip(gradients, self.all.split(sizes), strict=True))
        """[columns] of each gradient, a view."""
        newest = [gradient.weight.importance() for gradient in gradients]
        noted = self.all if skip is None else torch.where(skip, torch.cat(newest), self.all)
        torch._foreach_copy_(newest, noted.split(sizes))


def _propose(
    runtime: Runtime, history: History, due: Sequence[Gradient], scores: _Scores, skip: torch.Tensor | None
) -> None:
    """Select by the gradients' importance: it takes effect at the next close (in `start` the first time)."""
    energies, columns = [], []
    for gradient in due:
        plan = gradient.weight.plan
        ordered, order = ranked(scores.of[gradient][plan.resident :])
        energies.append(ordered)
        columns.append(order[: plan.selected] + plan.resident if plan.resident else order[: plan.selected])
    chosen = torch.cat(columns)
    if skip is not None:  # where it is true a selection stays as it is
        pairs = zip((gradient.weight for gradient in due), columns, strict=True)
        before = torch.cat([weight.selected_index if weight.started else new for weight, new in pairs])
        chosen = torch.where(skip, before, chosen)
    on_host, transfer = runtime.fetch(chosen.int())
    for gradient, part in zip(due, on_host.split([*map(len, columns)]), strict=True):
        gradient.weight.propose(part, transfer)
    record = history.open
    record.ranked = runtime.fetch(torch.cat(energies))
    record.ranked_columns = [len(of_one) for of_one in energies]
    runtime.traffic.index_bytes += on_host.nbytes + record.ranked[0].nbytes


def _energies(selecting: Sequence[Gradient], scores: _Scores) -> torch.Tensor:
    """[n, 2] fp32: of each gradient, unscaled, the energy in the selected and in all offloaded columns."""
    indices = [gradient.weight.selected_index for gradient in selecting]
    shifted = torch._foreach_add(indices, [scores.starts[gradient] for gradient in selecting])
    selected = scores.all.index_select(0, torch.cat(shifted)).split([*map(len, indices)])
    offloaded = [scores.of[gradient][gradient.weight.plan.resident :] for gradient in selecting]
    energies = sums([part for both in zip(selected, offloaded, strict=True) for part in both]).view(-1, 2)
    if any(gradient.unscale is not None for gradient in selecting):
        one = torch.ones((), dtype=torch.float32, device=energies.device)
        unscale = torch.stack([one if gradient.unscale is None else gradient.unscale for gradient in selecting])
        energies = energies * unscale.square().unsqueeze(1)
    return energies
