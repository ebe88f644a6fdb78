"""`ReferenceAdamW` and its siblings: what the optimizers of `zenflow.family` compute, written as plainly as possible.

No device, no thread, no overlap: every state is one fp32 matrix a weight, every rule is one loop. It is slow and
exists to be read and to be compared with, bit for bit. All matrices here are `[rows, columns]`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zenflow.config import ZenFlowConfig
from zenflow.errors import UnsupportedError
from zenflow.reference_rules import ADAGRAD, ADAM, ADAMW, LION, SGD, Hyper, Moments, ReferenceRule


@dataclass(frozen=True)
class Entry:
    """One parameter's gradient in one step, waiting for the host."""

    step: int
    grad: Tensor  # [rows, columns] fp32, factor applied; only the deferred columns of it count
    hyper: Hyper
    skipped: bool


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

    @property
    def columns(self) -> int:
        """Columns of the matrix."""
        return _matrix(self.param, self.transposed).shape[1]

    @property
    def deferred_count(self) -> int:
        """Columns, and host slots, of the deferred tier; known before the first selection."""
        return self.columns - self.resident - self.selected_count

    @property
    def bucket_count(self) -> int:
        """Buckets that the host slots are cut into."""
        return -(-self.deferred_count // self.bucket_slots)

    def start(self) -> None:
        """Read the master from the weight; counts begin at zero, moments mostly too."""
        self.master = _matrix(self.param.detach(), self.transposed).float().clone()
        self.moments = tuple(torch.full_like(self.master, value) for value in self.initial)
        self.counts = [0] * self.columns

    def choose(self, grad: Tensor) -> set[int]:
        """The offloaded columns of greatest squared norm; ties go to the lower column. grad: `[rows, columns]`."""
        importance = grad.float().square().sum(dim=0).nan_to_num(nan=0.0, posinf=0.0)
        order = torch.sort(importance[self.resident :], descending=True, stable=True).indices
        return {self.resident + int(place) for place in order[: self.selected_count]}

    def select_first(self, chosen: set[int]) -> None:
        """Make this the selection; the other offloaded columns take the host slots in order."""
        self.selected = chosen
        deferred = [column for column in range(self.resident, self.columns) if column not in chosen]
        self.slot = {column: slot for slot, column in enumerate(deferred)}

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

    def update(self, columns: Sequence[int], grad: Tensor, hyper: Hyper, decay: float) -> None:
        """One update of some columns. grad: `[rows, columns]` fp32, all columns."""
        if self.master is None or not columns:
            return
        at = torch.tensor(columns)
        for column in columns:
            self.counts[column] += self.rule.counts(hyper)
        counts = [self.counts[column] for column in columns]
        weights, moments = self.master[:, at], tuple(moment[:, at] for moment in self.moments)
        if self.rule.decoupled:
            weights = weights * decay
        self.master[:, at], updated = self.rule.formula(weights, moments, grad[:, at], counts, hyper)
        for moment, new in zip(self.moments, updated, strict=True):
            moment[:, at] = new

    def show(self, columns: Sequence[int]) -> None:
        """Round the masters of some columns into the weight."""
        if self.master is None or not columns:
            return
        seen = _matrix(self.param.detach(), self.transposed).clone()
        at = torch.tensor(columns)
        seen[:, at] = self.master[:, at].to(seen.dtype)
        self.param.detach().copy_((seen.t() if self.transposed else seen).reshape(self.param.shape))


class ReferenceOptimizer(torch.optim.Optimizer):
    """The oracle of one optimizer of the family: the same weights after every step.

    `events` counts what has happened, so that a test can tell that it exercised something.

    Args:
        params: parameters or groups, as in torch.
        config: the knobs; None means `ZenFlowConfig()`.
        module: the model; gives the order of the plan and tells which weights are in Conv1D layout.
        hyper: the rule's hyperparameters by name; those that are not given are torch's.

    Raises:
        TypeError: the rule has no such hyperparameter.
    """

    rule: ClassVar[ReferenceRule]
    _step_supports_amp_scaling = True  # GradScaler then sets grad_scale and found_inf instead of skipping step()

    def __init__(
        self,
        params: Iterable[Any],
        *,
        config: ZenFlowConfig | None = None,
        module: nn.Module | None = None,
        **hyper: Any,
    ) -> None:
        if unknown := sorted(hyper.keys() - self.rule.defaults.keys()):
            raise TypeError(f"{unknown[0]} is no hyperparameter, allowed are {', '.join(self.rule.defaults)}")
        super().__init__(params, {**self.rule.defaults, **hyper})
        self.config = (config or ZenFlowConfig()).resolved()
        self.events: Counter[str] = Counter()
        self._module = module
        self._weights: list[Weight] = []
        self._hypers: list[Hyper] = []  # of each group, in the last step
        self._step = 0
        self._window_steps = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step: the resident and selected columns now, the deferred ones logged, due updates made visible.

        Raises:
            UnsupportedError: a gradient is sparse, or a group was added after the first step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._weights:
            self._weights = plan(self.param_groups, self.config, self._module, self.rule)
        if len(self._weights) != sum(len(group["params"]) for group in self.param_groups):
            raise UnsupportedError("a parameter group was added after the first step; build a new optimizer instead")
        self._step += 1
        self._window_steps += 1
        self._hypers = [self.rule.hyper(group) for group in self.param_groups]
        factor, skipped = self._factor_and_skip()
        for weight in self._weights:
            if weight.param.grad is None:
                self.events["void, no gradient"] += weight.master is not None
            else:
                self._take(weight, weight.param.grad, factor, skipped)
        warming_up = self._step <= self.config.full_warm_up_rounds
        if warming_up or self._window_steps == self.config.update_interval:
            self._close(at_once=warming_up or not self.config.overlap_step)
        self._show_due()
        return loss

    @torch.no_grad()
    def flush(self) -> None:
        """Close the window here and make everything visible."""
        self._close(at_once=True)
        self._show_due()

    def pending_entries(self) -> list[tuple[Tensor, int]]:
        """(parameter, step) of every logged gradient that the host has not applied."""
        return [(weight.param, entry.step) for weight in self._weights for entry in weight.log if not entry.skipped]

    def selected(self, param: Tensor) -> list[int]:
        """Columns of this parameter that are selected now, ascending."""
        return sorted(self._weight(param).selected)

    def in_flight(self, param: Tensor) -> list[int]:
        """Columns that the host has updated and the weight does not show yet, ascending."""
        return sorted(self._weight(param).due)

    def columns_state(self, param: Tensor) -> tuple[Tensor, Moments, list[int]]:
        """Master, moments (each `[rows, columns]` fp32, copies) and the columns' update counts."""
        weight = self._weight(param)
        assert weight.master is not None, "the parameter has had no gradient"
        return weight.master.clone(), tuple(moment.clone() for moment in weight.moments), list(weight.counts)

    def _weight(self, param: Tensor) -> Weight:
        return next(weight for weight in self._weights if weight.param is param)

    def _factor_and_skip(self) -> tuple[Tensor | None, bool]:
        grads = [weight.param.grad for weight in self._weights if weight.param.grad is not None]
        if any(grad.is_sparse for grad in grads):
            raise UnsupportedError("sparse gradients are not supported; use torch.optim.SparseAdam for that parameter")
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        factor = None if grad_scale is None else 1.0 / grad_scale
        skipped = found_inf is not None and bool(found_inf != 0)
        if grads and (self.config.max_grad_norm is not None or self.config.skip_nonfinite):
            norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad.float()) for grad in grads]))
            if factor is not None:
                norm = norm * factor
            if self.config.skip_nonfinite:
                skipped = skipped or not bool(norm.isfinite())
            if self.config.max_grad_norm is not None:
                coef = (self.config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
                factor = coef if factor is None else factor * coef
        return factor, skipped

    def _take(self, weight: Weight, raw: Tensor, factor: Tensor | None, skipped: bool) -> None:
        grad = _matrix(raw, weight.transposed)
        if weight.master is None:
            weight.start()
            weight.select_first(weight.choose(grad))
        elif (self._step - 1) % self.config.select_interval == 0:  # type: ignore[operator]  # resolved: an int
            weight.pending = set(weight.selected) if skipped else weight.choose(grad)
        grad = grad.float().clone() if factor is None else grad.float() * factor
        hyper = self._hypers[weight.group]
        if weight.slot:
            weight.log.append(Entry(self._step, grad, hyper, skipped))
        if skipped:
            self.events["void, skipped"] += 1
            return
        now = [*range(weight.resident), *sorted(weight.selected)]
        weight.update(now, grad, hyper, self.rule.decay(hyper))
        weight.show(now)

    def _close(self, at_once: bool) -> None:
        lag = min(self.config.apply_lag or self.config.update_interval, self._window_steps)
        buckets = sum(weight.bucket_count for weight in self._weights)
        for weight in self._weights:
            self.events["in flight at a close"] += bool(weight.due)
            weight.show(list(weight.due))
            weight.due = {}
            if self._window_steps:
                self._apply(weight)
                for column, slot in weight.slot.items():
                    bucket = weight.first_bucket + slot // weight.bucket_slots
                    leaving = weight.pending is not None and column in weight.pending
                    later = self._step + 1 + bucket * lag // buckets  # type: ignore[operator]
                    weight.due[column] = self._step if at_once or leaving else later
                weight.show([column for column, step in weight.due.items() if step <= self._step])
                self.events["columns moved"] += weight.reselect()
        self._window_steps = 0

    def _apply(self, weight: Weight) -> None:
        columns = sorted(weight.slot)
        entries = [entry for entry in weight.log if not entry.skipped]
        self.events["entries applied"] += len(entries)
        if self.config.deferred_update == "replay":
            for entry in entries:
                weight.update(columns, entry.grad, entry.hyper, self.rule.decay(entry.hyper))
        elif entries:
            total, decay = entries[0].grad, self.rule.decay(entries[0].hyper)
            for entry in entries[1:]:
                total, decay = total + entry.grad, decay * self.rule.decay(entry.hyper)
            weight.update(columns, total / len(entries), self._hypers[weight.group], decay)
        weight.log = []

    def _show_due(self) -> None:
        for weight in self._weights:
            columns = [column for column, step in weight.due.items() if step <= self._step]
            weight.show(columns)
            for column in columns:
                del weight.due[column]
            self.events["in flight after a step"] += bool(weight.due)


class ReferenceAdamW(ReferenceOptimizer):
    """The oracle of `ZenFlowAdamW`."""

    rule = ADAMW


class ReferenceAdam(ReferenceOptimizer):
    """The oracle of `ZenFlowAdam`."""

    rule = ADAM


class ReferenceAdagrad(ReferenceOptimizer):
    """The oracle of `ZenFlowAdagrad`."""

    rule = ADAGRAD


class ReferenceLion(ReferenceOptimizer):
    """The oracle of `ZenFlowLion`."""

    rule = LION


class ReferenceSGD(ReferenceOptimizer):
    """The oracle of `ZenFlowSGD`."""

    rule = SGD


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
        rows, columns = _matrix(param, transposed).shape
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


def _has_columns(param: Tensor) -> bool:
    if param.dim() < 2 or param.numel() == 0:
        return False
    try:
        param.detach().view(-1, param.shape[-1])
    except RuntimeError:  # strides that no 2-D view has
        return False
    return True


def _matrix(tensor: Tensor, transposed: bool) -> Tensor:
    """A parameter or its gradient as [rows, columns]; without columns of its own, as one row."""
    if transposed:
        return tensor.t()
    if tensor.dim() < 2 or tensor.numel() == 0:
        return tensor.reshape(1, -1)
    return tensor.reshape(-1, tensor.shape[-1])
