"""What a step learns from its gradients' columns: their importance, the next selections, and what is covered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zenflow.config import Auto
from zenflow.gradients import Gradient
from zenflow.history import History
from zenflow.kernels.base import finite_or_zero
from zenflow.runtime import Runtime
from zenflow.schedule import selects
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
    scores, ranked = {}, []
    for gradient in live:
        weight = gradient.weight
        if weight.selects or (splits and weight.plan.columns):
            importance = finite_or_zero(gradient.energies())
            weight.note_importance(importance, skip)
            if weight.selects:
                scores[gradient] = importance
                if not weight.started or selects(step, interval):
                    ranked.append(weight.propose(importance, skip))
    starting = [gradient.weight for gradient in live if not gradient.weight.started]
    if starting:
        with history.open.timed(runtime.device, "select"):
            for weight in starting:
                weight.start()
    energies = {
        gradient.weight: gradient.unscaled(gradient.weight.selected_energy(of_weight))
        for gradient, of_weight in scores.items()
    }
    _record(runtime, history, list(energies.values()), ranked)
    return Selecting(energies, starting)


def _record(
    runtime: Runtime, history: History, energies: Sequence[torch.Tensor], ranked: Sequence[torch.Tensor]
) -> None:
    record = history.open
    if energies:
        record.energy = runtime.fetch(torch.stack(list(energies)).sum(dim=0))
        runtime.traffic.index_bytes += record.energy[0].nbytes
    if ranked:
        record.ranked = runtime.fetch(torch.cat(list(ranked)))
        record.ranked_columns = [len(sums) for sums in ranked]
        runtime.traffic.index_bytes += record.ranked[0].nbytes
