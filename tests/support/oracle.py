"""The oracle: what the optimizers of `zenflow.family` compute, written as plainly as possible.

No device, no thread, no overlap: every state is one fp32 matrix a weight, every rule is one loop. It is slow and exists
to be read and to be compared with, bit for bit. All matrices of a `Weight` are `[rows, columns]`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zenflow.config import AUTO_SELECT_INTERVAL, AUTO_SELECT_OVERLAP, AUTO_UPDATE_INTERVAL, ZenFlowConfig
from zenflow.errors import UnsupportedError

Hyper = Mapping[str, float]
"""One group's hyperparameters at one step by name; betas are "beta1" and "beta2", a flag is 0 or 1."""

Moments = tuple[Tensor, ...]

Formula = Callable[[Tensor, Moments, Tensor, Sequence[int], Hyper], tuple[Tensor, Moments]]
"""(weights, moments, gradient, counts, hyperparameters) to the new weights and moments."""


@dataclass(frozen=True)
class ReferenceRule:
    """One way to update weights, and what the schedule must know of it."""

    formula: Formula
    moments: int
    defaults: Mapping[str, Any]
    """Of a parameter group, as in torch."""
    decoupled: bool
    """Whether weight decay is a factor on the weights instead of a part of the gradient."""
    ratio: str | None = None
    """Hyperparameter by which an update shrinks to the next one without a gradient; None: there is no next one."""

    guesses: bool = False
    """Whether an update has about the length lr in every weight, so that the sign of a gradient tells its share."""

    def coast(self, hyper: Hyper, missing: float) -> float:
        """How many times the last update is what the next `missing` ones add if no more gradients come."""
        if self.ratio is None:
            return 0.0
        r = hyper[self.ratio] if self.ratio else 1.0
        return missing if r == 1 else r * (1 - r**missing) / (1 - r)

    def guess(self, hyper: Hyper, missing: float) -> float:
        """How far a gradient moves a weight at once, where so many updates are missing."""
        return hyper["lr"] * (1 - hyper["beta1"] ** (missing + 1)) if self.guesses else 0.0

    def hyper(self, group: Mapping[str, Any]) -> Hyper:
        """A copy of what the group says now."""
        numbers = {name: float(group[name]) for name in self.defaults if name != "betas"}
        if "betas" in self.defaults:
            numbers["beta1"], numbers["beta2"] = (float(beta) for beta in group["betas"])
        return MappingProxyType(numbers)

    def decay(self, hyper: Hyper) -> float:
        """What one update's decoupled weight decay multiplies the weight by."""
        return 1 - hyper["lr"] * hyper["weight_decay"] if self.decoupled else 1.0

    def counts(self, hyper: Hyper) -> bool:
        """Whether an update is counted: SGD counts those of its momentum."""
        return hyper["momentum"] != 0 if "momentum" in hyper else True

    def initial(self, group: Mapping[str, Any]) -> list[float]:
        """What every moment begins with."""
        return [float(group.get("initial_accumulator_value", 0))] * self.moments


def adam(w: Tensor, moments: Moments, g: Tensor, counts: Sequence[int], h: Hyper) -> tuple[Tensor, Moments]:
    """Adam with L2 weight decay."""
    return decoupled_adam(w, moments, _penalised(g, w, h), counts, h)


def decoupled_adam(w: Tensor, moments: Moments, g: Tensor, counts: Sequence[int], h: Hyper) -> tuple[Tensor, Moments]:
    """AdamW, but for the factor on the weights."""
    m, v = moments
    step_size = _of_counts(counts, w, lambda c: h["lr"] / (1 - h["beta1"] ** c))
    inverse_root = _of_counts(counts, w, lambda c: 1 / math.sqrt(1 - h["beta2"] ** c))
    m = m + (g - m) * (1 - h["beta1"])
    v = v * h["beta2"] + (g * (1 - h["beta2"])) * g
    return w - (m * step_size) / (_root(v) * inverse_root + h["eps"]), (m, v)


def adagrad(w: Tensor, moments: Moments, g: Tensor, counts: Sequence[int], h: Hyper) -> tuple[Tensor, Moments]:
    """Adagrad."""
    g = _penalised(g, w, h)
    total = moments[0] + g * g
    rate = _of_counts(counts, w, lambda c: h["lr"] / (1 + (c - 1) * h["lr_decay"]))
    return w - (g * rate) / (_root(total) + h["eps"]), (total,)


def lion(w: Tensor, moments: Moments, g: Tensor, _: Sequence[int], h: Hyper) -> tuple[Tensor, Moments]:
    """Lion, but for the factor on the weights."""
    (m,) = moments
    towards = m + (g - m) * (1 - h["beta1"])
    sign = (towards > 0).float() - (towards < 0).float()
    sign[towards.isnan()] = math.nan
    return w - sign * h["lr"], (m + (g - m) * (1 - h["beta2"]),)


def sgd(w: Tensor, moments: Moments, g: Tensor, counts: Sequence[int], h: Hyper) -> tuple[Tensor, Moments]:
    """SGD; a column's momentum begins with its first gradient whole."""
    g = _penalised(g, w, h)
    if h["momentum"] == 0:
        return w - g * h["lr"], moments
    dampened = moments[0] * h["momentum"] + g * (1 - h["dampening"])
    b = torch.where(torch.tensor([c == 1 for c in counts], device=g.device), g, dampened)
    step = g + b * h["momentum"] if h["nesterov"] else b
    return w - step * h["lr"], (b,)


_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}

ADAMW = ReferenceRule(decoupled_adam, 2, {**_ADAM, "weight_decay": 1e-2}, decoupled=True, ratio="beta1", guesses=True)
ADAM = ReferenceRule(adam, 2, {**_ADAM, "weight_decay": 0.0}, decoupled=False, ratio="beta1", guesses=True)
ADAGRAD = ReferenceRule(
    adagrad,
    1,
    {"lr": 1e-2, "lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10},
    decoupled=False,
)
LION = ReferenceRule(lion, 1, {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0}, decoupled=True, ratio="")
SGD = ReferenceRule(
    sgd,
    1,
    {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
    decoupled=False,
    ratio="momentum",
)


def _sign(values: Tensor) -> Tensor:
    """-1, 0 or 1; 0 of NaN."""
    return (values > 0).float() - (values < 0).float()


def _of_counts(counts: Sequence[int], w: Tensor, scalar: Callable[[int], float]) -> Tensor:
    """[n] fp32 beside the weights: a scalar of each column, computed in double precision."""
    return torch.tensor([scalar(c) for c in counts], dtype=torch.float32, device=w.device)


def _penalised(g: Tensor, w: Tensor, h: Hyper) -> Tensor:
    """The gradient with L2 weight decay, which at 0 leaves it alone, be the weight infinite or not."""
    return g if h["weight_decay"] == 0 else g + w * h["weight_decay"]


def _root(v: Tensor) -> Tensor:
    """The nearest number, which torch's root of an fp32 number need not be."""
    return v.double().sqrt().float()


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
    proposed: set[int] | None = None  # that of this step, where buckets close by turns and it waits for the next one
    decided: bool = False  # whether "auto" has let the pending selection through
    chosen: bool = False  # whether a gradient that counted has chosen columns
    log: list[Entry] = field(default_factory=list)  # of the open windows; each bucket's has the newest of it
    due: dict[int, int] = field(default_factory=dict)  # applied column -> step after which it is visible
    decays: dict[int, float] = field(default_factory=dict)  # due column -> what its updates multiplied a weight with
    coming: dict[int, Tensor] = field(default_factory=dict)  # due column -> what it shows, where not its rounded master
    ahead: set[int] = field(default_factory=set)  # buckets that show something else than rounded masters, or will
    sign: Tensor | None = None  # [rows, columns] of this step's gradient of the columns that were deferred, 0 elsewhere
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
        self.select(set(self.offloaded[: self.selected_count]))
        self.chosen = not self.selects

    def leave(self) -> None:
        """Remember the weight, for `follow_writes`."""
        self.left = matrix(self.param.detach(), self.transposed).clone()

    def follow_writes(self) -> bool:
        """Take the masters from what somebody else wrote since `leave`; returns whether anybody did.

        What is due later counts on top of it. A weight that was what its master rounds to is read; where it showed
        something else, the master moves as far as the weight did.
        """
        now = matrix(self.param.detach(), self.transposed)
        if self.master is None or self.left is None or torch.equal(now, self.left):
            return False
        due = torch.zeros(self.columns, dtype=torch.bool, device=now.device)
        due[list(self.due)] = True
        written, change = now != self.left, now.float() - self.left.float()
        decays = torch.tensor([self.decays.get(c, 1.0) for c in range(self.columns)], device=now.device)
        late = self.master + decays * change
        read = torch.where(self.master.to(now.dtype) == self.left, now.float(), self.master + change)
        before = self.master
        self.master = torch.where(written, torch.where(due, late, read), before)
        for column, coming in self.coming.items():
            moved = coming.float() + (self.master[:, column] - before[:, column])
            self.coming[column] = torch.where(written[:, column], moved.to(now.dtype), coming)
        return True

    def top(self, importance: Tensor) -> set[int]:
        """The offloaded columns of greatest importance; ties go to the lower column. importance: `[columns]`."""
        order = torch.sort(importance[self.resident :], descending=True, stable=True).indices
        return {self.resident + int(place) for place in order[: self.selected_count]}

    def select(self, chosen: set[int]) -> None:
        """Make this the selection; the other offloaded columns take the host slots in order."""
        self.selected = chosen
        self.slot = {column: slot for slot, column in enumerate(c for c in self.offloaded if c not in chosen)}

    def bucket(self, column: int) -> int:
        """The bucket of a deferred column, over the whole model."""
        return self.first_bucket + self.slot[column] // self.bucket_slots

    def reselect(self, closing: Container[int]) -> int:
        """Follow the pending selection in buckets that close; returns how many columns moved each way."""
        if self.pending is None:
            return 0
        leaving = sorted(self.pending - self.selected)  # leave the deferred tier
        joining = sorted(self.selected - self.pending)
        pairs = zip(joining, leaving, strict=True)
        moving = [(column, partner) for column, partner in pairs if self.bucket(partner) in closing]
        for column, partner in moving:
            self.slot[column] = self.slot.pop(partner)
            self.selected = self.selected - {column} | {partner}
        if len(moving) == len(leaving):
            self.pending = None
        return len(moving)

    def planned_like(self, other: Weight) -> bool:
        """Whether two plans of this parameter split its columns alike."""
        return (self.resident, self.selected_count) == (other.resident, other.selected_count)

    def replan(self, new: Weight) -> None:
        """Take over another plan; state stays with its column. Nothing may be pending."""
        selects_anew = self.master is not None and not self.planned_like(new)
        self.resident, self.selected_count = new.resident, new.selected_count
        self.first_bucket, self.bucket_slots = new.first_bucket, new.bucket_slots
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
        """Round the masters of some columns, or what they are moved on to, into the weight."""
        at = torch.tensor(list(columns), dtype=torch.long, device=self.param.device)
        if self.master is None or not len(at):
            return
        seen = matrix(self.param.detach(), self.transposed).clone()
        seen[:, at] = self.master[:, at].to(seen.dtype)
        for column in at.tolist():
            if column in self.coming:
                seen[:, column] = self.coming[column]
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
    model_bytes = sum(p.numel() * p.element_size() for p in ordered if p.requires_grad and _has_columns(p))
    limit = min(config.bucket_bytes, max(1 << 20, model_bytes // 32))  # bytes of a bucket
    weights: list[Weight] = []
    buckets, room, kind = 0, 0, None  # so far; bytes that the last one has left; of which weights
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
        deferred, column_bytes = offloaded - selected, max(rows, 1) * param.element_size()
        bucket_slots = max(1, limit // column_bytes) if param.requires_grad else max(1, deferred)
        if param.requires_grad and deferred > bucket_slots:  # cut into buckets of its own
            first_bucket, buckets, room = buckets, buckets + -(-deferred // bucket_slots), 0
        else:
            if param.requires_grad and deferred:
                if kind != (param.dtype, transposed) or deferred * column_bytes > room:
                    buckets, room, kind = buckets + 1, limit, (param.dtype, transposed)
                room -= deferred * column_bytes
            first_bucket = max(0, buckets - 1)
        group = group_of[param]
        initial = rule.initial(groups[group])
        weights.append(Weight(param, group, rule, initial, transposed, resident, selected, bucket_slots, first_bucket))
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


class ReferenceOptimizer(torch.optim.Optimizer):
    """The oracle of one optimizer of the family: the same weights after every step.

    `events` counts what has happened, so that a test can tell that it exercised something; `closing_steps` are those in
    which a window closed.

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
            raise TypeError(f"there is no hyperparameter {unknown[0]}: there are {', '.join(self.rule.defaults)}")
        self.config = (config or ZenFlowConfig()).resolved()
        self.events: Counter[str] = Counter()
        self.closing_steps: list[int] = []
        self._next: ZenFlowConfig | None = None  # the knobs after the next step, where they were changed
        self._module = module
        self._weights: list[Weight] = []
        self._hypers: list[Hyper] = []  # of each group, in the last step
        self._step = 0
        self._window_steps = 0  # since all windows closed
        self._closed: dict[int, int] = {}  # the step in which the window of a bucket closed since
        super().__init__(params, {**self.rule.defaults, **hyper})

    def set_knobs(self, **knobs: Any) -> int:
        """Change knobs; the next step closes the window under the old ones, and then the new ones hold.

        Before the first step they hold at once. Several calls before one step add up.

        Returns:
            The step after which the new knobs hold, from 1.

        Raises:
            ConfigError: a knob is none that can be changed, or its value is not allowed; nothing has changed then.
        """
        changed = (self._next or self.config).changed(knobs)
        if self._step == 0:
            self.config = changed
        else:
            self._next = changed
        return self._step + 1

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; after the first step this flushes and plans the whole model anew.

        Raises:
            ValueError: a parameter is in another group already; as in torch.
        """
        super().add_param_group(param_group)
        if self._step > 0:
            self.flush()
            self._plan_anew(self.config)
            self.events["groups added"] += 1

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step: the resident and selected columns now, the deferred ones logged, due updates made visible.

        Raises:
            UnsupportedError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if any(p.grad is not None and p.grad.is_sparse for group in self.param_groups for p in group["params"]):
            raise UnsupportedError("sparse gradients are not supported; use torch.optim.SparseAdam for that parameter")
        if self._step == 0:
            self._weights = plan(self.param_groups, self.config, self._module, self.rule)
        self._follow_writes()
        self._step += 1
        self._window_steps += 1
        self._hypers = [self.rule.hyper(group) for group in self.param_groups]
        full = self._window_is_full()  # before this step's gradients count: "auto" decides on those of the steps before
        factor, skipped = self._factor_and_skip()
        for weight in self._weights:
            if weight.param.grad is None:
                self.events["void, no gradient"] += weight.master is not None
            else:
                self._take(weight, weight.param.grad, factor, skipped)
        self._end_step(full)
        self._leave_weights()
        return loss

    @torch.no_grad()
    def flush(self) -> None:
        """Close the window here and make everything visible."""
        self._follow_writes()
        self._close(at_once=True, exact=True)
        self._show_due()
        self._show_masters()
        self._leave_weights()

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

    def _follow_writes(self) -> None:
        """What somebody else has written to weights since the last step counts; pending updates come on top of it."""
        for weight in self._weights:
            in_flight = bool(weight.due)
            self.events["written, in flight" if in_flight else "written"] += weight.follow_writes()

    def _leave_weights(self) -> None:
        for weight in self._weights:
            weight.leave()

    def _weight(self, param: Tensor) -> Weight:
        return next(weight for weight in self._weights if weight.param is param)

    def _factor_and_skip(self) -> tuple[Tensor | None, bool]:
        norms = [weight.norm(weight.param.grad) for weight in self._weights if weight.param.grad is not None]
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        factor = None if grad_scale is None else 1.0 / grad_scale
        skipped = found_inf is not None and bool(found_inf != 0)
        if norms and (self.config.max_grad_norm is not None or self.config.skip_nonfinite):
            norm = torch.linalg.vector_norm(torch.stack(norms))
            if factor is not None:
                norm = norm * factor
            if self.config.skip_nonfinite:
                skipped = skipped or not bool(norm.isfinite())
            if self.config.max_grad_norm is not None:
                coef = (self.config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
                factor = coef if factor is None else factor * coef
        return factor, skipped

    def _take(self, weight: Weight, raw: Tensor, factor: Tensor | None, skipped: bool) -> None:
        grad = matrix(raw, weight.transposed)
        importance = importance_of(grad)
        every = AUTO_SELECT_INTERVAL if self.config.select_interval == "auto" else self.config.select_interval
        if weight.master is None:
            weight.start()
        if weight.selects and ((self._step - 1) % every == 0 or not weight.chosen):
            weight.proposed = set(weight.selected) if skipped else weight.top(importance)
            weight.chosen = weight.chosen or not skipped
        grad = grad.float().clone() if factor is None else grad.float() * factor
        hyper = self._hypers[weight.group]
        if weight.slot and not skipped:
            weight.sign = torch.zeros_like(grad)
            deferred, times = sorted(weight.slot), 1.0 if factor is None else _sign(torch.as_tensor(factor))
            weight.sign[:, deferred] = _sign(matrix(raw, weight.transposed)[:, deferred]) * times
        if weight.slot:
            weight.log.append(Entry(self._step, grad, hyper, skipped))
        if skipped:
            self.events["void, skipped"] += 1
            return
        if weight.selects or self._splits_anew():
            weight.scores = importance
        if weight.selects:
            grad_scale = getattr(self, "grad_scale", None)
            weight.gather(importance, 1.0 if grad_scale is None else 1.0 / float(grad_scale))
        now = [*range(weight.resident), *sorted(weight.selected)]
        weight.update(now, grad, hyper, self.rule.decay(hyper))
        weight.show(now)

    def _window_is_full(self) -> bool:
        """Whether all windows close."""
        if self.config.window_phase == "staggered":
            return False
        if self.config.update_interval != "auto":
            return self._window_steps >= self.config.update_interval
        if self._window_steps >= self.config.max_update_interval:
            return True
        seen = [weight.energy for weight in self._weights if weight.energy.steps > 0]
        if not seen:
            return self._window_steps >= min(AUTO_UPDATE_INTERVAL, self.config.max_update_interval)
        self.events["decisions on an ulp"] += any(energy.hinges_on_an_ulp for energy in seen)
        agree = sum(energy.agrees for energy in seen) / len(seen) >= self.config.auto_ratio
        self.events["closed by agreement" if agree else "kept open by disagreement"] += 1
        return agree and self._window_steps >= 2

    def _splits_anew(self) -> bool:
        new = self._next or self.config
        return (new.topk_ratio, new.offload_ratio) != (self.config.topk_ratio, self.config.offload_ratio)

    def _end_step(self, full: bool) -> None:
        warming_up, before = self._step <= self.config.full_warm_up_rounds, self.config
        at_once = warming_up or not before.overlap_step
        everything = warming_up or full or self._next is not None
        if everything:
            self._take_selections()
            self.closing_steps.append(self._step)
            if self._splits_anew():
                assert self._next is not None
                self._plan_anew(self._next)
                self.events["splits changed"] += 1
                at_once = True
            else:
                self._close(at_once)
                self.events["knobs changed"] += self._next is not None
                self.config = self._next or self.config
            self._next = None
        elif self.config.window_phase == "staggered":
            turn = self._window_steps % self.config.longest_window
            self._close(at_once, turn=turn)
            if turn == 0:
                self.closing_steps.append(self._step)
        self._take_selections()
        self._show_due()
        self._guess(before, at_once)

    def _guess(self, config: ZenFlowConfig, at_once: bool) -> None:
        """Move what is deferred against the signs of this step's gradients, where its update is not there yet."""
        buckets = max((weight.first_bucket + max(1, weight.bucket_count) for weight in self._weights), default=1)
        interval, lag = config.longest_window, min(config.lag, config.longest_window)
        for weight in self._weights:
            sign, weight.sign = weight.sign, None
            if sign is None or config.look_ahead != "guess" or not self.rule.guesses:
                continue
            due = lag if config.window_phase == "staggered" else 1 + weight.first_bucket * lag // buckets
            missing = (interval - 1) / 2 + (due if config.overlap_step else 0)
            moved = sign * self.rule.guess(self._hypers[weight.group], missing)
            shown = matrix(weight.param.detach(), weight.transposed).clone()
            for column in weight.slot:
                closed = self._closed.get(weight.bucket(column), self._step - self._window_steps) == self._step
                if not (at_once and closed):
                    if not closed:  # else what is on its way replaces it
                        weight.ahead.add(weight.bucket(column))
                    shown[:, column] = (shown[:, column].float() - moved[:, column]).to(shown.dtype)
                    self.events["columns guessed"] += 1
            weight.param.detach().copy_((shown.t() if weight.transposed else shown).reshape(weight.param.shape))

    def _take_selections(self) -> None:
        for weight in self._weights:
            if weight.proposed is not None:
                weight.pending, weight.proposed, weight.decided = weight.proposed, None, False

    def _plan_anew(self, config: ZenFlowConfig) -> None:
        """Close the window, make everything visible and go on with these knobs."""
        planned = plan(self.param_groups, config, self._module, self.rule)
        known = {weight.param: weight for weight in self._weights}
        for new in planned:
            if new.param in known and not new.planned_like(known[new.param]):
                known[new.param].pending = None  # it is going to choose among other columns
        self._close(at_once=True, exact=True)
        self._show_masters()
        self.config = config
        for new in planned:
            if new.param in known:
                self.events["plans changed"] += not new.planned_like(known[new.param])
                known[new.param].replan(new)
        self._weights = [known.get(new.param, new) for new in planned]

    def _close(self, at_once: bool, exact: bool = False, turn: int | None = None) -> None:
        """Close the windows of all buckets, or of those whose turn it is."""
        buckets = max((weight.first_bucket + max(1, weight.bucket_count) for weight in self._weights), default=1)
        closing = [b for b in range(buckets) if turn in (None, b * self.config.longest_window // buckets)]
        if not closing:
            return
        self._drop_selections_like_the_old()
        for weight in self._weights:
            weight.energy = Energy()
            own = [column for column in weight.slot if weight.bucket(column) in closing]
            self.events["in flight at a close"] += any(column in weight.due for column in own)
            weight.show([column for column in own if column in weight.due])
            for column in own:
                weight.due.pop(column, None)
                weight.coming.pop(column, None)
            for bucket in closing:
                columns = sorted(column for column in own if weight.bucket(column) == bucket)
                lag = min(self.config.lag, self._step - self._since(bucket))
                share = lag if self.config.window_phase == "staggered" else 1 + bucket * lag // buckets
                self._close_bucket(weight, bucket, columns, self._step if at_once else self._step + share, exact)
            weight.show([column for column in own if weight.due.get(column, self._step + 1) <= self._step])
            weight.show([column for column in own if column in (weight.pending or ())])
            self.events["columns moved"] += weight.reselect(closing)
            self.events["selections half followed"] += weight.pending is not None and turn is not None
        self._closed |= dict.fromkeys(closing, self._step)
        if turn is None:
            self._window_steps, self._closed = 0, {}
        for weight in self._weights:
            since = min(self._since(bucket) for bucket in range(buckets))
            weight.log = [entry for entry in weight.log if entry.step > since]

    def _since(self, bucket: int) -> int:
        """The last step whose gradients are not in the open window of a bucket."""
        return self._closed.get(bucket, self._step - self._window_steps)

    def _close_bucket(self, weight: Weight, bucket: int, columns: list[int], later: int, exact: bool) -> None:
        since = self._since(bucket)
        window_steps, ahead = self._step - since, bucket in weight.ahead
        entries = [entry for entry in weight.log if entry.step > since]
        weight.ahead.discard(bucket)
        if not columns or not window_steps or not (entries or ahead):
            return
        last, coasted, decay = self._apply(weight, columns, entries)
        for column in columns:
            leaving = weight.pending is not None and column in weight.pending
            weight.decays[column] = decay
            weight.due[column] = due = self._step if leaving else later
            times = coasted((window_steps - 1) / 2 + due - self._step)
            if times and self.config.look_ahead != "none" and not exact and not leaving:
                self.events["columns coasting"] += 1
                weight.ahead.add(bucket)
                assert weight.master is not None
                assert last is not None
                master = weight.master[:, column]
                weight.coming[column] = (master + (master - last[:, column]) * times).to(weight.param.dtype)

    def _drop_selections_like_the_old(self) -> None:
        """With an "auto" interval a selection changes only where too little of it would stay."""
        pending = [weight for weight in self._weights if weight.pending is not None and not weight.decided]
        for weight in pending:
            weight.decided = True
        if not pending or self.config.select_interval != "auto":
            return
        kept = sum(len(weight.selected.intersection(weight.pending or ())) for weight in pending)
        like_the_old = kept / sum(weight.selected_count for weight in pending) >= AUTO_SELECT_OVERLAP
        self.events["selections dropped" if like_the_old else "selections taken"] += 1
        if like_the_old:
            for weight in pending:
                weight.pending = None

    def _apply(
        self, weight: Weight, columns: list[int], entries: Sequence[Entry]
    ) -> tuple[Tensor | None, Callable[[float], float], float]:
        """The masters before the last update, how often it is repeated for so many missing ones, the decay of all."""
        last = weight.master
        entries = [entry for entry in entries if not entry.skipped]
        self.events["entries applied"] += len(entries)
        decays = [self.rule.decay(entry.hyper) for entry in entries] if self.rule.decoupled else []
        if self.config.deferred_update == "replay":
            for entry in entries:
                last = None if weight.master is None else weight.master.clone()
                weight.update(columns, entry.grad, entry.hyper, self.rule.decay(entry.hyper))
        elif entries:
            total, decay = entries[0].grad, self.rule.decay(entries[0].hyper)
            for entry in entries[1:]:
                total, decay = total + entry.grad, decay * self.rule.decay(entry.hyper)
            weight.update(columns, total / len(entries), self._hypers[weight.group], decay)
        hyper = entries[-1].hyper if entries else None
        return last, lambda missing: 0.0 if hyper is None else self.rule.coast(hyper, missing), math.prod(decays)

    def _show_masters(self) -> None:
        for weight in self._weights:
            weight.ahead = set()
            weight.show(weight.slot)

    def _show_due(self) -> None:
        for weight in self._weights:
            columns = [column for column, step in weight.due.items() if step <= self._step]
            weight.show(columns)
            for column in columns:
                del weight.due[column]
                weight.coming.pop(column, None)
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
