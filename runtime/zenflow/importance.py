"""What a step learns from its gradients' columns: importance, the next selections, when a window closes."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from zenflow.config import AUTO_UPDATE_INTERVAL, ZenFlowConfig
from zenflow.control import StepControl
from zenflow.device import Transfer
from zenflow.gradients import Gradient, joined_energies, unscales
from zenflow.history import History
from zenflow.kernels.base import finite_or_zero, sums
from zenflow.layout import WeightPlan
from zenflow.runtime import Runtime
from zenflow.selection import ranked
from zenflow.sharded import whole_shape
from zenflow.weight import WeightState, start


@dataclass(frozen=True, slots=True)
class Selecting:
    """What `select` found."""

    weights: list[WeightState]
    """Those that select."""
    energies: torch.Tensor | None
    """[weights, 2] fp32: energy of the selected and of all offloaded columns of each; None: nobody asked for it."""
    started: list[WeightState]
    """Those whose first gradient this was."""


class ScoreLayout:
    """Where the importance of some weights' columns lies in one tensor, so that what is done to all is one operation.

    Args:
        weights: at least one; each has its newest importance in this tensor from now on.
    """

    def __init__(self, weights: Sequence[WeightState]) -> None:
        self.weights = list(weights)
        self.newest = torch.cat([weight.importance() for weight in weights])
        """[columns of all] fp32."""
        self._plans = [weight.plan for weight in weights]
        self.sizes = [plan.columns for plan in self._plans]
        self.starts = list(itertools.accumulate(self.sizes[:-1], initial=0))
        for weight, part in zip(weights, self.newest.split(self.sizes), strict=True):
            weight.share_importance(part)
        self.all_select = all(plan.selects and not plan.resident for plan in self._plans)
        """Whether all weights select, and none has resident columns."""
        self._indices: list[torch.Tensor] = []
        self._index = self.newest
        self._lengths = torch.tensor(
            [[weight.plan.resident, weight.plan.offloaded] for weight in weights], device="cpu"
        ).view(-1)
        self._selected = torch.tensor([weight.plan.selected for weight in weights], device="cpu")

    def fits(self, weights: list[WeightState]) -> bool:
        """Whether it is that of these weights, as they are split now."""
        return weights == self.weights and [weight.plan for weight in weights] == self._plans

    def _of_selected(self, scores: torch.Tensor) -> torch.Tensor:
        indices = [weight.split.selected_index for weight in self.weights]
        if len(indices) != len(self._indices) or not all(map(operator.is_, indices, self._indices)):
            self._indices, self._index = indices, torch.cat(torch._foreach_add(indices, self.starts))
        return scores.index_select(0, self._index)

    def total(self, scores: torch.Tensor) -> torch.Tensor:
        """[2] fp32: `energies` of all weights together, which have no resident columns and all select."""
        return torch.stack([self._of_selected(scores).sum(), scores.sum()])

    def energies(self, scores: torch.Tensor) -> torch.Tensor:
        """[weights, 2] fp32: the sums of scores over the selected and over all offloaded columns."""
        selected = self._of_selected(scores)
        if scores.device.type == "cpu":  # one operation in place of two a weight
            of_selected = torch.segment_reduce(selected, "sum", lengths=self._selected)
            of_offloaded = torch.segment_reduce(scores, "sum", lengths=self._lengths)[1::2]
            return torch.stack([of_selected, of_offloaded], dim=1)
        parts = zip(selected.split([*map(len, self._indices)]), scores.split(self.sizes), self.weights, strict=True)
        return sums([part for mine, of, weight in parts for part in (mine, of[weight.plan.resident :])]).view(-1, 2)


class Importance:
    """Measures the importance of columns, and remembers where that of the weights lies."""

    def __init__(self) -> None:
        self._layout: ScoreLayout | None = None
        self._first: tuple[list[WeightState], StepControl] | None = None

    def chose(self, weights: list[WeightState], control: StepControl | None) -> None:
        """The gradients of a step have chosen columns of weights, for the first time; not if it is skipped."""
        if control is None or control.skip is None:
            for weight in weights:
                weight.chosen = True
        elif weights:
            self._first = weights, control

    def settle(self) -> None:
        """Find out which first choices count; waits for the device where the last step may have been skipped."""
        (weights, control), self._first = self._first or ([], None), None
        if control is not None and not control.is_skipped():
            self.chose(weights, None)

    def layout(self, weights: list[WeightState]) -> ScoreLayout:
        """For these weights, kept while they are the same."""
        if self._layout is None or not self._layout.fits(weights):
            self._layout = ScoreLayout(weights)
        return self._layout


def select(
    runtime: Runtime,
    history: History,
    importance: Importance,
    live: Sequence[Gradient],
    control: StepControl | None,
    *,
    everyone: bool,
    splits: bool,
    apart: bool,
) -> Selecting:
    """Measure importance, start parameters at their first gradient, and propose selections where one is due.

    Args:
        history: receives the waits and the energies.
        everyone: whether all select, not only those that no gradient has chosen columns of.
        splits: whether all columns will be split anew after this step.
        apart: whether the energies of each weight are asked for.
    """
    importance.settle()
    skip = None if control is None else control.skip
    starting = [gradient.weight for gradient in live if not gradient.weight.started]
    if starting:
        with history.open.timed(runtime.device, "select"):
            start(runtime, starting)
    measured = [one for one in live if one.weight.plan.selects or (splits and one.weight.plan.columns)]
    scores = _Scores(importance, measured, skip) if measured else None
    due = [one for one in measured if one.weight.plan.selects and (everyone or not one.weight.chosen)]
    if scores is not None and due:
        _propose(runtime, history, due, scores, skip)
        importance.chose([one.weight for one in due if not one.weight.chosen], control)
    selecting = [place for place, one in enumerate(measured) if one.weight.plan.selects]
    if scores is None or not selecting:
        return Selecting([], None, starting)
    energies = None
    if apart or not scores.layout.all_select or unscales(measured):
        energies = _unscaled(measured, scores.layout.energies(scores.all))
        if len(selecting) < len(measured):
            energies = torch.stack([energies[place] for place in selecting])
    history.open.energy = runtime.fetch(scores.layout.total(scores.all) if energies is None else energies.sum(dim=0))
    runtime.traffic.index_bytes += history.open.energy[0].nbytes
    return Selecting([measured[place].weight for place in selecting], energies, starting)


class _Scores:
    """Importance of the columns of many gradients, in one tensor: what is done to all of them is one launch."""

    def __init__(self, importance: Importance, gradients: Sequence[Gradient], skip: torch.Tensor | None) -> None:
        """Measure it, and let each weight remember its own."""
        self.all = finite_or_zero(joined_energies(gradients))
        """[columns of all gradients] fp32."""
        self.layout = importance.layout([gradient.weight for gradient in gradients])
        newest = self.layout.newest
        newest.copy_(self.all if skip is None else torch.where(skip, newest, self.all))
        self._gradients = gradients

    def of(self, gradient: Gradient) -> torch.Tensor:
        """[columns] of one gradient, a view."""
        place = self._gradients.index(gradient)
        return self.all.narrow(0, self.layout.starts[place], self.layout.sizes[place])


def _propose(
    runtime: Runtime, history: History, due: Sequence[Gradient], scores: _Scores, skip: torch.Tensor | None
) -> None:
    """Select by the gradients' importance: it takes effect at the next close."""
    energies, columns = [], []
    for gradient in due:
        plan = gradient.weight.plan
        ordered, order = ranked(scores.of(gradient)[plan.resident :])
        energies.append(ordered)
        columns.append(order[: plan.selected] + plan.resident if plan.resident else order[: plan.selected])
    chosen = torch.cat(columns)
    if skip is not None:  # where it is true a selection stays as it is
        chosen = torch.where(skip, torch.cat([gradient.weight.selected_index for gradient in due]), chosen)
    on_host, transfer = runtime.fetch(chosen.int())
    for gradient, part in zip(due, on_host.split([*map(len, columns)]), strict=True):
        gradient.weight.propose(part, transfer)
    record = history.open
    record.ranked = runtime.fetch(torch.cat(energies))
    record.ranked_columns = [len(of_one) for of_one in energies]
    runtime.traffic.index_bytes += on_host.nbytes + record.ranked[0].nbytes


def _unscaled(gradients: Sequence[Gradient], energies: torch.Tensor) -> torch.Tensor:
    """Energies of gradients before they were scaled; [gradients, 2]."""
    if unscales(gradients):
        one = torch.ones((), dtype=torch.float32, device=energies.device)
        unscale = torch.stack([one if gradient.unscale is None else gradient.unscale for gradient in gradients])
        energies = energies * unscale.square().unsqueeze(1)
    return energies


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
        weights: Sequence[WeightState],
        both: torch.Tensor | None,
        grad_scale: torch.Tensor | None,
        skip: torch.Tensor | None,
    ) -> None:
        """Take in a step; `both` is [weights, 2] fp32: energy of the selected and of all offloaded columns of each."""
        if both is None:
            return
        device = self._runtime.device.torch_device
        places = {weight: place for place, weight in enumerate(self._weights)}
        index = self._runtime.send_index(torch.tensor([places[weight] for weight in weights], device="cpu"))
        elements = torch.tensor(
            [[rows * plan.selected, rows * plan.deferred] for rows, plan in map(_whole_rows_and_plan, weights)],
            dtype=torch.float32,
            device="cpu",
        )
        parts = torch.stack([both[:, 0], (both[:, 1] - both[:, 0]).clamp(min=0)], dim=1)
        rms = (parts / self._runtime.device.send(elements)).sqrt()
        if grad_scale is not None:
            rms = rms / torch.as_tensor(grad_scale, device=device).float()
        step = torch.cat([torch.ones(len(weights), 1, dtype=torch.float32, device=device), rms], dim=1)
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
        """Whether a step closes the window, judged by the steps before it."""
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
