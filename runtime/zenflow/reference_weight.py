"""One parameter of the reference: its plan, its state, its selection, what is pending; and how plans are made.

All matrices here are `[rows, columns]`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zenflow.config import ZenFlowConfig
from zenflow.reference_rules import ADAMW, Hyper, Moments, ReferenceRule


@dataclass(frozen=True)
class Entry:
    """One parameter's gradient in one step, waiting for the host."""

    step: int
    grad: Tensor  # [rows, columns] fp32, factor applied; only the deferred columns of it count
    hyper: Hyper
    skipped: bool


@dataclass
class Energy:
    """Zen-auto's sums over the open window: root mean squares of a weight's two parts, one of each a step."""

    steps: int = 0
    selected: float = 0.0
    deferred: float = 0.0

    @property
    def agrees(self) -> bool:
        """Whether the deferred columns have gathered as much as the selected ones see in a step."""
        return self.deferred >= self.selected / self.steps

    @property
    def hinges_on_an_ulp(self) -> bool:
        """Whether another order of the sums could decide otherwise."""
        return self.deferred != 0 and math.isclose(self.deferred, self.selected / self.steps, rel_tol=1e-4)


@dataclass
class Weight:
    """One parameter: its plan, its fp32 state, its selection and what is pending."""

    param: Tensor
    group: int
    rule: ReferenceRule
    initial: list[float]  # of every moment
    transposed: bool
    resident: int  # leading columns whose state never leaves the GPU
    selected_count: int
    bucket_slots: int
    first_bucket: int = 0
    master: Tensor | None = None  # [rows, columns], as is every moment; None before the first gradient
    moments: Moments = ()
    counts: list[int] = field(default_factory=list)  # updates of each column
    selected: set[int] = field(default_factory=set)
    slot: dict[int, int] = field(default_factory=dict)  # of each deferred column
    pending: set[int] | None = None  # the next selection
    log: list[Entry] = field(default_factory=list)
    due: dict[int, int] = field(default_factory=dict)  # applied column -> step after which it is visible
    due_decay: float = 1.0  # what the updates of the columns in `due` multiplied a weight with
    left: Tensor | None = None  # [rows, columns]: the weight as the last step left it
    energy: Energy = field(default_factory=Energy)

    def __post_init__(self) -> None:
        device = self.param.device
        self.scores = torch.zeros(
            self.columns, dtype=torch.float32, device=device
        )  # importance of the newest gradient that counted

    def norm(self, grad: Tensor) -> Tensor:
        """0-dim fp32: L2 norm of the gradient, from the norms of its columns where it has any."""
        laid = grad if self.transposed else grad.contiguous()  # the order of summation is that of the memory
        if not _has_columns(self.param):
            norm: Tensor = torch.linalg.vector_norm(laid.float())
            return norm
        return energies(matrix(laid, self.transposed)).sum().sqrt()

    @property
    def columns(self) -> int:
        """Columns of the matrix."""
        return matrix(self.param, self.transposed).shape[1]

    @property
    def offloaded(self) -> range:
        """The columns that are selected or deferred."""
        return range(self.resident, self.columns)

    @property
    def selects(self) -> bool:
        """Whether there is a choice of columns."""
        return 0 < self.selected_count < len(self.offloaded)

    @property
    def deferred_count(self) -> int:
        """Columns, and host slots, of the deferred tier; known before the first selection."""
        return len(self.offloaded) - self.selected_count

    @property
    def bucket_count(self) -> int:
        """Buckets that the host slots are cut into."""
        return -(-self.deferred_count // self.bucket_slots)

    def start(self) -> None:
        """Read the master from the weight; counts begin at zero, moments mostly too."""
        self.master = matrix(self.param.detach(), self.transposed).float().clone()
        self.moments = tuple(torch.full_like(self.master, value) for value in self.initial)
        self.counts = [0] * self.columns

    def leave(self) -> None:
        """Remember the weight, for `follow_writes`."""
        self.left = matrix(self.param.detach(), self.transposed).clone()

    def follow_writes(self) -> bool:
        """Take the masters from what somebody else wrote since `leave`; returns whether anybody did.

        What is due later counts on top of it. A weight that is what its master rounds to keeps the master.
        """
        now = matrix(self.param.detach(), self.transposed)
        if self.master is None or self.left is None or torch.equal(now, self.left):
            return False
        due = torch.zeros(self.columns, dtype=torch.bool)
        due[list(self.due)] = True
        moved = torch.where(
            now == self.left, self.master, self.master + self.due_decay * (now.float() - self.left.float())
        )
        read = torch.where(self.master.to(now.dtype) == now, self.master, now.float())
        self.master = torch.where(due, moved, read)
        return True

    def top(self, importance: Tensor) -> set[int]:
        """The offloaded columns of greatest importance; ties go to the lower column. importance: `[columns]`."""
        order = torch.sort(importance[self.resident :], descending=True, stable=True).indices
        return {self.resident + int(place) for place in order[: self.selected_count]}

    def select(self, chosen: set[int]) -> None:
        """Make this the selection; the other offloaded columns take the host slots in order."""
        self.selected = chosen
        self.slot = {column: slot for slot, column in enumerate(c for c in self.offloaded if c not in chosen)}

    def reselect(self) -> int:
        """Make the pending selection the current one; returns how many columns moved each way."""
        if self.pending is None:
            return 0
        leaving = sorted(self.pending - self.selected)  # leave the deferred tier
        joining = sorted(self.selected - self.pending)
        for column, partner in zip(joining, leaving, strict=True):
            self.slot[column] = self.slot.pop(partner)
        self.selected, self.pending = self.pending, None
        return len(leaving)

    def planned_like(self, other: Weight) -> bool:
        """Whether two plans of this parameter split its columns alike."""
        return (self.resident, self.selected_count) == (other.resident, other.selected_count)

    def replan(self, new: Weight) -> None:
        """Take over another plan; state stays with its column. Nothing may be pending."""
        selects_anew = self.master is not None and not self.planned_like(new)
        self.resident, self.selected_count, self.first_bucket = new.resident, new.selected_count, new.first_bucket
        if selects_anew:
            self.select(self.top(self.scores))

    def gather(self, importance: Tensor, factor: float) -> None:
        """Add one step's gradient to the sums of Zen-auto. factor: that the raw gradient is multiplied with."""
        squares = importance.double() * factor**2
        rows = matrix(self.param, self.transposed).shape[0]
        selected, deferred = (squares[sorted(part)].sum() / (rows * len(part)) for part in (self.selected, self.slot))
        self.energy.steps += 1
        self.energy.selected += math.sqrt(selected)
        self.energy.deferred += math.sqrt(deferred)

    def update(self, columns: Sequence[int], grad: Tensor, hyper: Hyper, decay: float) -> None:
        """One update of some columns. grad: `[rows, columns]` fp32, all columns."""
        if self.master is None or not columns:
            return
        at = torch.tensor(columns, device=grad.device)
        for column in columns:
            self.counts[column] += self.rule.counts(hyper)
        counts = [self.counts[column] for column in columns]
        weights, moments = self.master[:, at], tuple(moment[:, at] for moment in self.moments)
        if self.rule.decoupled:
            weights = weights * decay
        self.master[:, at], updated = self.rule.formula(weights, moments, grad[:, at], counts, hyper)
        for moment, new in zip(self.moments, updated, strict=True):
            moment[:, at] = new

    def show(self, columns: Iterable[int]) -> None:
        """Round the masters of some columns into the weight."""
        at = torch.tensor(list(columns), dtype=torch.long, device=self.param.device)
        if self.master is None or not len(at):
            return
        seen = matrix(self.param.detach(), self.transposed).clone()
        seen[:, at] = self.master[:, at].to(seen.dtype)
        self.param.detach().copy_((seen.t() if self.transposed else seen).reshape(self.param.shape))


def plan(
    groups: Sequence[dict[str, Any]], config: ZenFlowConfig, module: nn.Module | None, rule: ReferenceRule = ADAMW
) -> list[Weight]:
    """Split every parameter into resident and offloaded columns and number the buckets; see design, Knob space."""
    group_of = {param: index for index, group in enumerate(groups) for param in group["params"]}
    of_module = [param for param in module.parameters() if param in group_of] if module is not None else []
    ordered = list(dict.fromkeys([*of_module, *group_of]))
    modules = module.modules() if module is not None else ()
    conv1d = {getattr(sub, "weight", None) for sub in modules if type(sub).__name__ == "Conv1D"}
    counted = sum(param.numel() for param in ordered if param.requires_grad and _has_columns(param))
    budget = counted - math.floor(config.offload_ratio * counted + 0.5)
    weights, first_bucket = [], 0
    for param in ordered:
        transposed = param in conv1d and param.dim() == 2
        rows, columns = matrix(param, transposed).shape
        resident = columns
        if _has_columns(param) and not param.requires_grad:
            resident = math.floor((1 - config.offload_ratio) * columns + 0.5)
        elif _has_columns(param) and param.numel() > budget:
            resident, budget = min(columns, math.floor(budget / rows + 0.5)), 0
        elif _has_columns(param):
            budget -= param.numel()
        offloaded = columns - resident
        selected = min(offloaded, max(1, math.floor(config.topk_ratio * offloaded + 0.5)))
        selected = 0 if config.topk_ratio == 0 else selected
        bucket_slots = max(1, config.bucket_bytes // (max(rows, 1) * param.element_size()))
        group = group_of[param]
        initial = rule.initial(groups[group])
        weight = Weight(param, group, rule, initial, transposed, resident, selected, bucket_slots, first_bucket)
        weights.append(weight)
        first_bucket += weight.bucket_count
    return weights


def importance_of(grad: Tensor) -> Tensor:
    """[columns] fp32: squared norm of every column, 0 where that is not finite. grad: `[rows, columns]`."""
    return energies(grad).nan_to_num(nan=0.0, posinf=0.0)


def energies(grad: Tensor) -> Tensor:
    """[columns] fp32: squared norm of every column. Sums of 64 rows each, in their order, then the sums in theirs."""
    total = torch.zeros(grad.shape[1], dtype=torch.float32, device=grad.device)
    for block in grad.float().square().split(64):
        subtotal = torch.zeros_like(total)
        for row in block:
            subtotal += row
        total += subtotal
    return total


def matrix(tensor: Tensor, transposed: bool) -> Tensor:
    """A parameter or its gradient as `[rows, columns]`; without columns of its own, as one row."""
    if transposed:
        return tensor.t()
    if tensor.dim() < 2 or tensor.numel() == 0:
        return tensor.reshape(1, -1)
    return tensor.reshape(-1, tensor.shape[-1])


def _has_columns(param: Tensor) -> bool:
    if param.dim() < 2 or param.numel() == 0:
        return False
    try:
        param.detach().view(-1, param.shape[-1])
    except RuntimeError:  # strides that no 2-D view has
        return False
    return True
